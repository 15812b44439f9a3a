"""Numbers as tokens: against what the tokenizer itself makes of prompt and number, written together."""

import json
import math

import numpy as np
import pytest
import torch
from tiny import (
    TEXTS,
    TOKENIZERS,
    byte_bpe_tokenizer,
    digit_bpe_tokenizer,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
)
from tokenizers import normalizers
from transformers import AutoTokenizer

from modeling_relish import RelishConfig
from modeling_relish.backbone_relish import NonFiniteStatesError
from modeling_relish.number_grid_relish import NumberGrid, NumberGridError, TokenTrie
from modeling_relish.text_relish import TemplateError

MONTHS = {"January": 1, "February": 2, "March": 3, "April": 4, "May": 5}
ADDED = {f"<value {i}>": i for i in range(1, 6)}
GRIDS = {
    "digits": NumberGrid((1, 2, 3, 4, 5)),
    "one": NumberGrid((5,)),
    "decimals": NumberGrid.words({"0.97": 0.97, "2.3": 2.3, "-1.5": -1.5, "100": 100, "1": 1}),
    "tenths": NumberGrid.between(0, 5, 0.1),
    "letters": NumberGrid.words({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}),
    "months": NumberGrid.words(MONTHS),
    "added": NumberGrid.words(ADDED),
}
MAKERS = {"byte": byte_bpe_tokenizer, "byte, bos": TOKENIZERS["llama"], "digit": digit_bpe_tokenizer}
MAKERS["unigram"] = sentencepiece_tokenizer


def tokenizer_of(name):
    tokenizer = MAKERS[name]()
    tokenizer.add_tokens(list(ADDED))
    return tokenizer


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize(("end", "separator"), [("\nScore:", " "), ("\nScore: ", ""), (" ->\n", ""), ("=", None)])
def test_tokens_are_those_after_the_prompt_of_every_row(name, kind, end, separator):
    tokenizer, grid, template = tokenizer_of(name), GRIDS[kind], "{{A}} {title}: {text}" + end
    if separator is None:
        separator = ""
        grid = NumberGrid(grid.values, grid.strings, separator="")
    prompts = [f"{{A}} a {text}: {text}{end}" for text in TEXTS]
    starts = [tokenizer(p)["input_ids"] for p in prompts]
    whole = [[tokenizer(p + separator + s)["input_ids"] for s in grid.strings] for p in prompts]
    ended = [[tokenizer(p + separator + s + "\n")["input_ids"] for s in grid.strings] for p in prompts]
    if any(w[: len(s)] != s for s, row in zip(starts, whole, strict=True) for w in row):
        assert end != "\nScore:"
        with pytest.raises(NumberGridError, match="cannot be told from those of the prompt's end"):
            grid.resolve(tokenizer, template)
        return
    found = grid.resolve(tokenizer, template)
    assert (found.values, found.strings, found.separator) == (grid.values, grid.strings, separator)
    assert found.terminator in (None, "\n")
    for start, row in zip(starts, whole if found.terminator is None else ended, strict=True):
        assert [tuple(w[len(start) :]) for w in row] == list(found.tokens)
    sequences = found.tokens
    assert not any(a != b and b[: len(a)] == a for a in sequences for b in sequences)  # every mass is a number's own


def test_space_before_a_number_is_part_of_it_and_digits_merge_or_not():
    digit = NumberGrid((1, 10)).resolve(digit_bpe_tokenizer(), "{text}\nScore:")
    assert [digit_bpe_tokenizer().decode(t[:-1]) for t in digit.tokens] == [" 1", " 10"]
    assert (len(digit.tokens[1]) - len(digit.tokens[0]), digit.terminator) == (1, "\n")
    merged = NumberGrid((5, 10, 100)).resolve(sentencepiece_tokenizer(), "{text}\nScore:")
    assert ([len(t) for t in merged.tokens], merged.terminator) == ([1, 1, 1], None)
    with pytest.raises(NumberGridError, match="' 1'.*'\\\\nScore: '|merge"):
        NumberGrid((10, 5)).resolve(sentencepiece_tokenizer(), "{text}\nScore: ")  # its space belongs to the number


