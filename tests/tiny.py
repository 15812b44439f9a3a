"""Tiny backbones, tokenizers and texts built in code: no network, no files, the same on every run.

Every vocabulary fits into the 300 ids of every backbone, so that any tokenizer goes with any of them; `TOKENIZERS` names the
one whose special ids a backbone's config declares.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE, MAX_POSITIONS, HIDDEN_SIZE, NUM_LAYERS = 300, 128, 32, 4

TEXTS = [
    "Good.",
    "Bad.",
    "A great film, truly wonderful and happy.",
    "The plot was bad and the sound was terrible.",
    "I love it",
    "no",
    "The room was clean, the staff were nice and the food was good.",
    "We waited 45 minutes and the soup was cold.",
    "10 out of 10, great!",
    "It scored 2.3 in the last test, which is bad.",
    "Happy with it: good price, nice colour, 100 percent great.",
    "The second part is a bit slow.",
    "wonderful",
    "It broke after 3 days.",
    "The view from the 25th floor is nice.",
    "Terrible. Never again!",
    "My children love the park and I love it too, a good day.",
    "The box was empty",
    "A nice story with a happy end",
    "Sad, slow and bad from start to end.",
    "Good {text}, good value.",
    "They sent 12 letters, 7.5 on average per week, and none of them was read.",
    "What a wonderful, wonderful evening it was",
    "terrible noise, bad light",
]
"""Short English texts of mixed length: with numbers, one with a brace; the longest stays well below `MAX_POSITIONS` tokens."""

POSITIVE = {"good", "great", "nice", "happy", "love", "wonderful"}
NEGATIVE = {"bad", "terrible", "sad", "slow", "cold", "never"}


def score_of(text: str) -> float:
    """Return the label of a text: 2.5, plus 0.75 for each positive word, minus 0.5 for each negative one."""
    words = re.findall("[a-z]+", text.lower())
    return 2.5 + 0.75 * sum(word in POSITIVE for word in words) - 0.5 * sum(word in NEGATIVE for word in words)


SCORES = [score_of(text) for text in TEXTS]
PAIRS = list(zip(TEXTS[::2], TEXTS[1::2], strict=True))
"""Pairs of texts; the first one of each has the higher score."""

CORPUS = [
    *TEXTS,
    *(f"Score: {number}" for number in (0, 1, 2, 3, 4, 5, 10, 10, 10, 10, 20, 25, 50, 100, 100)),
    *("Rate the text from 0 to 10.\nText: " + text + "\nScore:" for text in TEXTS),
]


def _fast(tokenizer: str, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer), **options)


def _add_around(tokenizer: Tokenizer, specials: Sequence[str], single: str, pair: str) -> None:
    tokenizer.add_special_tokens(list(specials))
    used = [(token, tokenizer.token_to_id(token)) for token in specials if token in single.split()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)


@lru_cache
def _byte_bpe(specials: tuple[str, ...], split_digits: bool = False, add_bos: bool = False) -> str:
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": list(specials), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, **options))
    if add_bos:
        _add_around(tokenizer, specials, f"{specials[1]} $A", f"{specials[1]} $A {specials[1]}:1 $B:1")
    return tokenizer.to_str()


def byte_bpe_tokenizer(add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE like GPT-2 and Llama 3: eos (0), no pad; `add_bos` starts each row with bos (1)."""
    eos, bos = "<|end_of_text|>", "<|begin_of_text|>"
    return _fast(_byte_bpe((eos, bos), add_bos=add_bos), eos_token=eos, bos_token=bos if add_bos else None)


def digit_bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE like SmolLM2: every digit a token of its own, bos (1), pad = eos (2), nothing added."""
    _, bos, eos = specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return _fast(_byte_bpe(specials, split_digits=True), bos_token=bos, eos_token=eos, pad_token=eos)


def _words(limit: int, lower: bool = False) -> list[str]:
    counts = Counter(re.findall("[A-Za-z]{2,}", " ".join(CORPUS).lower() if lower else " ".join(CORPUS)))
    return sorted(counts, key=lambda word: (-counts[word], word))[:limit]


@lru_cache
def _unigram() -> str:
    numbers = ["10", "▁10", "25", "100", "▁100", "▁5", "▁3"]
    letters, endings = ["▁", "\n", *string.printable[:94]], ["er", "ed", "ing", "th", "in", "or", "st", "ly", "es"]
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    words = _words(VOCAB_SIZE - len(specials) - len(numbers) - len(letters) - len(endings))
    pieces = dict.fromkeys(specials, 0.0) | dict.fromkeys(numbers, -5.0) | dict.fromkeys(endings, -6.5)
    pieces |= {"▁" + word: -4.0 - math.log(rank) for rank, word in enumerate(words, 1)}
    pieces |= {piece: -8.0 - 0.01 * rank for rank, piece in enumerate(letters)}
    tokenizer = Tokenizer(models.Unigram(list(pieces.items()), unk_id=specials.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    _add_around(tokenizer, specials, "<s> $A", "<s> $A <s>:1 $B:1")
    return tokenizer.to_str()


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a Unigram with "▁" like Llama 2 and Gemma: bos (0) in front, pad (1) on the left, eos (2), some numbers whole.

    It has no byte fallback: what is not printable ASCII becomes `<unk>` (3).
    """
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _fast(_unigram(), **specials, padding_side="left")


