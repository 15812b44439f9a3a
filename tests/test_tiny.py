"""The tiny models and tokenizers are what the other tests take them for, and the network is blocked."""

import os
import socket

import pytest
import torch
from tiny import (
    BACKBONES,
    HIDDEN_SIZE,
    MAX_POSITIONS,
    PAIRS,
    SCORES,
    TEXTS,
    TOKENIZERS,
    VOCAB_SIZE,
    byte_bpe_tokenizer,
    digit_bpe_tokenizer,
    random_batch,
    save_backbone,
    score_of,
    sentencepiece_tokenizer,
    tiny_backbone,
    wordpiece_tokenizer,
)
from transformers import AutoModel, AutoTokenizer

NUMBERS = "Score: 10, then 2.3 and 100 of 45 {x}\n$7"
DECODERS = ["llama", "qwen3", "gemma3", "gpt2"]


def states(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("kind", BACKBONES)
def test_states_depend_on_every_token_and_on_the_seed(kind):
    model, batch = tiny_backbone(kind), random_batch(kind, [12, 7])
    before = states(model, **batch)
    assert before.shape == (2, 12, HIDDEN_SIZE)
    assert before.isfinite().all()
    assert not model.training
    changed = batch["input_ids"].clone()
    changed[0, 5] = (changed[0, 5] + 1) % 290 + 5
    after = states(model, **batch | {"input_ids": changed})
    moved = (after - before).abs().amax(-1)
    assert (moved[0, 5:] > 1e-2).all()
    assert (moved[0, :5] > 1e-2).all() == (kind not in DECODERS)
    assert (moved[1] == 0).all()
    assert (states(tiny_backbone(kind, seed=1), **batch) - before).abs().amax() > 0.1


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_mask_and_the_positions_matter_and_padding_does_not(kind):
    model, lengths = tiny_backbone(kind), [12, 7, 1]
    right = random_batch(kind, lengths, "right", pad_to=16)
    left = random_batch(kind, lengths, "left", pad_to=20)
    positions = {} if kind == "roberta" else {"position_ids": (left["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    on_the_right, on_the_left = states(model, **right), states(model, **left, **positions)
    for row, length in enumerate(lengths):
        alone = states(model, input_ids=right["input_ids"][row : row + 1, :length])[0]
        torch.testing.assert_close(on_the_right[row, :length], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(on_the_left[row, 20 - length :], alone, atol=1e-5, rtol=0)
    if kind == "roberta":  # positions come from the ids and the mask is made of ones where it is missing
        unmasked = states(model, input_ids=left["input_ids"])
    else:
        unmasked = states(model, input_ids=left["input_ids"], **positions)
    assert (unmasked[1, -7:] - on_the_left[1, -7:]).abs().amax() > 0.05


@pytest.mark.parametrize("kind", BACKBONES)
def test_weights_are_fixed_by_the_seed_and_none_is_trivial(kind):
    torch.manual_seed(5)
    first = tiny_backbone(kind, seed=3).state_dict()
    drawn = torch.rand(1)
    second = tiny_backbone(kind, seed=3, dtype=torch.bfloat16).state_dict()
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor.to(torch.bfloat16)) or not tensor.is_floating_point(), name
        if tensor.is_floating_point():
            assert (tensor.std(dim=-1) > 0.03).all(), name


@pytest.mark.parametrize("kind", BACKBONES)
def test_dropout_only_where_asked(kind):
    batch = random_batch(kind, [9])
    for dropout in (0.0, 0.5):
        model = tiny_backbone(kind, dropout=dropout).train()
        assert torch.equal(states(model, **batch), states(model, **batch)) == (dropout == 0.0)


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_saved_backbone_comes_back_with_its_tokenizer(kind, tmp_path):
    folder = save_backbone(kind, tmp_path / "base", seed=2)
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    batch = random_batch(kind, [10, 4], "left")
    assert torch.equal(states(model, **batch), states(tiny_backbone(kind, seed=2), **batch))
    tokenizer, original = AutoTokenizer.from_pretrained(folder), TOKENIZERS[kind]()
    for text in (*TEXTS, NUMBERS):
        assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert tokenizer.special_tokens_map == original.special_tokens_map
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        declared = getattr(model.config, name)
        assert declared is None or getattr(original, name) in (None, declared), name


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_random_batch(padding_side):
    batch = random_batch("llama", [30, 2, 0], padding_side, seed=4, pad_to=32)
    again = random_batch("llama", [30, 2, 0], padding_side, seed=4, pad_to=32)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert torch.equal(ids, again["input_ids"])
    assert mask.sum(-1).tolist() == [30, 2, 0]
    assert mask[1].tolist() == ([1] * 2 + [0] * 30 if padding_side == "right" else [0] * 30 + [1] * 2)
    assert ids[mask == 0].unique().numel() > 20
    assert ids.max() < VOCAB_SIZE
    other = random_batch("llama", [30, 2, 0], "right")["input_ids"]
    assert torch.equal(random_batch("llama", [30, 2, 0], "left", pad_to=99)["input_ids"][0, -30:], other[0, :30])
    roberta = random_batch("roberta", [100, 50], padding_side)
    assert torch.equal(roberta["input_ids"] == 1, roberta["attention_mask"] == 0)
    with pytest.raises(ValueError, match="pad_to 3"):
        random_batch("llama", [4], padding_side, pad_to=3)


BUILDERS = [
    byte_bpe_tokenizer,
    lambda: byte_bpe_tokenizer(add_bos=True),
    digit_bpe_tokenizer,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
]
NAMES = ["byte_bpe", "byte_bpe_bos", "digit_bpe", "sentencepiece", "wordpiece"]


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_tokenizers_fit_the_backbones_and_round_trip(build):
    tokenizer = build()
    assert 150 < len(tokenizer) <= VOCAB_SIZE
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    assert max(len(tokenizer(text)["input_ids"]) for text in TEXTS) <= MAX_POSITIONS * 0.6
    for text in (*TEXTS, NUMBERS):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids
        back = tokenizer.decode(ids, skip_special_tokens=True)
        if build is wordpiece_tokenizer:  # lower case, and blanks are not kept
            back, text = "".join(back.split()), "".join(text.lower().split())
        assert back == text
    other = build()
    other.add_special_tokens({"pad_token": "<mine>"})
    assert len(build()) == len(tokenizer)
    assert build().pad_token == tokenizer.pad_token != "<mine>"
    assert build().get_vocab() == tokenizer.get_vocab()


def test_special_tokens():
    plain, with_bos, digits = byte_bpe_tokenizer(), byte_bpe_tokenizer(add_bos=True), digit_bpe_tokenizer()
    assert (plain.eos_token_id, plain.pad_token, plain.bos_token) == (0, None, None)
    assert (with_bos.eos_token_id, with_bos.pad_token, with_bos.bos_token_id) == (0, None, 1)
    assert with_bos("Good.")["input_ids"] == [1, *plain("Good.")["input_ids"]]
    assert plain.get_vocab() == with_bos.get_vocab()
    assert digits.pad_token_id == digits.eos_token_id == 2
    assert 2 not in digits("Good.")["input_ids"]
    pieces, words = sentencepiece_tokenizer(), wordpiece_tokenizer()
    assert (pieces.bos_token_id, pieces.pad_token_id, pieces.eos_token_id, pieces.unk_token_id) == (0, 1, 2, 3)
    assert pieces("Good.")["input_ids"][0] == 0
    assert 2 not in pieces("Good.")["input_ids"]
    assert pieces.padding_side == "left"
    pair = words("good", "bad")
    assert words.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "good", "[SEP]", "bad", "[SEP]"]
    assert pair["token_type_ids"] == [0, 0, 0, 1, 1]
    assert words.pad_token_id == 0


@pytest.mark.parametrize(
    ("build", "text", "tokens"),
    [
        (byte_bpe_tokenizer, "10", ["1", "0"]),
        (byte_bpe_tokenizer, "Score: 10", ["Score", ":", "Ġ10"]),
        (byte_bpe_tokenizer, "2.3", ["2", ".", "3"]),
        (digit_bpe_tokenizer, "10", ["1", "0"]),
        (digit_bpe_tokenizer, "Score: 10", ["Score", ":", "Ġ", "1", "0"]),
        (digit_bpe_tokenizer, "2.3", ["2", ".", "3"]),
        (sentencepiece_tokenizer, "10", ["▁10"]),
        (sentencepiece_tokenizer, "Score: 10", ["▁Score", ":", "▁10"]),
        (sentencepiece_tokenizer, "2.3", ["▁", "2", ".", "3"]),
        (sentencepiece_tokenizer, "110", ["▁", "1", "10"]),
        (wordpiece_tokenizer, "10", ["10"]),
        (wordpiece_tokenizer, "100", ["10", "##0"]),
        (wordpiece_tokenizer, "2.3", ["2", ".", "3"]),
    ],
)
def test_how_numbers_are_tokenised(build, text, tokens):
    assert build().tokenize(text) == tokens


def test_texts_and_their_scores():
    assert len(TEXTS) == len(SCORES) == len(set(TEXTS)) == 24
    assert len(PAIRS) == 12
    assert len(set(SCORES)) >= 6
    assert all(score_of(first) > score_of(second) for first, second in PAIRS)


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("hub.invalid", 443), ("2001:db8::1", 80)])
def test_the_network_is_blocked(address):
    with pytest.raises(RuntimeError, match="reached for the network"):
        socket.create_connection(address, timeout=1)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as client, pytest.raises(RuntimeError, match="reached for the network"):
        client.connect(address)


def test_the_loopback_is_open_and_the_cache_is_the_tests_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()
    first, second = socket.socketpair()
    first.close()
    second.close()
    assert "relish-tests-hf-home-" in os.environ["HF_HOME"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
