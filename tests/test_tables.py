"""Tables: what is read, what is refused and with which words, what is written."""

import csv
from datetime import date
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from table_files import COLUMNS, ENDINGS, ROWS, numbered, raises, save

from modeling_relish.data import (
    RowWriter,
    load_split,
    read_rows,
)

pytestmark = pytest.mark.usefixtures("no_hub")


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_gives_the_same_data_set(tmp_path, ending):
    dataset = load_split(save(tmp_path / f"table.{ending}", ROWS), COLUMNS)
    assert dataset.column_names == ["text", "labels"]
    assert dataset["text"][:] == [row["text"] for row in ROWS]
    assert dataset["labels"][:] == [[4.5], [-1.0], [2.0]]
    assert dataset.features["labels"] == datasets.Sequence(datasets.Value("float64"))
    assert dataset.cache_files == []


@pytest.mark.parametrize("ending", ["CSV", "Parquet"])
def test_the_ending_may_be_in_capitals_and_the_path_a_string(tmp_path, ending):
    path = save(tmp_path / f"table.{ending.lower()}", ROWS).rename(tmp_path / f"table.{ending}")
    assert len(list(read_rows(str(path)))) == 3


def test_rows_of_data_sets(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    assert list(read_rows(dataset)) == ROWS
    assert [type(value) for value in next(read_rows(dataset.with_format("numpy"))).values()] == [str, float]
    both = datasets.DatasetDict(train=dataset, dev=dataset.select([0]))
    assert list(read_rows(both, split="validation")) == list(read_rows(both, split="dev")) == ROWS[:1]
    assert list(read_rows(datasets.DatasetDict(only=dataset))) == ROWS
    with raises("['train', 'validation']", "name one"):
        read_rows(both)
    with raises("['train', 'validation']", "split='test'"):
        read_rows(both, split="test")
    with raises("without splits", "split='train'"):
        read_rows(save(tmp_path / "t.csv", ROWS), split="train")


def test_csv_cells_stay_text(tmp_path):
    cells = ["NA", "null", "None", "007", "1e3", "", "True", " padded ", "nan"]
    path = save(tmp_path / "t.csv", [{"text": c, "other": "x"} for c in cells])
    assert [row["text"] for row in read_rows(path)] == cells


def test_csv_with_bom_quotes_newlines_and_blank_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbftext,score\r\n"a\r\nb, ""c""",1\r\n\r\nd,2\r\n\r\n')
    assert list(read_rows(path)) == [{"text": 'a\r\nb, "c"', "score": "1"}, {"text": "d", "score": "2"}]


def test_jsonl_with_bom_blank_lines_and_line_separators_in_text(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"text": "a\u2028b\x85c", "n": null}\r\n\n{"text": "d"}', encoding="utf-8")
    assert list(read_rows(path)) == [{"text": "a\u2028b\x85c", "n": None}, {"text": "d"}]


def test_a_text_longer_than_the_csv_module_allows_by_default(tmp_path):
    path = save(tmp_path / "t.csv", [{"text": "x" * 300_000, "score": 1}])
    csv.field_size_limit(131_072)
    assert len(load_split(path, COLUMNS)["text"][0]) == 300_000


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("text,score\na,1\nb,2,3\n", encoding="utf-8")
    rows = read_rows(path)
    assert next(rows) == {"text": "a", "score": "1"}
    with raises("row 2"):
        next(rows)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"", ["t.csv", "empty"]),
        ("t.csv", b"\n\n", ["empty"]),
        ("t.csv", b"text,score\n", ["header without rows"]),
        ("t.tsv", b"text\tscore\n\n", ["header without rows"]),
        ("t.jsonl", b"", ["empty"]),
        ("t.jsonl", b"\n \n", ["empty"]),
        ("t.parquet", b"", ["t.parquet", "not a whole parquet file"]),
        ("t.parquet", b"text,score\na,1\n", ["not a whole parquet file"]),
        ("t.csv", b"text,score,text\na,1,b\n", ["['text']", "more than once"]),
        ("t.csv", b",text,score\n0,a,1\n", ["no name", "index=False"]),
        ("t.csv", b"text,score\na,1\n\nb,c,2\n", ["t.csv", "line 4", "row 2", "3 cells", "expected 2", "quotes"]),
        ("t.csv", b'text,score\n"a\nb",1\nc\n', ["line 4", "row 2", "1 cells", "expected 2"]),
        ("t.csv", b'text,score\na,1\n"b,2\nc,3\n', ["line 3", "row 2", "cannot read a cell"]),
        ("t.csv", b'text,score\n"a" b,1\n', ["line 2", "row 1", "cannot read a cell"]),
        ("t.csv", b"text,score\na,1\ncaf\xe9,2\n", ["t.csv", "line 3", "row 2", "'text'", "UTF-8", "latin-1"]),
        ("t.csv", b"caf\xe9,score\na,1\n", ["row 1", "UTF-8", "latin-1"]),
        ("t.csv", "text,score\na,1\n".encode("utf-16"), ["UTF-8", "UTF-16"]),
        ("t.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', ["line 2", "row 2", "'text'", "UTF-8"]),
        ("t.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', ["row 2", "'text'", "UTF-8"]),
        ("t.jsonl", b'{"text": "a"}\n\n[1, 2]\n', ["line 3", "row 2", "[1, 2]", "JSON object"]),
        ("t.jsonl", b'{"text": "a"}\n"b"\n', ["row 2", "'b'", "JSON object"]),
        ("t.jsonl", b'{"text": "a"}\n{"text": \n', ["row 2", "JSON object", "Expecting value"]),
        ("t.jsonl", b'{"text": "a", "text": "b"}\n', ["row 1", "key twice"]),
        ("t.xlsx", b"PK", ["t.xlsx", "'.xlsx'", ".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"]),
        ("table", b"text,score\na,1\n", ["unknown ending ''", ".csv"]),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with raises(*words):
        list(read_rows(tmp_path / name))


def test_parquet_files_that_are_refused(tmp_path):
    empty = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "empty.parquet")
    with raises("empty"):
        list(read_rows(tmp_path / "empty.parquet"))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with raises("['text']", "more than once"):
        list(read_rows(tmp_path / "twice.parquet"))
    latin = pa.array([b"a", b"b", b"caf\xe9"]).view(pa.string())
    pq.write_table(pa.table({"n": [1, 2, 3], "text": latin}), tmp_path / "latin.parquet")
    rows = read_rows(tmp_path / "latin.parquet")
    assert [next(rows)["text"], next(rows)["text"]] == ["a", "b"]
    with raises("latin.parquet", "row 3", "'text'", "UTF-8"):
        next(rows)


def test_an_earlier_bad_row_is_named_before_a_later_one(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"text,score\na,1\nb,x\ncaf\xe9,2\nd\n")
    with raises("row 2", "'score'", "'x'"):
        load_split(path, COLUMNS)


@pytest.mark.parametrize(
    "source", ["missing.csv", "./missing", "/missing/folder", "~/missing", "a/b/c", Path("missing")]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(source):
    with raises("no such file", "missing" if "missing" in str(source) else "a/b/c"):
        read_rows(source)


def test_hub_ids(monkeypatch):
    with raises("owner/name", "no file or folder here", "ConnectionError", ".csv"):
        read_rows("owner/name")
    asked = []
    hub = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), dev=datasets.Dataset.from_list(ROWS[:1]))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or hub)
    assert list(read_rows("owner/name", split="validation")) == ROWS[:1]
    assert len(load_split("name", COLUMNS, split="train")) == 3
    assert asked == ["owner/name", "name"]
    with raises("owner/name", "['train', 'validation']"):
        read_rows("owner/name")