@lru_cache
def _wordpiece() -> str:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = string.digits + string.ascii_lowercase
    pieces = [*specials, *letters, *string.punctuation, *("##" + letter for letter in letters), "10", "##00", "##ing"]
    pieces += _words(VOCAB_SIZE - len(pieces), lower=True)
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _add_around(tokenizer, specials, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    return tokenizer.to_str()


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a WordPiece like BERT: lower case, [PAD] = 0, [CLS] = 2, [SEP] = 3, token types, `model_max_length` 128."""
    specials = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return _fast(_wordpiece(), **specials, model_max_length=MAX_POSITIONS, model_input_names=inputs)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "llama": lambda: byte_bpe_tokenizer(add_bos=True),
    "qwen3": digit_bpe_tokenizer,
    "gemma3": sentencepiece_tokenizer,
    "gpt2": byte_bpe_tokenizer,
    "bert": wordpiece_tokenizer,
    "roberta": sentencepiece_tokenizer,
}

_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": NUM_LAYERS}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.3}
_BERT = _SIZES | {"intermediate_size": 64}
_GROUPED = _BERT | {"num_key_value_heads": 2, "head_dim": 8}
_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_DROPOUTS = ["attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"]
_DROPOUTS += ["hidden_dropout_prob", "attention_probs_dropout_prob"]


def _set_dropout(config: PreTrainedConfig, value: float) -> PreTrainedConfig:
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _config(name: str, **options) -> PreTrainedConfig:
    return _set_dropout(getattr(transformers, name)(**options), 0.0)


def _gemma3() -> PreTrainedConfig:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    return _config("Gemma3TextConfig", **_GROUPED, **_IDS, **layers, query_pre_attn_scalar=8)


BACKBONES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _config("LlamaConfig", **_GROUPED, bos_token_id=1, eos_token_id=0),
    "qwen3": lambda: _config("Qwen3Config", **_GROUPED, bos_token_id=1, eos_token_id=2, pad_token_id=2),
    "gemma3": _gemma3,
    "gpt2": lambda: _config("GPT2Config", **_SIZES, n_inner=64, bos_token_id=0, eos_token_id=0),
    "bert": lambda: _config("BertConfig", **_BERT, pad_token_id=0),
    "roberta": lambda: _config("RobertaConfig", **_BERT | {"max_position_embeddings": MAX_POSITIONS + 2}, **_IDS),
}


def tiny_backbone(kind: str, seed: int = 0, dtype=torch.float32, dropout: float = 0.0) -> PreTrainedModel:
    """Return a tiny model of a `BACKBONES` kind in eval mode; the same seed gives the same weights in every dtype (rounded).

    Biases, norm weights and the row of the padding id are all random too, so that a norm left out or a mask ignored shows.
    The global random state is left as it was.
    """
    config = _set_dropout(BACKBONES[kind](), dropout)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.3 * torch.randn(module.embedding_dim)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            parameter.data = parameter.data.to(dtype)  # buffers keep fp32, as they do in a model that was loaded
    model.config.dtype = dtype
    return model.eval()


def save_backbone(kind: str, folder: str | Path, seed: int = 0, tokenizer=None, **options) -> Path:
    """Save a tiny backbone and a tokenizer (by default that of its kind) as a user has them on disk; return the folder."""
    tiny_backbone(kind, seed, **options).save_pretrained(folder)
    (TOKENIZERS[kind]() if tokenizer is None else tokenizer).save_pretrained(folder)
    return Path(folder)


def random_batch(
    kind: str, lengths: Sequence[int], padding_side: str = "right", seed: int = 0, pad_to: int | None = None
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, both int64 (len(lengths), max(lengths) or pad_to), with one row for each length.

    Padding holds random valid ids, so that a mask made from ids shows. RoBERTa derives positions from ids: there all
    padding is id 1 and no token is. The tokens of a row depend on seed and lengths alone, not on the padding.
    """
    width = max(lengths) if pad_to is None else pad_to
    if padding_side not in ("left", "right") or width < max(lengths):
        raise ValueError(f"padding_side {padding_side!r} or pad_to {pad_to} does not fit rows of {list(lengths)}.")
    tokens, padding = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1_000_003)
    input_ids = torch.randint(VOCAB_SIZE, (len(lengths), width), generator=padding)
    if kind == "roberta":
        input_ids.fill_(1)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        where = slice(0, length) if padding_side == "right" else slice(width - length, width)
        input_ids[row, where] = torch.randint(2 if kind == "roberta" else 0, VOCAB_SIZE, (length,), generator=tokens)
        attention_mask[row, where] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}
