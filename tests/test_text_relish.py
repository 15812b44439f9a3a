"""Templates are filled with data, never interpreted; what is too long loses text, never the template."""

import json
import logging

import pytest
from preference_pairs import CHATTY
from tiny import byte_bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer
from transformers.utils import logging as hf_logging

from modeling_relish.text_relish import PromptTemplate, TemplateError, TextTooLongError, encode_rows, pad_batch

TOKENIZERS = [byte_bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer]


@pytest.fixture
def log(caplog):
    hf_logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    hf_logging.disable_propagation()


def encode(examples, template, tokenizer, max_length=10_000, truncation="longest_first"):
    return list(encode_rows(examples, PromptTemplate(template), tokenizer, max_length, truncation))


@pytest.mark.parametrize(
    "template",
    [
        "{text.__class__}",
        "{text[0]}",
        "{text!r}",
        "{text:>9}",
        "{0}",
        "{}",
        "no field",
        "{text",
        "}",
        "{text.__init__.__globals__}",
    ],
)
def test_anything_but_plain_fields_is_refused(template):
    with pytest.raises(TemplateError):
        PromptTemplate(template)


def test_columns_may_have_spaces():
    assert PromptTemplate("{review text}:").render({"review text": "x"}) == "x:"


def test_users_text_is_data_and_its_braces_stay():
    template = PromptTemplate("A: {a}\nB: {{{b}}}")
    assert template.render({"a": "{b}", "b": "{a.__class__} %s {}"}) == "A: {b}\nB: {{a.__class__} %s {}}"


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (("x", "y"), {"a": "x", "b": "y"}),
        (["x", "y"], {"a": "x", "b": "y"}),
        ({"a": "x", "b": "y", "other": 3}, {"a": "x", "b": "y"}),
        ({"text": "x", "text_pair": "y"}, {"a": "x", "b": "y"}),
    ],
)
def test_rows_come_as_pairs_or_dicts(example, expected):
    assert PromptTemplate("{a} {b}").row(example) == expected


def test_a_text_pair_without_a_place_in_the_template_is_refused():
    template = PromptTemplate("{text}:")
    with pytest.raises(TemplateError, match=r"row 4.*'text_pair'.*\['text'\]"):
        template.row({"text": "x", "text_pair": "y"}, index=4)
    assert template.row({"text": "x", "text_pair": None}) == {"text": "x"}
    both = {"text": "x", "text_pair": "y"}
    assert PromptTemplate("{text_pair} {text}").row(both) == both


@pytest.mark.parametrize(
    "example", ["only one", ("x", "y", "z"), {"a": "x"}, {"a": "x", "b": None}, ("x", 3), None, 3.5]
)
def test_rows_that_do_not_fit_raise_with_their_number(example):
    with pytest.raises(TemplateError, match="row 4"):
        PromptTemplate("{a} {b}").row(example, index=4)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_prompt_is_tokenised_as_one_text(make):
    tokenizer = make()
    prompt = "Text: a good film\nScore:"
    assert encode(["a good film"], "Text: {text}\nScore:", tokenizer) == [tokenizer(prompt)["input_ids"]]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_too_long_text_is_cut_and_the_suffix_stays(make, log):
    tokenizer = make()
    long = "the film was very good and I liked it " * 30
    ids = encode([("short", long), ("one", "two")], "First: {a} Second: {b} Score:", tokenizer, max_length=40)
    assert 30 < len(ids[0]) <= 40
    text = tokenizer.decode(ids[0], skip_special_tokens=True).lower()
    assert text.rstrip().endswith("score:") or text.rstrip().endswith("score :")
    assert "short" in text  # the shorter field is untouched
    assert "1 of 2 texts" in log.text
    assert "max_length=40" in log.text


@pytest.mark.parametrize("make", TOKENIZERS)
def test_cut_is_as_long_as_fits(make):
    tokenizer = make()
    long = "good " * 200
    template = PromptTemplate("Rate {text} Score:")
    (ids,) = encode_rows([long], template, tokenizer, 50)
    fitting = [tokenizer(template.render({"text": long[:n]}))["input_ids"] for n in range(len(long))]
    assert ids in fitting  # the prompt of a shortened text, tokenised as one
    assert 47 <= len(ids) <= 50


def test_too_long_is_an_error_on_request_and_when_the_template_alone_does_not_fit():
    tokenizer = byte_bpe_tokenizer()
    with pytest.raises(TextTooLongError, match=r"row 1 .* max_length is 12"):
        encode(["a", "good " * 50], "{text}:", tokenizer, max_length=12, truncation="error")
    with pytest.raises(TextTooLongError, match="template alone"):
        encode(["good " * 50], "A very long instruction before the text. {text}:", tokenizer, max_length=5)