def test_another_type_of_source_is_refused():
    with raises("list", "Dataset"):
        read_rows(ROWS)


# ---------------------------------------------------------------------- writing


@pytest.mark.parametrize("ending", ENDINGS)
def test_round_trip(tmp_path, ending):
    nasty = [
        "a,b\tc",
        'say "hi"',
        "two\nlines\r\nhere",
        "lone\rreturn",
        "",
        " ",
        "naïve 🙂",
        "NA",
        "007",
        "x" * 200_000,
        "{brace}",
    ]
    rows = [{"text": text, "prediction": 0.1 + i} for i, text in enumerate(nasty)]
    path = tmp_path / "new" / "folder" / f"out.{ending}"
    with RowWriter(path) as writer:
        for row in rows:
            writer.write(row)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    back = list(read_rows(path))
    assert [row["text"] for row in back] == nasty
    assert [float(row["prediction"]) for row in back] == [row["prediction"] for row in rows]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("n", [0, 3, 10_001])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path, n, ending, earlier, error):
    path = tmp_path / f"out.{ending}"
    if earlier:
        path.write_bytes(b"old")

    def write_and_fail():
        with RowWriter(path) as writer:
            for row in numbered(n):
                writer.write(row)
            assert not earlier or path.read_bytes() == b"old"
            raise error

    with pytest.raises(error):
        write_and_fail()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"] * earlier


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("other", [{"text": "b"}, {"text": "b", "score": 1.0, "new": 2}, {"text": "b", "scores": 1.0}])
def test_a_row_with_other_columns(tmp_path, ending, other):
    path = tmp_path / f"out.{ending}"
    with raises(path.name, "row 2", "['text', 'score']"), RowWriter(path) as writer:
        writer.write({"text": "a", "score": 1.0})
        writer.write(other)
    assert not list(tmp_path.iterdir())


