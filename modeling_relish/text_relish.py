"""From rows of text to token ids: the prompt template, and truncation that keeps the template's own words."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers.utils import logging

from .configuration_checks_relish import TRUNCATIONS

logger = logging.get_logger(__name__)

_SURROGATE = re.compile("[\ud800-\udfff]")
CHAT_OPTIONS = ("tools", "chat_template_kwargs")  # columns that go to the chat template, beside a conversation

# A column's name, spaces and all, but nothing that could mean an attribute, an index or a format.
_FIELD = re.compile(r"[^\s.\[\]{}!:]([^.\[\]{}!:]*[^\s.\[\]{}!:])?")


class TemplateError(ValueError):
    """A prompt template that cannot be used, or a row that does not fit it."""


class TextTooLongError(ValueError):
    """A prompt longer than `max_length` that may not or cannot be cut."""


class PromptTemplate:
    r"""A text with named fields, e.g. `"Sentence 1: {text_a}\nSentence 2: {text_b}\nScore:"`.

    `{name}` is a field, `{{` and `}}` are literal braces. Attributes, indices, conversions and format specifications
    (`{a.b}`, `{a[0]}`, `{a!r}`, `{a:>9}`) are refused: a template may come with a foreign checkpoint, and must reach
    nothing but the row's text. The row's text is data and is inserted as it is, braces and all.

    Args:
        template: The text; at least one field.

    Raises:
        TemplateError: if it does not parse, has no field, or a field is more than a name.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self.parts: list[tuple[str, str | None]] = []  # (literal text, field that follows or None)
        try:
            parsed = list(string.Formatter().parse(template))
        except ValueError as error:
            raise TemplateError(
                f"prompt template {template!r} does not parse: {error}. Literal braces are {{{{ and }}}}."
            ) from error
        for literal, field, spec, conversion in parsed:
            if field is not None and (not _FIELD.fullmatch(field) or field.isdigit() or spec or conversion):
                raise TemplateError(
                    f"prompt template {template!r}: a field is a plain name such as {{text}}, got {{{field}"
                    f"{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}."
                )
            self.parts.append((literal, field))
        self.fields: tuple[str, ...] = tuple(dict.fromkeys(f for _, f in self.parts if f is not None))
        if not self.fields:
            raise TemplateError(f"prompt template {template!r} has no field; write where the text goes, as {{text}}.")

    def render(self, row: Mapping[str, str], limit: int | None = None) -> str:
        """Return the prompt of one row; `limit` keeps only the first characters of every field."""
        return "".join(literal + (row[field][:limit] if field else "") for literal, field in self.parts)

    def row(self, example: Any, index: int = 0) -> dict[str, Any]:
        """Bring one example into the form {field: text or conversation}.

        Args:
            example: A string or a conversation (templates with one field), a pair (templates with two), or a mapping with
                the fields; a mapping with `text` and `text_pair`, as pipelines use, stands for one or two fields in order.
            index: Row number for the error message, from 0.

        Raises:
            TemplateError: if the fields do not fit, a `text_pair` has no place in the template, or a value is neither a
                string nor a conversation.
        """
        if isinstance(example, Mapping):
            if not all(f in example for f in self.fields):
                pair = [example[k] for k in ("text", "text_pair") if example.get(k) is not None]
                if len(pair) != len(self.fields):
                    raise TemplateError(
                        f"row {index}: the template's fields are {list(self.fields)}, got columns {sorted(map(str, example))}."
                    )
                example = dict(zip(self.fields, pair, strict=True))
            elif "text_pair" not in self.fields and example.get("text_pair") is not None:
                raise TemplateError(
                    f"row {index}: it has a 'text_pair', and the template {self.template!r} has no such field, only "
                    f"{list(self.fields)}. Leave text_pair out, or use a model whose template has two fields."
                )
            values = [example[f] for f in self.fields]
        else:
            values = (
                [example]
                if isinstance(example, str) or is_conversation(example)
                else list(example)
                if isinstance(example, (list, tuple))
                else [example]
            )
            if len(values) != len(self.fields):
                raise TemplateError(
                    f"row {index}: the template {self.template!r} has {len(self.fields)} field(s) {list(self.fields)}, got "
                    f"{len(values)} text(s)."
                )
        for field, value in zip(self.fields, values, strict=True):
            if not isinstance(value, str) and not is_conversation(value):
                raise TemplateError(
                    f"row {index}: field {field!r} must be a string, or a conversation (a list of messages with role and "
                    f"content), got {type(value).__name__} {value!r}."
                )
        return dict(zip(self.fields, values, strict=True))


def check_texts(texts: Any, batch_size: int) -> None:
    """Refuse what would be scored by its letters or its columns' names: one text, a mapping, a table."""
    if isinstance(texts, (str, Mapping)) or (hasattr(texts, "columns") and hasattr(texts, "iloc")):
        hint = " write [text]." if isinstance(texts, (str, dict)) else " list its rows: [...]."
        raise ValueError(f"predict takes a list of texts, got one {type(texts).__name__};{hint}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")