@pytest.mark.parametrize("terminator", ["auto", "eos", None, "\n", " points"])
def test_the_end_of_a_number_that_begins_another(terminator):
    tokenizer = digit_bpe_tokenizer()
    bare = [tuple(tokenizer(f"A text.\nScore: {n}")["input_ids"]) for n in (1, 10, 2)]
    start = len(tokenizer("A text.\nScore:")["input_ids"])
    grid = NumberGrid((1, 10, 2), terminator=terminator).resolve(tokenizer, "{text}\nScore:")
    if terminator == "eos":
        assert list(grid.tokens) == [(*b[start:], tokenizer.eos_token_id) for b in bare]
    elif terminator is None:
        assert list(grid.tokens) == [b[start:] for b in bare]
    else:
        end = "\n" if terminator == "auto" else terminator
        ended = [tokenizer(f"A text.\nScore: {n}{end}")["input_ids"] for n in (1, 10, 2)]
        assert list(grid.tokens) == [tuple(e[start:]) for e in ended]
    alone = NumberGrid((1, 2), terminator="auto").resolve(tokenizer, "{text}\nScore:")
    assert (alone.terminator, alone.tokens[0]) == (None, bare[0][start:])


def test_a_prompt_that_a_tokenizer_begins_with_bos_or_that_has_braces_in_it():
    plain = NumberGrid((1, 2)).resolve(byte_bpe_tokenizer(), "{text}{{x}}:")
    with_bos = NumberGrid((1, 2)).resolve(byte_bpe_tokenizer(add_bos=True), "{text}{{x}}:")
    assert plain.tokens == with_bos.tokens


# ------------------------------------------------------------------ what cannot be used


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: NumberGrid(()), "empty"),
        (lambda: NumberGrid((1, 2.0, 3, 2)), r"\[2\.0\] more than once"),
        (lambda: NumberGrid((0.0, -0.0)), "more than once"),
        (lambda: NumberGrid((1, math.nan)), "nan.*finite"),
        (lambda: NumberGrid((1, -math.inf)), "inf.*finite"),
        (lambda: NumberGrid((1, "two")), "'two'.*number"),
        (lambda: NumberGrid((1, None)), "None.*number"),
        (lambda: NumberGrid((1, 2), ("one",)), "2 values and 1 strings"),
        (lambda: NumberGrid((1, 2), ("one", " ")), r"\[2\.0\] as nothing"),
        (lambda: NumberGrid((1, 2), tokens=((5,),)), "2 values and 1 token sequences"),
        (lambda: NumberGrid((1, 2), tokens=((5,), ())), "'2'.*no token"),
        (lambda: NumberGrid((1, 2), tokens=((5,), (-1,))), "-1"),
        (lambda: NumberGrid((1, 2), tokens=((5, 6), (5, 6))), r"1\.0 .*2\.0.*same tokens \[5, 6\]"),
        (lambda: NumberGrid.between(5, 0), "upwards"),
        (lambda: NumberGrid.between(0, 5, 0), "upwards"),
        (lambda: NumberGrid.between(0, math.inf), "finite ends"),
        (lambda: NumberGrid.covering(5, 5), "lower and a higher end.*5 and 5"),
        (lambda: NumberGrid.covering(0, math.nan), "lower and a higher end"),
        (lambda: NumberGrid.from_setting("1,2"), "'1,2'"),
        (lambda: NumberGrid.from_setting(5), "got 5"),
        (lambda: NumberGrid.words({}), "empty"),
        (lambda: NumberGrid.from_setting({"values": [1, 10], "terminater": "\n"}), "no .'terminater'"),
    ],
)
def test_grid_that_cannot_be_meant_is_told(make, match):
    with pytest.raises(NumberGridError, match=match):
        make()
    assert issubclass(NumberGridError, ValueError)


def test_values_with_the_same_tokens_are_named():
    tokenizer = digit_bpe_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(NumberGridError, match=r"2\.0 \('Good'\).*3\.0 \('good'\).*same tokens \["):
        NumberGrid.words({"bad": 1, "Good": 2, "good": 3}).resolve(tokenizer, "{text}:")


