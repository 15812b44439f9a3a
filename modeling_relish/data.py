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
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations, islice
from numbers import Number
from pathlib import Path
from reprlib import repr as show  # shortens
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.utils import logging

logger = logging.get_logger(__name__)

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SPLITS = {"train": "train", **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"), "test": "test"}
CHUNK_ROWS = 10_000
GUESS_ROWS = 1000
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
ID_LIKE = re.compile(
    r"(.*[_\-. ])?(id|idx|index|uid|uuid|guid)|(?-i:.*[a-z]I[dD])|unnamed: ?\d+|__index_level_\d+__", re.I
)
NO_TEXT = re.compile(r"\s*([-+]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?%?|[-+]?inf(inity)?|nan|na|n/a|null|none|-)?\s*", re.I)

Source: TypeAlias = str | os.PathLike[str] | datasets.Dataset | datasets.DatasetDict
Table: TypeAlias = Path | datasets.Dataset
Row: TypeAlias = dict[str, Any]


class TableError(ValueError):
    """A table that cannot be used as it is; the message says where, what was found and what to do."""


def row_error(problem: str, where: str, row: int, column: str | None = None) -> TableError:
    """Return the error of one row (from 1); `where` is its file or data set."""
    return TableError(f"{where}, row {row}{'' if column is None else f', column {column!r}'}: {problem}")


# ---------------------------------------------------------------------- reading rows


def read_rows(source: Source, *, split: str | None = None) -> Iterator[Row]:
    """Return an iterator over a table's rows; files are streamed, never held.

    Args:
        source: A .csv, .tsv, .jsonl, .ndjson or .parquet file, a folder with train/validation/test files, a `Dataset`, a
            `DatasetDict` or a hub id. Text files are UTF-8; csv and tsv have a header, and their cells stay strings.
        split: Which of several splits.

    Raises:
        TableError: at once for a missing source or split; on the way for what cannot be read, or no row at all.
    """
    return (row for _, _, row in records(open_table(source, split), split or "data"))


def records(table: Table, name: str) -> Iterator[tuple[str, int, Row]]:
    """Yield where a row stands (with the line in text files), its number and the row; raise for the first bad one."""
    where = str(table) if isinstance(table, Path) else f"data set {name!r}"
    number = 0
    for number, (line, row) in enumerate(_read(table), start=1):
        place = f"{where}, line {line}" if line else where
        if isinstance(row, str):
            raise row_error(row, place, number)
        for column, value in row.items():
            try:
                _ = column.encode(), isinstance(value, str) and value.encode()
            except UnicodeEncodeError:
                todo = "Convert the file to UTF-8; it may be latin-1 or UTF-16 (in Excel, save as 'CSV UTF-8')."
                raise row_error(f"found {show(value)}, which is not UTF-8. {todo}", place, number, column) from None
        yield place, number, row
    if not number:
        raise TableError(f"{where}: the table is empty, or a header without rows. Check that it is the right one.")


def _read(table: Table) -> Iterator[tuple[int, Row | str]]:
    """Yield the line where a row starts (0 = not a text file), and the row or what is wrong with it."""
    if isinstance(table, datasets.Dataset):
        return ((0, row) for row in table.with_format(None))
    if table.suffix.lower() == ".parquet":
        return _read_parquet(table)
    return _read_csv(table) if table.suffix.lower() in DELIMITERS else _read_jsonl(table)


def _open_text(path: Path, newline: str) -> Any:
    # surrogateescape carries bytes that are not UTF-8 through the parsers, so that the error can name their cell.
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_csv(path: Path) -> Iterator[tuple[int, Row | str]]:
    csv.field_size_limit(2**31 - 1)  # for the process; the default of 131,072 characters is less than a long document
    header: list[str] = []
    delimiter, line = DELIMITERS[path.suffix.lower()], 1
    with _open_text(path, newline="") as file:
        # strict: an open quote would otherwise swallow the rest of the file in silence.
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                if cells and not header:
                    header = _check_header(cells, path)
                elif cells and len(cells) != len(header):
                    todo = f"A cell with {delimiter!r} in it needs quotes."
                    yield line, f"found {len(cells)} cells, expected {len(header)} as in the header. {todo}"
                elif cells:  # else a blank line
                    yield line, dict(zip(header, cells, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            yield line, f"cannot read a cell ({error}). Put it in quotes, and double the quotes inside it."


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row | str]]:
    with _open_text(path, newline="\n") as file:
        for line, text in enumerate(file, start=1):
            if text.isspace():
                continue
            try:
                row = json.loads(text, object_pairs_hook=_json_object)
                yield line, row if isinstance(row, dict) else f"found {show(row)}, expected a JSON object on the line."
            except ValueError as error:
                yield line, f"found {show(text.strip())}, expected a JSON object on the line ({error})."


def _json_object(pairs: list[tuple[str, Any]]) -> Row:
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | str]]:
    try:
        with pq.ParquetFile(path) as file:
            names = _check_header(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=1024):
                for i in range(batch.num_rows):
                    row: Row = {}
                    try:
                        for name, column in zip(names, batch.columns, strict=True):
                            row[name] = column[i].as_py()
                    except UnicodeDecodeError:  # nobody checked the bytes when the file was written
                        todo = "Write the file again as UTF-8; it may be latin-1."
                        yield 0, f"found bytes in column {name!r} that are not UTF-8. {todo}"
                    yield 0, row
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path}: not a whole parquet file ({error}). Write it again.") from error


