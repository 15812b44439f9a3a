"""Numbers that a language model writes: against a loop of argmax over whole prompts, without cache, padding or batches."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import KINDS, TEMPLATE, prompts, tiny_language_model
from peft import LoraConfig, get_peft_model
from tiny import TEXTS, TOKENIZERS, byte_bpe_tokenizer

from modeling_relish.decoding import decode_numbers, parse_number

EXAMPLES = [("A good one.", 4.5), ("Bad, {really}.", 1), ("It is.", 3.333)]
SHOWN = "Text: A good one.\nScore: 4.50\n\nText: Bad, {really}.\nScore: 1.00\n\nText: It is.\nScore: 3.33\n\n"
MAKERS = {kind: TOKENIZERS[kind] for kind in ("llama", "qwen3", "gemma3", "gpt2")} | {"mistral": TOKENIZERS["llama"]}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 3.8\n", 3.8),
        ("3.8\n4.0\n", 3.8),
        ("\n\n 7", 7.0),
        ("-2", -2.0),
        ("+2", 2.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("  4\t", 4.0),
        ("3.8 points", None),
        ("3,8", None),
        ("four", None),
        ("4/5", None),
        ("nan", None),
        ("inf", None),
        ("-Infinity", None),
        ("1e999", None),
        ("1_000", None),
        ("", None),
        (" \n ", None),
        ("0x10", None),
        ("--2", None),
    ],
)
def test_first_line_is_a_finite_number_or_nothing(text, number):
    assert parse_number(text) == number


def argmax_loop(model, tokenizer, ids, max_new_tokens=8):
    """Return the text that comes after the prompt's ids, the token of the largest logit each time."""
    written = []
    for _ in range(max_new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1].argmax())
        written.append(token)
        if token == model.config.eos_token_id:
            break
    return tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.parametrize("kind", [*KINDS, "lfm2"])
def test_greedy_answers_are_those_of_argmax_in_the_order_of_the_rows(kind):
    model = tiny_language_model(kind)
    tokenizer = MAKERS.get(kind, TOKENIZERS["llama"])()
    expected = [argmax_loop(model, tokenizer, ids) for ids in prompts(tokenizer, TEXTS[:12])]
    for batch_size in (1, 5, 64):
        found = decode_numbers(model, tokenizer, TEXTS[:12], prompt_template=TEMPLATE, batch_size=batch_size)
        assert found.texts == [[text] for text in expected]
    assert len(set(expected)) > 1


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*KINDS, "lfm2"])
def test_examples_shown_once_are_examples_written_into_every_prompt(kind, kernel):
    tokenizer = MAKERS.get(kind, TOKENIZERS["llama"])()
    settings = {"n_positions": 512} if kind == "gpt2" else {}
    model = tiny_language_model(kind, kernel=kernel, **settings)
    rows = TEXTS[:6]
    expected = [argmax_loop(model, tokenizer, ids) for ids in prompts(tokenizer, [*rows], SHOWN + TEMPLATE)]
    for batch_size in (1, 4, 16):
        found = decode_numbers(
            model, tokenizer, rows, prompt_template=TEMPLATE, examples=EXAMPLES, batch_size=batch_size
        )
        assert found.texts == [[text] for text in expected]
    alone = decode_numbers(model, tokenizer, rows, prompt_template=TEMPLATE)
    assert found.texts != alone.texts  # they are looked at


def test_a_window_of_a_kind_of_its_own_counts_no_padding_behind_the_examples():
    tokenizer, model = (
        TOKENIZERS["llama"](),
        tiny_language_model("gpt_neo", kernel="eager", max_position_embeddings=512, window_size=40),
    )
    rows = TEXTS[:12]
    alone = [
        decode_numbers(model, tokenizer, [row], prompt_template=TEMPLATE, examples=EXAMPLES).texts[0] for row in rows
    ]
    found = decode_numbers(model, tokenizer, rows, prompt_template=TEMPLATE, examples=EXAMPLES, batch_size=6)
    assert found.texts == alone
    assert len(set(map(tuple, alone))) > 1


def test_prompt_that_ends_in_white_space_has_its_label_right_behind():
    tokenizer, model = TOKENIZERS["qwen3"](), tiny_language_model("qwen3")
    template, shown = "Text: {text}\nScore: ", SHOWN
    expected = [argmax_loop(model, tokenizer, ids) for ids in prompts(tokenizer, TEXTS[:4], shown + template)]
    found = decode_numbers(model, tokenizer, TEXTS[:4], prompt_template=template, examples=EXAMPLES)
    assert found.texts == [[text] for text in expected]