def test_what_a_tokenizer_does_not_know_or_ends_itself_is_named():
    with pytest.raises(NumberGridError, match="does not know ' é'.*<unk>"):
        NumberGrid.words({"e": 1, "é": 2}).resolve(sentencepiece_tokenizer(), "{text}:")
    with pytest.raises(NumberGridError, match="token of its own"):  # [SEP]
        NumberGrid((1, 2)).resolve(wordpiece_tokenizer(), "{text}:")
    without_end = digit_bpe_tokenizer()
    without_end.eos_token = None
    with pytest.raises(NumberGridError, match="no end-of-text token.*terminator"):
        NumberGrid((1, 10), terminator="eos").resolve(without_end, "{text}:")


def test_end_of_text_ends_numbers_where_a_tokenizer_drops_the_lines_end():
    tokenizer = digit_bpe_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\n", "")
    grid = NumberGrid((1, 10)).resolve(tokenizer, "{text}:")
    assert (grid.terminator, grid.tokens[0][-1]) == ("eos", tokenizer.eos_token_id)
    with pytest.raises(NumberGridError, match="does not end the numbers"):
        NumberGrid((1, 10), terminator="\n").resolve(tokenizer, "{text}:")


@pytest.mark.parametrize("template", ["{text}", "Score: {text}", "{a}: {b}"])
def test_template_that_ends_in_a_field_is_refused(template):
    with pytest.raises(TemplateError, match="ends in a field"):
        NumberGrid((1, 2)).resolve(digit_bpe_tokenizer(), template)


# ------------------------------------------------------------------ ways to write one


def test_between_writes_every_step_with_its_decimals():
    tenths = NumberGrid.between(0, 5, 0.1)
    assert tenths.strings == tuple(f"{i // 10}.{i % 10}" for i in range(51))
    assert tenths.values == tuple(i / 10 for i in range(51))
    assert NumberGrid.between(1, 5).strings == ("1", "2", "3", "4", "5")
    assert NumberGrid.between(0.25, 1, 0.5).strings == ("0.25", "0.75")
    assert NumberGrid.between(-0.9, 0.9, 0.3).strings == ("-0.9", "-0.6", "-0.3", "0.0", "0.3", "0.6", "0.9")
    assert NumberGrid((0.97, 2.3, -1.5, 100)).strings == ("0.97", "2.30", "-1.50", "100.00")
    assert NumberGrid((-0.0, 1)).strings == ("0", "1")
    assert NumberGrid(np.arange(3, dtype=np.int64)).strings == ("0", "1", "2")


@pytest.mark.parametrize(
    ("low", "high", "strings"),
    [
        (1, 5, "1 2 3 4 5"),
        (-4, 4, "-4 -3 -2 -1 0 1 2 3 4"),
        (0, 1, "0 1"),
        (0.5, 3.5, "0.5 1.5 2.5 3.5"),
        (0, 100, " ".join(str(5 * i) for i in range(21))),
        (0, 0.5, " ".join(f"{0.025 * i:.3f}" for i in range(21))),
    ],
)
def test_covering_holds_both_ends_of_a_scale(low, high, strings):
    grid = NumberGrid.covering(low, high)
    assert grid.strings == tuple(strings.split())
    assert grid.values == pytest.approx([float(s) for s in grid.strings])
    assert (grid.values[0], grid.values[-1]) == (low, high)


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.7), (1 / 3, 7 / 3), (-17.3, 29.11), (0, 0.123456789), (2.5, 25)])
def test_covering_an_odd_scale_has_its_ends_too(low, high):
    grid = NumberGrid.covering(low, high, terminator=None)
    assert (grid.values[0], grid.values[-1], grid.terminator) == (low, high, None)
    assert len(set(grid.strings)) == len(grid.values)
    assert [float(s) for s in grid.strings] == pytest.approx(list(grid.values), abs=1e-9)
    assert max(np.diff(grid.values)) <= max(1.0, (high - low) / 19) + 1e-9


# ------------------------------------------------------------------ kept in a configuration


