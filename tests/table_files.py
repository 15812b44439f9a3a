"""Tables on disk, written without the code under test."""

import csv
import json
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modeling_relish.data import (
    Columns,
    TableError,
)

COLUMNS = Columns(text=("text",), label=("score",))
ROWS = [
    {"text": "good, really", "score": 4.5},
    {"text": "naïve 🙂 «тест»", "score": -1.0},
    {"text": "007", "score": 2.0},
]
ENDINGS = ["csv", "tsv", "jsonl", "ndjson", "parquet"]


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(name, *args, **kwargs):
        raise ConnectionError(f"asked the hub for {name}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def save(path: Path, rows: list[dict]) -> Path:
    """Write a table without the code under test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".jsonl", ".ndjson"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def numbered(n: int, **more) -> list[dict]:
    return [{"text": f"text {i}", "score": float(i), **more} for i in range(n)]


@contextmanager
def raises(*words: str):
    """Expect a TableError whose message holds all the words."""
    with pytest.raises(TableError) as info:
        yield
    missing = [word for word in words if word not in str(info.value)]
    assert not missing, f"{str(info.value)!r} lacks {missing}"