def test_examples_run_once_and_in_eval_mode():
    tokenizer, exact = TOKENIZERS["llama"](), tiny_language_model("llama")
    expected = decode_numbers(exact, tokenizer, TEXTS, prompt_template=TEMPLATE, examples=EXAMPLES).texts
    model = tiny_language_model("llama", dropout=0.5).train()
    lengths = []
    hook = model.register_forward_pre_hook(
        lambda _m, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = decode_numbers(model, tokenizer, TEXTS, prompt_template=TEMPLATE, examples=EXAMPLES, batch_size=6)
    hook.remove()
    assert found.texts == expected
    assert model.training
    assert lengths[0] == len(tokenizer(SHOWN.rstrip())["input_ids"])
    assert sum(lengths[1:]) <= sum(map(len, prompts(tokenizer))) + (8 + 2) * len(TEXTS)  # tokens written, and the gap


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_settings_of_the_checkpoint_do_not_bend_the_answers():
    tokenizer, model = TOKENIZERS["llama"](), tiny_language_model("llama")
    greedy, drawn = {}, {"num_samples": 3}
    expected = [
        decode_numbers(model, tokenizer, TEXTS[:6], prompt_template=TEMPLATE, **k).texts for k in (greedy, drawn)
    ]
    bent = {"repetition_penalty": 9.0, "top_k": 1, "min_new_tokens": 5, "num_beams": 2, "no_repeat_ngram_size": 1}
    bent |= {"suppress_tokens": list(range(100)), "do_sample": True, "temperature": 0.1}
    for name, value in bent.items():
        setattr(model.generation_config, name, value)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))  # which changes nothing at first
    for asked in (model, adapted):
        found = [
            decode_numbers(asked, tokenizer, TEXTS[:6], prompt_template=TEMPLATE, **k).texts for k in (greedy, drawn)
        ]
        assert found == expected
    assert {name: getattr(model.generation_config, name) for name in bent} == bent


def test_samples_are_drawn_by_their_seed_and_leave_torchs_random_state_alone():
    tokenizer, model = TOKENIZERS["llama"](), tiny_language_model("llama")

    def drawn(seed, **kwargs):
        return decode_numbers(
            model, tokenizer, TEXTS[:5], prompt_template=TEMPLATE, num_samples=6, seed=seed, batch_size=2, **kwargs
        )

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.texts == again.texts != other.texts
    assert [len(row) for row in first.texts] == [6] * 5
    assert len({text for row in first.texts for text in row}) > 10
    cold = drawn(1, temperature=1e-4)
    greedy = decode_numbers(model, tokenizer, TEXTS[:5], prompt_template=TEMPLATE)
    assert cold.texts == [row * 6 for row in greedy.texts]


@pytest.mark.parametrize("shown", [[], EXAMPLES], ids=["alone", "after examples"])
@pytest.mark.parametrize("kind", [*KINDS, "lfm2"])
def test_samples_are_those_of_prompts_that_run_anew_for_every_answer(kind, shown):
    tokenizer = MAKERS.get(kind, TOKENIZERS["llama"])()
    model = tiny_language_model(kind, **({"n_positions": 512} if kind == "gpt2" else {}))
    template = SHOWN + TEMPLATE if shown else TEMPLATE
    # One length: examples stand before the padding here and behind it in a prompt that is written out.
    rows = ["A b c f.", "A b c g."] if shown else TEXTS[:4]
    ids = sorted(prompts(tokenizer, rows, template), key=lambda row: -len(row))
    width = len(ids[0])
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids for _ in range(5)])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids for _ in range(5)])
    torch.manual_seed(3)
    written = model.generate(
        padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=6, pad_token_id=0, use_cache=False
    )
    expected = tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
    found = decode_numbers(
        model, tokenizer, rows, prompt_template=TEMPLATE, examples=shown, num_samples=5, seed=3, max_new_tokens=6
    )
    assert sorted(map(sorted, found.texts)) == sorted(sorted(expected[i : i + 5]) for i in range(0, len(expected), 5))


def test_samples_follow_the_models_own_distribution():
    tokenizer, model = TOKENIZERS["llama"](), tiny_language_model("llama")
    with torch.no_grad():
        p = model(input_ids=torch.tensor(prompts(tokenizer, TEXTS[:1]))).logits[0, -1].double().softmax(-1)
    by_text = {}
    for token in range(300):
        text = tokenizer.decode([token], skip_special_tokens=True)
        by_text[text] = by_text.get(text, 0.0) + float(p[token])
    (texts,) = decode_numbers(
        model, tokenizer, TEXTS[:1], prompt_template=TEMPLATE, num_samples=4000, max_new_tokens=1, batch_size=1
    ).texts
    for text, share in by_text.items():
        assert texts.count(text) / 4000 == pytest.approx(share, abs=5 * math.sqrt(share / 4000) + 1e-3)