def test_one_bos_and_no_more():
    tokenizer = byte_bpe_tokenizer(add_bos=True)
    bos = tokenizer.bos_token_id
    (plain,) = encode(["a good film"], "{text}", tokenizer)
    (chat,) = encode([tokenizer.bos_token + "a good film"], "{text}", tokenizer)
    assert plain == chat
    assert plain.count(bos) == 1


def test_tokenizers_own_limit_counts():
    tokenizer = byte_bpe_tokenizer()
    tokenizer.model_max_length = 16
    assert len(encode(["good " * 50], "{text} Score:", tokenizer)[0]) <= 16


def test_empty_prompt_is_an_error():
    with pytest.raises(TemplateError, match="row 0"):
        encode([""], "{text}", byte_bpe_tokenizer())


def test_padding_needs_no_pad_token():
    ids, mask = pad_batch([[5, 6, 7], [8]], None)
    assert mask == [[1, 1, 1], [1, 0, 0]]
    assert [row[: sum(m)] for row, m in zip(ids, mask, strict=True)] == [[5, 6, 7], [8]]


# ---------------------------------------------------------------------- conversations

CHAT = [{"role": "user", "content": "Good?"}, {"role": "assistant", "content": "A great film."}]


def test_a_conversation_gets_the_chat_templates_tokens_and_one_bos():
    expected = CHATTY.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert expected.count(CHATTY.bos_token_id) == 1
    assert (
        encode([CHAT, {"text": CHAT}, CHATTY.apply_chat_template(CHAT, tokenize=False)], "{text}", CHATTY)
        == [expected] * 3
    )
    (asked,) = encode([CHAT], "{text}Score:", CHATTY)
    assert (
        asked
        == CHATTY(CHATTY.apply_chat_template(CHAT, tokenize=False) + "Score:", add_special_tokens=False)["input_ids"]
    )


def test_behind_words_of_the_template_a_conversations_bos_is_left_out():
    (ids,) = encode([CHAT], "Rate: {text}\nScore:", CHATTY)
    assert ids == CHATTY("Rate: user: Good?\nassistant: A great film.\n\nScore:")["input_ids"]
    assert ids.count(CHATTY.bos_token_id) == 1


def test_a_template_that_writes_no_bos_gets_none():
    tokenizer = byte_bpe_tokenizer(add_bos=True)
    tokenizer.chat_template = CHATTY.chat_template.replace("{{ bos_token }}", "")
    assert encode([CHAT], "{text}", tokenizer) == [tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]]
    assert tokenizer.bos_token_id not in encode([CHAT], "{text}", tokenizer)[0]


@pytest.mark.parametrize("tools", [[{"name": "look_up"}], '[{"name": "look_up"}]'])
def test_tools_and_options_of_a_row_reach_the_chat_template(tools):
    row = {"text": CHAT, "tools": tools, "chat_template_kwargs": {"add_generation_prompt": True}}
    (ids,) = encode([row], "{text}", CHATTY)
    assert CHATTY.decode(ids).endswith("1 tools\nassistant: ")
    assert encode([{**row, "tools": [], "chat_template_kwargs": None}], "{text}", CHATTY) == encode(
        [CHAT], "{text}", CHATTY
    )


def test_tools_beside_plain_text_are_no_options_and_beside_a_conversation_must_be_json():
    template = "{question} {tools}"
    assert encode([{"question": "Which?", "tools": "hammer"}], template, CHATTY) == [
        CHATTY("Which? hammer")["input_ids"]
    ]
    with pytest.raises(TemplateError, match="row 0.*tools.*'hammer'"):
        encode([{"text": CHAT, "tools": "hammer"}], "{text}", CHATTY)


def test_a_long_conversation_is_cut_and_stays_one():
    long = [CHAT[0], {"role": "assistant", "content": "A great film. " * 50}]
    (ids,) = encode([long], "{text}\nScore:", CHATTY, max_length=40)
    assert len(ids) <= 40
    assert ids.count(CHATTY.bos_token_id) == 1
    assert CHATTY.decode(ids).endswith("\nScore:")


@pytest.mark.parametrize("value", [[], ["a"], [{"content": "a"}], 3, None])
def test_what_is_neither_text_nor_conversation_is_named(value):
    with pytest.raises(TemplateError, match="conversation"):
        encode([{"text": value}], "{text}", CHATTY)


def test_half_a_character_is_told_with_its_row_and_place():
    broken = json.loads('"A \\ud83d face"')  # as an escape that was cut leaves it
    with pytest.raises(TemplateError, match=r"row 1: field 'text' has half of a surrogate pair at character 3"):
        list(encode_rows(["Whole: \U0001f600", broken], PromptTemplate("{text}"), byte_bpe_tokenizer(), 64))


def test_rows_that_were_cut_are_given():
    cut: list[int] = []
    list(
        encode_rows(["a", "b" * 400, "c", "d " * 90], PromptTemplate("{text}"), byte_bpe_tokenizer(), 16, cut_rows=cut)
    )
    assert cut == [1, 3]
