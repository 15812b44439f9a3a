"""Rows of tables, read and written: csv, tsv, jsonl, parquet, folders of splits, `datasets` objects, hub ids.

A csv cell stays the text that it is ("NA", "007"). Rows count from 1, as a reader of the table counts them: the header and
blank lines do not count.
"""

from __future__ import annotations

import csv
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from reprlib import repr as show  # shortens
from typing import Any, TypeAlias

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SPLITS = {"train": "train", **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"), "test": "test"}
CHUNK_ROWS = 10_000
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

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
            except UnicodeEncodeError as error:
                near = error.object[max(0, error.start - 15) : error.start + 15]
                todo = "Convert the file to UTF-8; it may be latin-1 or UTF-16 (in Excel, save as 'CSV UTF-8')."
                raise row_error(f"found {near!r}, which is not UTF-8. {todo}", place, number, column) from None
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


def _open_text(path: Path, newline: str | None = None) -> Any:
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
    with _open_text(path) as file:
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
        text: dict[str, Any] = {} if self._ending == ".parquet" else {"encoding": "utf-8", "newline": ""}
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