class Speaker(torch.nn.Module):
    """A language model's stand-in that says one of its lines after a prompt; which one, the prompt's last token decides."""

    config = SimpleNamespace(get_text_config=lambda: None)
    device = torch.device("cpu")

    def __init__(self, tokenizer, lines):
        super().__init__()
        self.tokenizer, self.lines, self.calls = tokenizer, lines, 0
        self.generation_config = SimpleNamespace(bos_token_id=None, eos_token_id=0, pad_token_id=None)

    def generate(self, input_ids, attention_mask, max_new_tokens, pad_token_id, **kwargs):
        said = [
            self.tokenizer(self.lines[(self.calls + i) % len(self.lines)])["input_ids"] for i in range(len(input_ids))
        ]
        self.calls += len(input_ids)
        width = max(map(len, said))
        return torch.cat([input_ids, torch.tensor([s + [0] * (width - len(s)) for s in said])], dim=1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_is_no_number_counts_as_zero_and_is_counted(batch_size):
    tokenizer = byte_bpe_tokenizer()
    texts = ["a b c d e", "a b c d", "a b c", "a b", "a"]  # the longest comes first, so they are asked in this order
    lines = [" 4.5\n", " good", "-2", "nan", "3\n\nText:"]
    found = decode_numbers(Speaker(tokenizer, lines), tokenizer, texts, prompt_template=TEMPLATE, batch_size=batch_size)
    assert (found.values.tolist(), found.not_numbers) == ([4.5, 0.0, -2.0, 0.0, 3.0], 2)
    assert found.values.dtype == np.float64
    backwards = decode_numbers(Speaker(tokenizer, lines), tokenizer, texts[::-1], prompt_template=TEMPLATE)
    assert backwards.values.tolist() == [3.0, 0.0, -2.0, 0.0, 4.5]
    drawn = decode_numbers(
        Speaker(tokenizer, ["4", "8", "x"]), tokenizer, texts, prompt_template=TEMPLATE, num_samples=3
    )
    assert (drawn.values.tolist(), drawn.not_numbers) == ([4.0] * 5, 5)
    assert [len(row) for row in drawn.texts] == [3] * 5


def test_no_rows_are_no_answers_and_a_pair_is_a_row():
    tokenizer, model = TOKENIZERS["llama"](), tiny_language_model("llama")
    none = decode_numbers(model, tokenizer, [], prompt_template=TEMPLATE)
    assert (none.values.shape, none.texts, none.not_numbers) == ((0,), [], 0)
    template = "{a} / {b} ="
    ids = tokenizer("x y / {z} =")["input_ids"]
    rows = [("x y", "{z}"), {"a": "x y", "b": "{z}"}]
    found = decode_numbers(model, tokenizer, rows, prompt_template=template)
    assert found.texts == [[argmax_loop(model, tokenizer, ids)]] * 2


def test_long_rows_are_cut_behind_examples_as_without():
    tokenizer, model = TOKENIZERS["qwen3"](), tiny_language_model("qwen3")
    long, end = "123456789" * 12, len(tokenizer("Text: \nScore:")["input_ids"])
    (kept,) = prompts(tokenizer, [long[: 40 - end]])
    (behind,) = prompts(tokenizer, [long[: 40 - end]], SHOWN + TEMPLATE)
    assert len(kept) == 40
    for examples, ids in (((), kept), (EXAMPLES, behind)):
        found = decode_numbers(model, tokenizer, [long], prompt_template=TEMPLATE, max_length=40, examples=examples)
        assert found.texts == [[argmax_loop(model, tokenizer, ids)]]


def test_prompt_that_begins_in_the_gap_between_examples_is_cut_behind_the_last_label():
    tokenizer, model = TOKENIZERS["qwen3"](), tiny_language_model("qwen3")
    template = "\n\n{text}\nScore:"  # "\n\n\n\n" may be one token
    found = decode_numbers(model, tokenizer, TEXTS[:3], prompt_template=template, examples=[("a", 1), ("b", 2)])
    shown = "\n\na\nScore: 1\n\n\n\nb\nScore: 2\n\n"
    expected = [argmax_loop(model, tokenizer, ids) for ids in prompts(tokenizer, TEXTS[:3], shown + template)]
    assert found.texts == [[text] for text in expected]


def test_examples_that_lie_close_together_are_shown_apart():
    tokenizer, model = TOKENIZERS["qwen3"](), tiny_language_model("qwen3")
    for labels, shown in (
        ((0.0012, 0.0987), ("0.001", "0.099")),
        ((1 / 3, 4.5), ("0.33", "4.50")),
        ((2, 2), ("2", "2")),
    ):
        found = decode_numbers(
            model, tokenizer, ["c"], prompt_template=TEMPLATE, examples=list(zip("ab", labels, strict=True))
        )
        prompt = "\n\n".join([*(TEMPLATE.format(text=t) + f" {n}" for t, n in zip("ab", shown, strict=True)), ""])
        ids = tokenizer(prompt + TEMPLATE.format(text="c"))["input_ids"]
        assert found.texts == [[argmax_loop(model, tokenizer, ids)]]