def test_the_order_of_a_rows_keys_does_not_matter(tmp_path):
    with RowWriter(tmp_path / "out.csv") as writer:
        writer.write({"a": 1, "b": 2})
        writer.write({"b": 4, "a": 3})
    assert list(read_rows(tmp_path / "out.csv")) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_rows_of_jsonl_may_differ_and_keep_their_types(tmp_path):
    rows = [{"a": None, "b": [1, {"c": True}]}, {"a": 1.5, "d": "x"}]
    with RowWriter(tmp_path / "out.jsonl") as writer:
        for row in rows:
            writer.write(row)
        writer.write({"a": np.float32(0.5), "when": date(2020, 1, 2)})
    assert list(read_rows(tmp_path / "out.jsonl")) == [*rows, {"a": 0.5, "when": "2020-01-02"}]


def test_parquet_keeps_types_over_many_rows(tmp_path):
    rows = [
        {"n": i, "x": 1.5, "none": None, "tags": ["a"] * (i % 3), "note": "late" if i > 20_000 else None}
        for i in range(25_000)
    ]
    with RowWriter(tmp_path / "out.parquet") as writer:
        for row in rows:
            writer.write(row)
    assert list(read_rows(tmp_path / "out.parquet")) == rows
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups > 1  # it did not wait for the end


@pytest.mark.parametrize("bad", [2, 3, 12_345])
def test_a_value_of_another_type_in_parquet(tmp_path, bad):
    with raises("out.parquet", f"row {bad},", "'n'", "'word'"), RowWriter(tmp_path / "out.parquet") as writer:
        for i in range(1, bad + 2):
            writer.write({"text": "a", "n": "word" if i == bad else i / 2})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ending", "value"), [("csv", [1]), ("tsv", {"a": 1}), ("csv", b"a"), ("jsonl", b"a")])
def test_a_value_that_the_format_cannot_hold(tmp_path, ending, value):
    with raises(f"out.{ending}", "row 1", ".parquet"), RowWriter(tmp_path / f"out.{ending}") as writer:
        writer.write({"text": value})


def test_outputs_that_are_refused(tmp_path):
    with raises("out.xlsx", ".csv"):
        RowWriter(tmp_path / "out.xlsx")
    (tmp_path / "folder.csv").mkdir()
    with raises("folder.csv"):
        RowWriter(tmp_path / "folder.csv")
    for ending in ENDINGS:
        with raises("no row"), RowWriter(tmp_path / f"out.{ending}"):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["folder.csv"]


def test_scoring_a_file_in_place(tmp_path):
    path = save(tmp_path / "t.csv", ROWS)
    with RowWriter(path) as writer:
        for row in read_rows(path):
            writer.write({**row, "prediction": 1.0})
    assert [list(row) for row in read_rows(path)] == [["text", "score", "prediction"]] * 3
