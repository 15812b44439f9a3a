"""Checked data sets from tables: finite labels, texts that are there, splits that share no text.

Nothing is guessed about a value: a label is a finite number or an error, which names the first bad row.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from numbers import Number
from reprlib import repr as show  # shortens
from typing import Any

import datasets
import numpy as np
from transformers.utils import logging

from .tables import (
    CHUNK_ROWS,
    Row,
    RowWriter,
    Source,
    TableError,
    open_table,
    read_rows,
    records,
    row_error,
    tables_of,
)

__all__ = [
    "Columns",
    "RowWriter",
    "TableError",
    "check_label",
    "guess_label_column",
    "guess_text_columns",
    "label_matrix",
    "load_split",
    "load_splits",
    "read_rows",
]

logger = logging.get_logger(__name__)

GUESS_ROWS = 1000
ID_LIKE = re.compile(
    r"(.*[_\-. ])?(id|idx|index|uid|uuid|guid)|(?-i:.*[a-z]I[dD])|unnamed: ?\d+|__index_level_\d+__", re.I
)
NO_TEXT = re.compile(r"\s*([-+]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?%?|[-+]?inf(inity)?|nan|na|n/a|null|none|-)?\s*", re.I)


# ---------------------------------------------------------------------- data sets


@dataclass(frozen=True)
class Columns:
    """Which columns are read: the prompt's fields, K >= 1 targets and, if there is one, a weight per row.

    Raises:
        TableError: for no text or label column, a column in two roles, or a text column that would hide a result's column.
    """

    text: tuple[str, ...]
    label: tuple[str, ...]
    weight: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.text, str) or isinstance(self.label, str) or not self.text or not self.label:
            raise TableError(f"{self}: text and label are tuples of names, with at least one.")
        if len(set(self.used)) < len(self.used) or {"labels", "sample_weight"} & set(self.text):
            raise TableError(
                f"{self}: a column has one role, and no text is called labels or sample_weight. Rename it."
            )

    @property
    def used(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*self.text, *self.label, *([] if self.weight is None else [self.weight]))


def check_label(value: Any, *, where: str, column: str, row: int) -> float:
    """Return a label as a float, in the label's own unit.

    Args:
        value: A number, a numpy or torch scalar, or a numeric string (`"3.5"`, `" 4 "`).
        where: Its file or data set, for the message.
        column: Its column.
        row: Its row, from 1.

    Raises:
        TableError: for anything else: a bool, a missing value, a word, nan, an infinity, "1,5".
    """
    number = math.nan
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    # float() also reads "1_000", which in a table is more likely a code than a number.
    if isinstance(value, (str, Number)) and not isinstance(value, bool) and "_" not in str(value):
        with suppress(ValueError, TypeError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if math.isfinite(number):
        return number
    todo = "Correct it, fill it in or remove the row."
    if isinstance(value, str) and "," in value and NO_TEXT.fullmatch(value):
        todo = "Write decimals with a point (1.5), and thousands without a separator."
    raise row_error(f"found {show(value)}, expected a finite number. {todo}", where, row, column)


def check_text(value: Any, *, where: str, column: str, row: int) -> str:
    """Return a text value as a string; a number (never in csv) becomes its usual notation. Args as in [`check_label`].

    Raises:
        TableError: for a missing value and for anything but strings and numbers.
    """
    # nan is how pandas writes a missing value.
    if not isinstance(value, (str, Number)) or isinstance(value, bool) or value != value:
        raise row_error(f"found {show(value)}, expected a text. Fill it in or remove the row.", where, row, column)
    return str(value)


def load_split(source: Source, columns: Columns, *, split: str | None = None, name: str = "data") -> datasets.Dataset:
    """Read one table into memory and check every row.

    Args:
        source: As in [`read_rows`].
        columns: What is read.
        split: Which of several splits.
        name: What messages call a `Dataset`.

    Returns:
        N rows with the text columns (str), `labels` (K,) float64 in label units and, given a weight, `sample_weight` >= 0.

    Raises:
        TableError: for a missing column, and for the first row with a bad label, weight or text.
    """
    number = datasets.Value("float64")
    kinds: dict[str, Any] = {
        **dict.fromkeys(columns.text, datasets.Value("string")),
        "labels": datasets.Sequence(number),
    }
    features = datasets.Features(kinds if columns.weight is None else {**kinds, "sample_weight": number})
    rows = (_checked_row(columns, *record) for record in records(open_table(source, split), split or name))
    chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])  # as Arrow they take far less memory than as objects
    return datasets.concatenate_datasets([datasets.Dataset.from_list(chunk, features) for chunk in chunks])


def _checked_row(columns: Columns, where: str, number: int, row: Row) -> Row:
    _check_present(columns.used, where, number, row)
    checked: Row = {c: check_text(row[c], where=where, column=c, row=number) for c in columns.text}
    if not any(text.strip() for text in checked.values()):
        raise row_error("the text is empty. Fill it in or remove the row.", where, number, " + ".join(columns.text))
    checked["labels"] = [check_label(row[c], where=where, column=c, row=number) for c in columns.label]
    if columns.weight is not None:
        checked["sample_weight"] = check_label(row[columns.weight], where=where, column=columns.weight, row=number)
        if checked["sample_weight"] < 0:
            raise row_error(f"found {row[columns.weight]!r}, expected a weight >= 0.", where, number, columns.weight)
    return checked


def _check_present(columns: Sequence[str], where: str, number: int, row: Row) -> None:
    for column in columns:
        if column not in row:
            names = {name.strip().casefold(): name for name in row}
            close = difflib.get_close_matches(column.strip().casefold(), names, n=1)
            hint = f" Did you mean {names[close[0]]!r}?" if close else ""
            if len(row) == 1 and re.search("[;,|\t]", next(iter(row))):
                hint += " The cells seem not to be separated: .csv needs commas, .tsv needs tabs."
            raise row_error(f"no column {column!r}; the columns are {list(row)}.{hint}", where, number)


def guess_text_columns(
    source: Source, label: Sequence[str], weight: str | None = None, split: str | None = None
) -> tuple[str, ...]:
    """Return, in the table's order, what is text in the first 1000 rows: no label, weight, id, or numbers only.

    Args:
        source: As in [`read_rows`].
        label: The label columns.
        weight: The weight column.
        split: Which of several splits; default train.

    Raises:
        TableError: if no column is left, or a label or weight column is missing.
    """
    head = list(islice(records(open_table(source, split, fallback="train"), split or "train"), GUESS_ROWS))
    where, number, first = head[0]
    taken = [*([label] if isinstance(label, str) else label), *([] if weight is None else [weight])]
    _check_present(taken, where, number, first)
    texts = {c: [v for _, _, row in head if isinstance(v := row.get(c), str)] for c in first if c not in taken}
    guess = [c for c, v in texts.items() if not ID_LIKE.fullmatch(c) and not all(map(NO_TEXT.fullmatch, v))]
    if not guess:
        raise TableError(f"{where}: none of the columns {list(first)} looks like text. Name the text columns.")
    return tuple(guess)


def guess_label_column(source: Source, split: str | None = None) -> str:
    """Return the one column that has numbers in most of the first 1000 rows and is no id.

    A cell of it that is no number is the loader's to refuse, with its row.

    Args:
        source: As in [`read_rows`].
        split: Which of several splits; default train.

    Raises:
        TableError: for none or several, which are named: which of them is meant cannot be known.
    """
    head = list(islice(records(open_table(source, split, fallback="train"), split or "train"), GUESS_ROWS))
    where, _, first = head[0]
    cells = {c: [_like_number(row.get(c)) for _, _, row in head] for c in first if not ID_LIKE.fullmatch(c)}
    numbers = [c for c, found in cells.items() if 2 * sum(found) >= len(found)]
    if len(numbers) != 1:
        raise TableError(
            f"{where}: {f'{numbers} all have' if numbers else f'none of the columns {list(first)} has'} numbers. "
            "Name the label column."
        )
    return numbers[0]


def _like_number(value: Any) -> bool:
    if isinstance(value, str):
        return bool(re.search(r"\d", value)) and bool(NO_TEXT.fullmatch(value))
    return isinstance(value, Number) and not isinstance(value, bool)


def label_matrix(dataset: datasets.Dataset) -> np.ndarray:
    """Return the `labels` of a data set from [`load_split`] as (N, K) float64, in label units."""
    return np.array(dataset["labels"][:], dtype=np.float64).reshape(len(dataset), -1)


# ---------------------------------------------------------------------- train, validation, test


def load_splits(
    source: Source, columns: Columns, *, validation: Source | None = None, test: Source | None = None,
    validation_fraction: float = 0.1, test_fraction: float = 0.1, seed: int = 0,
) -> datasets.DatasetDict:  # fmt: skip
    """Load train, validation and test; what neither an argument nor the source gives is split off the training rows.

    Rows with equal text columns stay together in that, so that no held-out text was trained on.

    Args:
        source: As in [`read_rows`]; of several splits, train is needed, validation and test are used.
        columns: What is read.
        validation: A source of its own, which wins over the split in `source`.
        test: The same for test.
        validation_fraction: Share of the training rows to split off, in (0, 1).
        test_fraction: The same for test; 0 = without test.
        seed: Decides which rows.

    Returns:
        Data sets as [`load_split`] makes them: train, validation and, unless `test_fraction=0`, test.

    Raises:
        TableError: as [`load_split`]; without a train split; for a split that would be empty or a bad fraction.
    """
    order = ("train", "validation", "test")
    tables = tables_of(source)
    tables = {"train": tables[""]} if "" in tables else tables
    if "train" not in tables:
        raise TableError(f"the source has no train split, only {list(tables)}; give the training table itself.")
    for name, own in (("validation", validation), ("test", test)):
        if own is not None:
            tables[name] = open_table(own, None, fallback=name)
    splits = {name: load_split(tables[name], columns, name=name) for name in order if name in tables}
    texts = {name: list(zip(*(data[c] for c in columns.text), strict=True)) for name, data in splits.items()}
    for message in shared_texts(texts):
        logger.warning(message)
    fractions = {"validation": validation_fraction, **({"test": test_fraction} if test_fraction != 0 else {})}
    if missing := {name: fraction for name, fraction in fractions.items() if name not in splits}:
        parts = _deal(texts["train"], missing, seed)
        splits |= {name: splits["train"].select(rows) for name, rows in parts.items()}
    return datasets.DatasetDict({name: splits[name] for name in order if name in splits})


def shared_texts(texts: Mapping[str, Iterable[tuple[str, ...]]]) -> list[str]:
    """Return a sentence for every two splits, in their order, that have texts in common."""
    found = []
    for (a, first), (b, second) in combinations({name: set(rows) for name, rows in texts.items()}.items(), 2):
        if shared := len(first & second):
            found.append(f"{shared} text(s) of the {b} data are in the {a} data too: its figures will flatter.")
    return found


def _deal(texts: list[tuple[str, ...]], fractions: dict[str, float], seed: int) -> dict[str, list[int]]:
    """Return row numbers (from 0, in table order) for train and every split of `fractions`, equal texts together."""
    if not all(0 < fraction < 1 for fraction in fractions.values()):
        raise TableError(f"a fraction to split off is between 0 and 1, got {fractions}.")
    groups: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(texts):
        groups.setdefault(text, []).append(row)
    members = list(groups.values())
    parts: dict[str, list[int]] = {name: [] for name in ("train", *fractions)}
    for index in np.random.default_rng(seed).permutation(len(members)):
        group = members[index]
        # A group joins a split that it brings closer to its size, so a text with a thousand rows stays in train.
        fits = (n for n, f in fractions.items() if len(parts[n]) + len(group) / 2 <= round(f * len(texts)))
        parts[next(fits, "train")] += group
    if not all(parts.values()):
        sizes = {name: len(rows) for name, rows in parts.items()}
        found = (
            f"{len(texts)} rows ({len(groups)} different texts) with the fractions {fractions} give the sizes {sizes}"
        )
        raise TableError(f"cannot split the training rows: {found}. Add rows or change the fractions.")
    return {name: sorted(rows) for name, rows in parts.items()}