def _check_header(names: list[str], path: Path) -> list[str]:
    if not all(name.strip() for name in names):
        raise TableError(f"{path}: a column of the header has no name (pandas writes its index so: use index=False).")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TableError(f"{path}: the header has {twice} more than once. Rename one.")
    return names


# ---------------------------------------------------------------------- sources


def tables_of(source: Source) -> dict[str, Table]:
    """Return a source's tables by split; a table without splits has the key ''."""
    if isinstance(source, datasets.Dataset):
        return {"": source}
    if isinstance(source, datasets.DatasetDict):
        return _by_split(list(source.items()), "the DatasetDict")
    if not isinstance(source, (str, os.PathLike)):
        raise TableError(f"a source is a path, a hub id, a Dataset or a DatasetDict, got {type(source).__name__}.")
    path = Path(source).expanduser()
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if p.suffix.lower() in ENDINGS and p.stem.lower() in SPLITS]
        return _by_split([(p.stem, p) for p in files], str(path))
    if path.exists() and path.suffix.lower() not in ENDINGS:
        raise TableError(f"{path}: unknown ending {path.suffix!r}. Save the table as {' or '.join(ENDINGS)}.")
    if path.exists():
        return {"": path}
    if path.suffix.lower() in ENDINGS or not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise TableError(f"{path}: there is no such file. Check the name and the folder it is in.")
    try:
        loaded = datasets.load_dataset(source)
    except Exception as error:  # a dozen kinds without a common ancestor
        problem = f"no file or folder here, and no data set from the hub ({type(error).__name__}: {error})"
        raise TableError(f"{source}: {problem}. The name of a table ends in {' or '.join(ENDINGS)}.") from error
    return _by_split(list(loaded.items()), source)


def _by_split(found: list[tuple[str, Any]], where: str) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for name, table in found:
        split = SPLITS.get(name.lower(), name)
        if split in tables:
            raise TableError(f"{where}: {name} is a second table for the {split} split. Keep one.")
        tables[split] = table
    if not tables:
        raise TableError(f"{where}: no table called train, validation or test that ends in {' or '.join(ENDINGS)}.")
    return tables


def open_table(source: Source, split: str | None, fallback: str | None = None) -> Table:
    """Return the one table that is meant; of several, without `split`, the one called `fallback`."""
    tables = tables_of(source)
    wanted = split or (next(iter(tables)) if len(tables) == 1 else fallback or "")
    wanted = SPLITS.get(wanted.lower(), wanted)
    if wanted not in tables:
        where = source if isinstance(source, (str, os.PathLike)) else "the data"
        have = "is one table without splits: name none" if "" in tables else f"has the splits {list(tables)}: name one"
        raise TableError(f"{where} {have}; got split={split!r}.")
    return tables[wanted]


# ---------------------------------------------------------------------- writing rows


