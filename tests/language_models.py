"""What the tests of number grids share: tiny causal language models, prompts, and every number scored by a forward of its own."""

from collections.abc import Sequence

import torch
import transformers
from tiny import _BERT, _GROUPED, _SIZES, BACKBONES, TEXTS, TOKENIZERS, _config, _set_dropout
from transformers import AutoModelForCausalLM, PreTrainedModel

from modeling_relish import RelishForSequenceRegression
from modeling_relish.number_grid_relish import NumberGrid

TEMPLATE = "Text: {text}\nScore:"
WINDOW = 8
"""Of the tiny Gemma 3 and Mistral: much shorter than a prompt."""

_OTHERS = {
    "mistral": lambda: _config("MistralConfig", **_GROUPED, sliding_window=WINDOW, bos_token_id=1, eos_token_id=0),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4, bos_token_id=1, eos_token_id=0
    ),
    "lfm2": lambda: _config("Lfm2Config", **_GROUPED, layer_types=["conv", "full_attention"] * 2, eos_token_id=0),
    "bloom": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4, eos_token_id=0),
    "recurrent_gemma": lambda: _config(
        "RecurrentGemmaConfig",
        **_GROUPED,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
        bos_token_id=1,
        eos_token_id=0,
    ),
    "gpt_neo": lambda: _config(
        "GPTNeoConfig",
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "falcon": lambda: _config("FalconConfig", **_SIZES, alibi=True, bos_token_id=1, eos_token_id=0),
    "gpt_neox": lambda: _config("GPTNeoXConfig", **_BERT, bos_token_id=1, eos_token_id=0),
}
KINDS = ("llama", "qwen3", "gemma3", "gpt2", "mistral")
"""The architectures whose numbers are all found in one pass."""


def tiny_language_model(
    kind: str, seed: int = 0, dropout: float = 0.0, kernel: str = "sdpa", **settings
) -> PreTrainedModel:
    """Return a tiny causal language model in eval mode, biases and norms random; torch's random state is left as it was."""
    config = _set_dropout((BACKBONES | _OTHERS)[kind](), dropout)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "mixer" not in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def grid_model(
    language_model=None, grid=(1, 2, 3, 4, 5), kind: str = "llama", **settings
) -> RelishForSequenceRegression:
    """Return a model with a number_grid head over a tiny language model or what is given."""
    given = language_model if language_model is not None else tiny_language_model(kind)
    settings = {"prompt_template": TEMPLATE, "tokenizer": TOKENIZERS.get(kind, TOKENIZERS["llama"])(), **settings}
    return RelishForSequenceRegression.from_backbone(given, head_type="number_grid", number_grid=grid, **settings)


def prompts(tokenizer, texts: Sequence[str] = TEXTS, template: str = TEMPLATE) -> list[list[int]]:
    """Return the prompts' token ids, by the tokenizer alone."""
    return [tokenizer(template.replace("{text}", text))["input_ids"] for text in texts]


def number_tokens(grid: NumberGrid, tokenizer, template: str = TEMPLATE) -> tuple[tuple[int, ...], ...]:
    """Return the grid's tokens after the template."""
    return grid.resolve(tokenizer, template).tokens


def padded(rows: Sequence[Sequence[int]], side: str = "right", width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask; the padding holds ids that are tokens too, so that a mask made from ids shows."""
    width = max(width, *map(len, rows))
    ids = torch.arange(width).expand(len(rows), width) % 7 + 3
    ids, mask = ids.clone(), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return ids, mask


def brute_force(model, rows: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return (B, G) log p(sequence | row) in fp64: each by a forward of its own, without padding and without a mask."""
    found = []
    for row in rows:
        for sequence in sequences:
            logits = model(input_ids=torch.tensor([[*row, *sequence[:-1]]])).logits[0, len(row) - 1 :].double()
            shifted = logits - logits.max(dim=-1, keepdim=True).values
            log_softmax = shifted - shifted.exp().sum(-1, keepdim=True).log()
            found.append(sum(log_softmax[i, token] for i, token in enumerate(sequence)))
    return torch.stack(found).view(len(rows), len(sequences))


def save_tiny_llama(folder):
    """Save a tiny Llama with its output layer, and a tokenizer; return the folder's name."""
    tiny_language_model("llama").save_pretrained(folder)
    TOKENIZERS["llama"]().save_pretrained(folder)
    return str(folder)
