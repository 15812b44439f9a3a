"""Tables to checked data sets: csv, tsv, jsonl, parquet, a folder of splits, `datasets` objects, hub ids.

Nothing is guessed about a value: a csv cell stays the text that it is ("NA", "007"), a label is a finite number or an error.
Rows count from 1, as a reader of the table counts them: the header and blank lines do not count.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from numbers import Number
from pathlib import Path
from reprlib import repr as show  # shortens
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("validation", "valid", "val", "dev"), "validation")}
CHUNK_ROWS = 10_000
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
ID_LIKE = re.compile(r"(.*[_\-. ])?(id|idx|index|uid|uuid|guid)|.*[a-z](?-i:Id|ID)|unnamed: ?\d+|__index_level_\d+__", re.I)
NO_TEXT = re.compile(r"\s*([-+]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?%?|[-+]?inf(inity)?|nan|na|n/a|null|none|-)?\s*", re.I)
TEXT_FILE: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape"}  # a bad byte is found in its cell

Source = str | os.PathLike[str] | datasets.Dataset | datasets.DatasetDict
Table = Path | datasets.Dataset
Row = dict[str, Any]


class TableError(ValueError):
    """A table that cannot be used as it is; the message says where, what was found and what to do."""


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
            raise TableError(f"{self}: a column has one role, and no text is called labels or sample_weight. Rename it.")

    @property
    def used(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*self.text, *self.label, *([] if self.weight is None else [self.weight]))


def _error(problem: str, where: str, row: int, column: str | None = None) -> TableError:
    return TableError(f"{where}, row {row}{'' if column is None else f', column {column!r}'}: {problem}")


def check_label(value: Any, *, where: str, column: str, row: int) -> float:
    """Return a label as a float, in the label's own unit.

    Args:
        value: A number, a numpy or torch scalar, or a numeric string (`"3.5"`, `" 4 "`).
        where: Its file or data set, for the message, as are `column` and `row` (from 1).
        column: Its column.
        row: Its row.

    Raises:
        TableError: for anything else: a bool, a missing value, a word, nan, an infinity, "1,5".
    """
    number, value = math.nan, value.item() if getattr(value, "ndim", None) == 0 else value
    # float() also reads "1_000", which in a table is more likely a code than a number.
    if isinstance(value, (str, Number)) and not isinstance(value, bool) and "_" not in str(value):
        with suppress(ValueError, TypeError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if math.isfinite(number):
        return number
    todo = "Correct it, fill it in or remove the row."
    if isinstance(value, str) and "," in value and NO_TEXT.fullmatch(value):
        todo = "Write decimals with a point (1.5) and thousands without a separator."
    raise _error(f"found {show(value)}, expected a finite number. {todo}", where, row, column)


def read_rows(source: Source, *, split: str | None = None) -> Iterator[Row]:
    """Return an iterator over a table's rows; files are streamed, never held.

    Args:
        source: A .csv, .tsv, .jsonl, .ndjson or .parquet file, a folder with train/validation/test files, a `Dataset`, a
            `DatasetDict` or a hub id. Text files are UTF-8; csv and tsv have a header, and their cells stay strings.
        split: Which of several splits.

    Raises:
        TableError: at once for a missing source or split; on the way for what cannot be read, or no row at all.
    """
    return (row for _, _, row in _records(_open(source, split), split or "data"))


def _records(table: Table, name: str) -> Iterator[tuple[str, int, Row]]:
    """Yield where a row stands (with the line in text files), its number and the row; raise for the first bad one."""
    number, where = 0, str(table) if isinstance(table, Path) else f"data set {name!r}"
    read = READERS[table.suffix.lower()] if isinstance(table, Path) else lambda t: ((0, row) for row in t.with_format(None))
    for number, (line, row) in enumerate(read(table), start=1):
        place = f"{where}, line {line}" if line else where
        if isinstance(row, str):
            raise _error(row, place, number)
        for column, value in row.items():
            try:
                _ = column.encode(), isinstance(value, str) and value.encode()
            except UnicodeEncodeError:
                todo = "Convert the file to UTF-8: it may be latin-1 or UTF-16 (in Excel, save as 'CSV UTF-8')."
                raise _error(f"found {show(value)}, which is not UTF-8. {todo}", place, number, column) from None
        yield place, number, row
    if not number:
        raise TableError(f"{where}: the table is empty, or a header without rows. Check that it is the right one.")


def _read_csv(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yield the line where a row ends (0 = not a text file) and the row, or what is wrong with it; so do all readers."""
    csv.field_size_limit(2**31 - 1)  # for the process; the default of 131,072 characters is less than a long document
    delimiter = DELIMITERS[path.suffix.lower()]
    with path.open(newline="", **TEXT_FILE) as file:
        # strict: an open quote would otherwise swallow the rest of the file in silence.
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = _check_header(next(filter(None, reader), []), path)
            for cells in filter(None, reader):  # without blank lines
                ragged = f"found {len(cells)} cells, expected {len(header)}. A cell with {delimiter!r} in it needs quotes."
                same = len(cells) == len(header)
                yield reader.line_num, dict(zip(header, cells, strict=True)) if same else ragged
        except csv.Error as error:
            yield reader.line_num, f"cannot read a cell ({error}). Put it in quotes and double the quotes inside it."


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row | str]]:
    with path.open(newline="\n", **TEXT_FILE) as file:
        for line, text in enumerate(file, start=1):
            row = None
            with suppress(ValueError):
                row = {} if text.isspace() else json.loads(text)
            if not isinstance(row, dict):
                yield line, f"found {show(text.strip())}, expected one JSON object on the line."
            elif not text.isspace():
                yield line, row


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | str]]:
    try:
        with pq.ParquetFile(path) as file:
            names = _check_header(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=1024):
                for i in range(batch.num_rows):
                    try:
                        yield 0, {name: batch[name][i].as_py() for name in names}
                    except UnicodeDecodeError as error:  # nobody checked the bytes when the file was written
                        yield 0, f"found {show(error.object)}, which is not UTF-8. Write the file again as UTF-8."
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path}: not a whole parquet file ({error}). Write it again.") from error