class RowWriter:
    """Context manager that writes rows to csv, tsv, jsonl or parquet as they come: the whole file or nothing.

    The rows go to a temporary file in the same folder, which takes the place of `path` when the block ends without an
    error; after an error it is removed, and an earlier file stays. The first row's keys are the columns; only in jsonl may
    later rows have others. Parquet takes a column's type from the first 10,000 rows.

    Args:
        path: The file; its ending chooses the format. A missing folder is made.

    Raises:
        TableError: for an unknown ending, a folder, no row at all, or a row that does not fit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self._ending = self.path.suffix.lower()
        if self._ending not in ENDINGS or self.path.is_dir():
            raise TableError(f"{path}: cannot write there; the name of a table ends in {' or '.join(ENDINGS)}.")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._columns: list[str] = []
        self._rows: list[Row] = []  # parquet's, not written yet
        self._count = 0
        self._stack = ExitStack()
        self._writer: Any = None

    def __enter__(self) -> RowWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = {} if self._ending == ".parquet" else {"encoding": "utf-8", "newline": ""}
        self._file: Any = self._stack.enter_context(self._temporary.open("w" if text else "wb", **text))
        return self

    def write(self, row: Row) -> None:
        """Append one row.

        Raises:
            TableError: for other columns than the first row's, or a value that the format cannot hold.
        """
        self._count += 1
        self._columns = self._columns or list(row)
        if self._ending in (".jsonl", ".ndjson"):
            self._file.write(json.dumps(row, ensure_ascii=False, default=self._plain) + "\n")
            return
        if set(row) != set(self._columns):
            raise row_error(f"found columns {list(row)}, expected {self._columns}.", str(self.path), self._count)
        if self._ending == ".parquet":
            self._rows.append(dict(row))
            if len(self._rows) == CHUNK_ROWS:
                self._flush()
            return
        if self._writer is None:
            # The line end stays "\r\n": with "\n", Python before 3.13 leaves a text with a lone "\r" without quotes.
            self._writer = csv.DictWriter(self._file, self._columns, delimiter=DELIMITERS[self._ending])
            self._writer.writeheader()
        if nested := [c for c, value in row.items() if isinstance(value, (list, dict, bytes))]:
            raise row_error("such a value fits .jsonl or .parquet only.", str(self.path), self._count, nested[0])
        self._writer.writerow(row)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes):
            raise row_error("bytes fit .parquet only.", str(self.path), self._count)
        return value.item() if getattr(value, "ndim", None) == 0 else str(value)  # a numpy scalar; a date, a decimal

    def _flush(self) -> None:
        """Write the parquet rows that wait."""
        arrays = {c: self._array(c, [row[c] for row in self._rows]) for c in self._columns}
        if self._writer is None:
            self._writer = self._stack.enter_context(pq.ParquetWriter(self._file, pa.table(arrays).schema))
        self._writer.write_table(pa.table(arrays))
        self._rows = []

    def _array(self, column: str, values: list[Any]) -> pa.Array:
        kind = self._writer.schema.field(column).type if self._writer else None

        def fails(stop: int) -> Exception | None:
            try:
                pa.array(values[:stop], type=kind)
            except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
                return error
            return None

        if error := fails(len(values)):
            stop = bisect_left(range(len(values)), True, key=lambda n: fails(n) is not None)
            row = self._count - len(values) + stop
            todo = "Write .jsonl, which holds any value."
            raise row_error(
                f"found {show(values[stop - 1])}, another type ({error}). {todo}", str(self.path), row, column
            )
        array = pa.array(values, type=kind)
        return array.cast(pa.string()) if pa.types.is_null(array.type) else array  # nothing known yet: text

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            with self._stack:  # closes the file
                if kind is None and not self._count:
                    raise TableError(f"{self.path}: there is no row to write.")
                if kind is None and self._rows:
                    self._flush()
            if kind is None:
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


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
    for c in columns.text:
        # A number is a text too, but nan is how pandas writes a missing value.
        if not isinstance(row[c], (str, Number)) or isinstance(row[c], bool) or row[c] != row[c]:
            raise row_error(f"found {show(row[c])}, expected a text. Fill it in or remove the row.", where, number, c)
    checked: Row = {c: str(row[c]) for c in columns.text}
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
    for a, b in combinations(texts, 2):
        if shared := len(set(texts[a]) & set(texts[b])):
            logger.warning(f"{shared} text(s) of the {b} data are in the {a} data too: its figures will flatter.")
    fractions = {"validation": validation_fraction, **({"test": test_fraction} if test_fraction != 0 else {})}
    if missing := {name: fraction for name, fraction in fractions.items() if name not in splits}:
        parts = _deal(texts["train"], missing, seed)
        splits |= {name: splits["train"].select(rows) for name, rows in parts.items()}
    return datasets.DatasetDict({name: splits[name] for name in order if name in splits})


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