def encode_rows(
    examples: Iterable[Any],
    template: PromptTemplate,
    tokenizer: Any,
    max_length: int,
    truncation: str = "longest_first",
    cut_rows: list[int] | None = None,
) -> Iterator[list[int]]:
    """Yield the token ids of every example's prompt, in order.

    A prompt longer than `max_length` loses the end of its longest field (of all fields that are longest), so the
    template's words, above all the suffix that asks for the score, always stay. One warning at the end says how many.

    Args:
        examples: What [`PromptTemplate.row`] accepts.
        template: The parsed template.
        tokenizer: A transformers tokenizer.
        max_length: In tokens, special tokens included; also bounded by the tokenizer's own `model_max_length`.
        truncation: `"longest_first"` or `"error"`.
        cut_rows: Gets the numbers, from 0, of the rows that were cut.

    Raises:
        TextTooLongError: under `"error"`, or where even the template without text is too long.
        TemplateError: for a row that does not fit the template.
    """
    if truncation not in TRUNCATIONS:
        raise ValueError(f"truncation must be one of {list(TRUNCATIONS)}, got {truncation!r}.")
    max_length = min(max_length, tokenizer.model_max_length)
    cut_rows = [] if cut_rows is None else cut_rows
    total = 0
    for index, example in enumerate(examples):
        row, special = prompt_row(example, template, tokenizer, index)
        ids = tokenize(template.render(row), tokenizer, special)
        total += 1
        if len(ids) > max_length:
            if truncation == "error":
                raise TextTooLongError(
                    f"row {index} has {len(ids)} tokens, max_length is {max_length}. Raise max_length, shorten the text, or "
                    'allow cutting with truncation="longest_first".'
                )
            ids = _cut_to(row, template, tokenizer, max_length, index, special)
            cut_rows.append(index)
        if not ids:
            raise TemplateError(
                f"row {index}: the prompt has no token at all; the text is empty and so is the template."
            )
        yield ids
    if cut_rows:
        logger.warning(
            f"{len(cut_rows)} of {total} texts were longer than max_length={max_length} tokens: the end of their longest field "
            "was cut."
        )


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages with a `role`, as chat templates take."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def prompt_row(example: Any, template: PromptTemplate, tokenizer: Any, index: int = 0) -> tuple[dict[str, str], bool]:
    """Bring one example into {field: text}, its conversations rendered by the tokenizer's chat template.

    A chat template writes the special tokens itself. A prompt that begins with a rendered chat gets no others, as in
    transformers and TRL; behind words of the prompt template the chat's own BOS is left out.

    Args:
        example: What [`PromptTemplate.row`] accepts; where a field of a mapping is a conversation, its `tools` (a list, or
            JSON) and `chat_template_kwargs` go to the chat template.
        template: The parsed template.
        tokenizer: A transformers tokenizer.
        index: Row number for the error message, from 0.

    Returns:
        The row, and whether the tokenizer is to add its special tokens to the prompt.
    """
    row = template.row(example, index)
    first_text, first_field = template.parts[0]
    begins_with_chat = not first_text and first_field is not None and is_conversation(row[first_field])
    options = _chat_options(example, index) if any(map(is_conversation, row.values())) else {}
    for field, value in row.items():
        if not isinstance(value, str):
            chat = tokenizer.apply_chat_template(list(value), tokenize=False, **options)
            keeps_bos = begins_with_chat and field == first_field
            row[field] = chat if keeps_bos or not tokenizer.bos_token else chat.removeprefix(tokenizer.bos_token)
        # Half of a character beyond 16 bits, as broken JSON escapes leave it; no tokenizer takes that.
        if not row[field].isascii() and (half := _SURROGATE.search(row[field])):
            raise TemplateError(
                f"row {index}: field {field!r} has half of a surrogate pair at character {half.start() + 1}, which is no text. "
                "Correct it where the table was written."
            )
    return row, not begins_with_chat


def _chat_options(example: Any, index: int) -> dict[str, Any]:
    if not isinstance(example, Mapping):
        return {}
    tools = example.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise TemplateError(
            f"row {index}: beside a conversation, tools must be a list or its JSON, got {tools!r}. Correct or rename it."
        ) from error
    return {"tools": tools, **(example.get("chat_template_kwargs") or {})}


def tokenize(prompt: str, tokenizer: Any, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of one prompt, with the tokenizer's special tokens but never a second BOS.

    A text that a chat template has built begins with BOS already; adding another one shifts every state.
    """
    bos = tokenizer.bos_token
    has_bos = bool(bos) and prompt.startswith(bos)
    # The length is checked by the caller, which says it better than the tokenizer's own warning.
    return tokenizer(prompt, add_special_tokens=add_special_tokens and not has_bos, verbose=False)["input_ids"]


def _cut_to(
    row: Mapping[str, str], template: PromptTemplate, tokenizer: Any, max_length: int, index: int, special: bool
) -> list[int]:
    """Find the largest common limit on the fields' characters that fits, by bisection on the real token count."""
    best = tokenize(template.render(row, 0), tokenizer, special)
    if len(best) > max_length:
        raise TextTooLongError(
            f"row {index}: the template alone has {len(best)} tokens, max_length is {max_length}. Raise max_length or shorten "
            f"the template {template.template!r}."
        )
    low, high = 0, max(map(len, row.values()))  # `low` characters fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        ids = tokenize(template.render(row, middle), tokenizer, special)
        if len(ids) <= max_length:
            low, best = middle, ids
        else:
            high = middle
    return best


def pad_batch(
    sequences: Sequence[Sequence[int]], pad_token_id: int | None, vocab_size: int | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Pad token ids on the right to the longest; return (ids, attention mask), both (B, T).

    The padding id is never looked at again, for masking goes by the mask: without one, or with one that was added to the
    tokenizer and has no embedding, 0 serves.
    """
    longest = max(map(len, sequences))
    pad = 0 if pad_token_id is None or pad_token_id >= (vocab_size or math.inf) else pad_token_id
    ids = [list(s) + [pad] * (longest - len(s)) for s in sequences]
    mask = [[1] * len(s) + [0] * (longest - len(s)) for s in sequences]
    return ids, mask