READERS = dict.fromkeys(DELIMITERS, _read_csv) | dict.fromkeys((".jsonl", ".ndjson"), _read_jsonl) | {".parquet": _read_parquet}


def _check_header(names: list[str], path: Path) -> list[str]:
    if not all(name.strip() for name in names):
        raise TableError(f"{path}: a column of the header has no name (pandas writes its index so: use index=False).")
    if len(set(names)) < len(names):
        raise TableError(f"{path}: the header {names} has a name more than once. Rename one.")
    return names


def _tables(source: Source) -> dict[str, Table]:
    """Return a source's tables by split; a table without splits has the key ''."""
    if isinstance(source, datasets.Dataset):
        return {"": source}
    if not isinstance(source, (str, os.PathLike, datasets.DatasetDict)):
        raise TableError(f"a source is a path, a hub id, a Dataset or a DatasetDict, got {type(source).__name__}.")
    found: dict[Any, Table] = source if isinstance(source, datasets.DatasetDict) else {}
    if isinstance(source, (str, os.PathLike)):
        path, endings = Path(source).expanduser(), " or ".join(ENDINGS)
        if path.is_dir():
            found = {p: p for p in sorted(path.iterdir()) if p.suffix.lower() in ENDINGS and p.stem.lower() in SPLITS}
        elif path.exists() and path.suffix.lower() in ENDINGS:
            return {"": path}
        elif path.exists():
            raise TableError(f"{path}: unknown ending {path.suffix!r}. Save the table as {endings}.")
        elif path.suffix.lower() in ENDINGS or not HUB_ID.fullmatch(str(source)):
            raise TableError(f"{path}: there is no such file. Check the name and the folder it is in.")
        else:
            try:
                found = datasets.load_dataset(str(source))
            except Exception as error:  # a dozen kinds without a common ancestor
                problem = f"no file or folder here, and no data set from the hub ({type(error).__name__}: {error})"
                raise TableError(f"{source}: {problem}. The name of a table ends in {endings}.") from error
    tables: dict[str, Table] = {}
    for key, table in found.items():
        name = key.stem if isinstance(key, Path) else key
        if tables.setdefault(SPLITS.get(name.lower(), name), table) is not table:
            raise TableError(f"{source}: {key} is a second table for the {SPLITS[name.lower()]} split. Keep one.")
    if not tables:
        raise TableError(f"{source}: no table called train, validation or test that ends in one of {ENDINGS}.")
    return tables