@pytest.mark.parametrize("resolved", [True, False])
@pytest.mark.parametrize("kind", GRIDS)
def test_grid_comes_back_from_config_json(kind, resolved, tmp_path):
    grid = GRIDS[kind]
    if resolved:
        grid = grid.resolve(tokenizer_of("digit"), "{text}\nScore:")
    assert NumberGrid.from_setting(json.loads(json.dumps(grid.to_dict()))) == grid
    RelishConfig(head_type="number_grid", number_grid=grid.to_dict()).save_pretrained(tmp_path)
    assert NumberGrid.from_setting(RelishConfig.from_pretrained(tmp_path).number_grid) == grid


def test_settings_a_user_writes_and_tokens_that_are_known_stay():
    assert NumberGrid.from_setting([1, 2]) == NumberGrid.from_setting(np.array([1.0, 2.0])) == NumberGrid((1, 2))
    assert NumberGrid.from_setting({"bad": 1, "good": 2}) == NumberGrid((1, 2), ("bad", "good"))
    known = NumberGrid((1, 2), tokens=((7,), (8, 9)))
    assert NumberGrid.from_setting(known) is known
    assert known.resolve(None, "{text}") is known


def test_tokens_that_were_found_are_of_no_use_to_another_tokenizer_or_prompt():
    tokenizer = tokenizer_of("digit")
    found = NumberGrid((1, 2)).resolve(tokenizer, "{text}\nScore:")
    assert found.resolve(tokenizer, "{a} {b}\nScore:") is found  # the same end
    with pytest.raises(NumberGridError, match="another tokenizer or another end.*'1' has"):
        found.resolve(tokenizer_of("byte"), "{text}\nScore:")


def test_a_saved_tokenizer_finds_the_same_tokens(tmp_path):
    for name in MAKERS:
        tokenizer_of(name).save_pretrained(tmp_path)
        for grid in GRIDS.values():
            expected = grid.resolve(tokenizer_of(name), "{text}\nScore:")
            assert grid.resolve(AutoTokenizer.from_pretrained(tmp_path), "{text}\nScore:") == expected


# ------------------------------------------------------------------ the trie


@pytest.mark.parametrize(
    "sequences", [[(1,), (2,)], [(1, 2), (1, 3)], [(1,), (1, 2), (1, 2, 3)], [(4, 1, 2), (5, 1, 2), (4, 1, 3), (6,)]]
)
def test_trie_runs_every_common_beginning_once_and_adds_up_its_tokens(sequences):
    trie = TokenTrie(sequences)
    beginnings = sorted({s[:i] for s in sequences for i in range(1, len(s))}, key=lambda p: (len(p), p))
    assert len(trie) == len(beginnings)
    tables = trie.tables(torch.device("cpu"))
    assert tables.tokens.tolist() == [p[-1] for p in beginnings]
    assert tables.depths.tolist() == [len(p) for p in beginnings]
    logits = torch.randn(2, 1 + len(trie), 9, dtype=torch.bfloat16)
    p = np.exp(logits.double().numpy())
    p /= p.sum(-1, keepdims=True)
    rows = {(): 0} | {b: i + 1 for i, b in enumerate(beginnings)}
    expected = [[sum(math.log(p[b, rows[s[:i]], s[i]]) for i in range(len(s))) for s in sequences] for b in range(2)]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = trie.log_probs(logits)
        assert found.dtype == torch.float32
        assert found.numpy() == pytest.approx(np.array(expected), abs=2e-6)


def test_an_overflow_at_a_number_raises_and_is_no_nan():
    logits = torch.zeros(1, 2, 9)
    logits[0, 0, 4] = -torch.inf
    with pytest.raises(NonFiniteStatesError, match="logits"):
        TokenTrie([(4,), (5, 1)]).log_probs(logits)


def test_a_trie_first_used_for_inference_trains():
    trie = TokenTrie([(4,), (5, 1)])
    with torch.inference_mode():
        trie.log_probs(torch.zeros(1, 2, 9))
    logits = torch.zeros(1, 2, 9, requires_grad=True)
    trie.log_probs(logits).sum().backward()
    assert logits.grad.abs().sum() > 0