def _open(source: Source, split: str | None, fallback: str = "") -> Table:
    tables = _tables(source)
    wanted = split or (fallback if len(tables) > 1 else next(iter(tables)))
    wanted = SPLITS.get(wanted.lower(), wanted)
    if wanted not in tables:
        have = "is one table without splits, so name none" if "" in tables else f"has the splits {list(tables)}, name one"
        raise TableError(f"{source if isinstance(source, (str, Path)) else 'the data'} {have}; got split={split!r}.")
    return tables[wanted]


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
    features = {**dict.fromkeys(columns.text, datasets.Value("string")), "labels": datasets.Sequence(number)}
    features |= {"sample_weight": number} if columns.weight is not None else {}
    rows = (_check_row(columns, *record) for record in _records(_open(source, split), split or name))
    chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])  # as Arrow they take far less memory than as objects
    tables = [datasets.Dataset.from_list(chunk, datasets.Features(features)) for chunk in chunks]
    return datasets.concatenate_datasets(tables)


def _check_row(columns: Columns, where: str, number: int, row: Row) -> Row:
    _check_present(columns.used, where, number, row)
    for c in columns.text:
        # A number is a text too, but nan is how pandas writes a missing value.
        if not isinstance(row[c], (str, Number)) or isinstance(row[c], bool) or row[c] != row[c]:
            raise _error(f"found {show(row[c])}, expected a text. Fill it in or remove the row.", where, number, c)
    checked: Row = {c: str(row[c]) for c in columns.text}
    if not any(text.strip() for text in checked.values()):
        raise _error("the text is empty. Fill it in or remove the row.", where, number, " + ".join(columns.text))
    checked["labels"] = [check_label(row[c], where=where, column=c, row=number) for c in columns.label]
    if columns.weight is not None:
        checked["sample_weight"] = check_label(row[columns.weight], where=where, column=columns.weight, row=number)
        if checked["sample_weight"] < 0:
            raise _error(f"found {row[columns.weight]!r}, expected a weight >= 0.", where, number, columns.weight)
    return checked


def _check_present(columns: Sequence[str], where: str, number: int, row: Row) -> None:
    for column in columns:
        if column not in row:
            names = {name.strip().casefold(): name for name in row}
            close = difflib.get_close_matches(column.strip().casefold(), names, n=1)
            hint = f" Did you mean {names[close[0]]!r}?" if close else ""
            if len(row) == 1 and re.search("[;,|\t]", *row):
                hint += " The cells seem not to be separated: .csv needs commas, .tsv needs tabs."
            raise _error(f"no column {column!r}; the columns are {list(row)}.{hint}", where, number)


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
    records = list(islice(_records(_open(source, split, fallback="train"), split or "train"), 1000))
    where, number, first = records[0]
    taken = [*([label] if isinstance(label, str) else label), *([] if weight is None else [weight])]
    _check_present(taken, where, number, first)
    guess = []
    for column in first:
        texts = [value for _, _, row in records if isinstance(value := row.get(column), str)]
        if column not in taken and not ID_LIKE.fullmatch(column) and not all(map(NO_TEXT.fullmatch, texts)):
            guess.append(column)
    if not guess:
        raise TableError(f"{where}: none of the columns {list(first)} looks like text. Name the text columns.")
    return tuple(guess)


def label_matrix(dataset: datasets.Dataset) -> np.ndarray:
    """Return the `labels` of a data set from [`load_split`] as (N, K) float64, in label units."""
    return np.array(dataset["labels"][:], dtype=np.float64).reshape(len(dataset), -1)


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
    tables = _tables(source)
    tables = {"train": tables[""]} if "" in tables else tables
    for name, own in (("validation", validation), ("test", test)):
        if own is not None:
            tables[name] = _open(own, None, fallback=name)
    if "train" not in tables:
        raise TableError(f"{source}: no train split among {list(tables)}.")
    splits = {name: load_split(tables[name], columns, name=name) for name in SPLITS.values() if name in tables}
    ...
