"""Tables: what is read, what is refused and with which words, how rows are dealt out, what is written."""

import csv
import json
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modeling_relish.data import (
    Columns,
    RowWriter,
    TableError,
    check_label,
    guess_text_columns,
    label_matrix,
    load_split,
    load_splits,
    read_rows,
)

COLUMNS = Columns(text=("text",), label=("score",))
ROWS = [
    {"text": "good, really", "score": 4.5},
    {"text": "naïve 🙂 «тест»", "score": -1.0},
    {"text": "007", "score": 2.0},
]
ENDINGS = ["csv", "tsv", "jsonl", "ndjson", "parquet"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(name, *args, **kwargs):
        raise ConnectionError(f"asked the hub for {name}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def save(path: Path, rows: list[dict]) -> Path:
    """Write a table without the code under test."""
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


# ---------------------------------------------------------------------- labels, texts, weights


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (3.5, 3.5), ("3.5", 3.5), (" 4 ", 4.0), ("-1e-3", -0.001), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
     (np.array(1.5), 1.5), ("+.5", 0.5)],
)  # fmt: skip
def test_labels_that_are_numbers(value, number):
    label = check_label(value, where="t.csv", column="score", row=3)
    assert type(label) is float
    assert label == number


@pytest.mark.parametrize(
    "value",
    ["", "  ", None, "abc", float("nan"), float("inf"), -np.inf, "nan", "inf", "1_000", "1e999", 10**400, True, False,
     np.True_, [1.0], {"a": 1}, b"1", 1j, date(2020, 1, 1)],
)  # fmt: skip
def test_labels_that_are_not(value):
    with raises("t.csv", "row 3", "'score'", "finite number"):
        check_label(value, where="t.csv", column="score", row=3)


@pytest.mark.parametrize("value", ["1,5", "1,234.5", "-0,25"])
def test_a_comma_in_a_label_gets_a_hint(value):
    with raises(repr(value), "point"):
        check_label(value, where="t.csv", column="score", row=3)


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(TableError) as info:
        check_label("x" * 10_000, where="t.csv", column="score", row=3)
    assert len(str(info.value)) < 300


def test_the_row_of_a_bad_label_is_the_row_of_data(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('text,score\n"a\n\nb",1\n\n"c\nd",oops\ne,nan\n', encoding="utf-8")
    with raises("t.csv", "line 6", "row 2", "'score'", "'oops'"):
        load_split(path, COLUMNS)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("bad", [None, True, float("nan"), float("inf"), "x"])
def test_bad_labels_in_typed_formats(tmp_path, ending, bad):
    kind = bool if bad is True else str if bad == "x" else float
    rows = [{"text": "a", "score": kind(1)}, {"text": "b", "score": bad}]
    with raises("row 1" if bad is True else "row 2", "'score'"):
        load_split(save(tmp_path / f"t.{ending}", rows), COLUMNS)


def test_a_data_set_is_called_by_its_name():
    dataset = datasets.Dataset.from_list([{"text": "a", "score": 1.0}, {"text": "b", "score": None}])
    with raises("data set 'dev'", "row 2"):
        load_split(dataset, COLUMNS, name="dev")
    with raises("data set 'test'", "row 2"):
        load_split(datasets.DatasetDict(test=dataset, train=dataset), COLUMNS, split="test")


def test_several_targets_and_weights(tmp_path):
    rows = [{"a": "x", "b": "", "y2": 2, "y1": 1, "w": 0}, {"a": "", "b": "z", "y2": 4, "y1": 3, "w": "2.5"}]
    dataset = load_split(save(tmp_path / "t.csv", rows), Columns(("b", "a"), ("y1", "y2"), weight="w"))
    assert dataset.column_names == ["b", "a", "labels", "sample_weight"]
    assert dataset["sample_weight"][:] == [0.0, 2.5]
    labels = label_matrix(dataset)
    assert labels.dtype == np.float64
    assert labels.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_label_matrix_of_one_target_has_a_column(tmp_path):
    assert label_matrix(load_split(save(tmp_path / "t.csv", ROWS), COLUMNS)).shape == (3, 1)


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "", "heavy"])
def test_bad_weights(tmp_path, weight):
    path = save(tmp_path / "t.csv", [{**ROWS[0], "w": 1}, {**ROWS[1], "w": weight}])
    with raises("row 2", "'w'", weight):
        load_split(path, Columns(("text",), ("score",), "w"))


@pytest.mark.parametrize(
    ("header", "columns", "words"),
    [
        ("text,scores", COLUMNS, ["'score'", "['text', 'scores']", "Did you mean 'scores'?"]),
        ("text,SCORE", COLUMNS, ["Did you mean 'SCORE'?"]),
        ("text, score", COLUMNS, ["Did you mean ' score'?"]),
        ("review,score", COLUMNS, ["'text'", "['review', 'score']"]),
        ("text,score", Columns(("text",), ("score",), "wieght"), ["'wieght'"]),
        ("text;score", COLUMNS, ["'text'", "separated"]),
    ],
)
def test_a_missing_column(tmp_path, header, columns, words):
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{'a;1' if ';' in header else 'a,1'}\n", encoding="utf-8")
    with raises("t.csv", *words):
        load_split(path, columns)


def test_a_column_that_is_missing_in_one_row_of_jsonl(tmp_path):
    path = save(tmp_path / "t.jsonl", [{"text": "a", "score": 1}, {"text": "b"}])
    with raises("row 2", "'score'"):
        load_split(path, COLUMNS)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_numbers_become_text(tmp_path, ending):
    path = save(tmp_path / f"t.{ending}", [{"text": 7, "more": 1.5, "score": 1}])
    dataset = load_split(path, Columns(("text", "more"), ("score",)))
    assert dataset[0] == {"text": "7", "more": "1.5", "labels": [1.0]}


@pytest.mark.parametrize("text", [None, float("nan"), True, ["a"], {"a": "b"}])
def test_values_that_are_no_text(tmp_path, text):
    path = save(tmp_path / "t.jsonl", [{"text": "a", "score": 1}, {"text": text, "score": 1}])
    with raises("row 2", "'text'", "expected a text"):
        load_split(path, COLUMNS)


def test_an_empty_text(tmp_path):
    path = save(tmp_path / "t.csv", [{"a": "x", "b": "", "score": 1}, {"a": " \n", "b": "\t", "score": 1}])
    assert load_split(save(tmp_path / "u.csv", [{"a": "x", "b": " ", "score": 1}]), Columns(("a", "b"), ("score",)))
    with raises("row 2", "a + b", "empty"):
        load_split(path, Columns(("a", "b"), ("score",)))


@pytest.mark.parametrize(
    ("text", "label", "weight"),
    [
        ("text", ("score",), None),
        (("text",), "score", None),
        ((), ("score",), None),
        (("text",), (), None),
        (("text",), ("text",), None),
        (("text", "text"), ("score",), None),
        (("text",), ("score",), "score"),
        (("labels",), ("score",), None),
        (("sample_weight",), ("score",), None),
    ],
)
def test_columns_that_contradict_themselves(text, label, weight):
    with raises("Columns("):
        Columns(text, label, weight)


def test_many_rows(tmp_path):
    dataset = load_split(save(tmp_path / "t.csv", numbered(25_000)), COLUMNS)
    assert dataset["text"][:] == [f"text {i}" for i in range(25_000)]
    assert label_matrix(dataset)[:, 0].tolist() == list(range(25_000))


# ---------------------------------------------------------------------- guessing


def test_guess_keeps_text_in_the_tables_order(tmp_path):
    row = {
        "id": "a7", "doc_id": "b", "userId": "c", "title": "A title", "score": "3", "year": "1999", "price": "1,5", "w": "1",
        "share": "10%", "missing": "NA", "body": "Text", "COVID": "yes",
    }  # fmt: skip
    path = save(tmp_path / "t.csv", [row, {**row, "title": "7", "year": "", "body": ""}])
    assert guess_text_columns(path, ["score"], "w") == ("title", "body", "COVID")
    assert guess_text_columns(path, "score", "w") == ("title", "body", "COVID")


def test_guess_in_typed_tables():
    rows = [{"flag": True, "n": 1, "when": date(2020, 1, 1), "text": None, "score": 1.0, "tags": ["a"]}]
    dataset = datasets.Dataset.from_list([*rows, {**rows[0], "text": "hello"}])
    assert guess_text_columns(dataset, ["score"]) == ("text",)
    both = datasets.DatasetDict(test=dataset.rename_column("text", "other"), train=dataset)
    assert guess_text_columns(both, ["score"]) == ("text",)
    assert guess_text_columns(both, ["score"], split="test") == ("other",)


def test_guess_that_fails(tmp_path):
    path = save(tmp_path / "t.csv", [{"id": "a", "n": 1, "score": 2}])
    with raises("t.csv", "['id', 'n', 'score']", "Name"):
        guess_text_columns(path, ["score"])
    with raises("'scor'", "Did you mean 'score'?"):
        guess_text_columns(path, ["scor"])
    with raises("'w'"):
        guess_text_columns(path, ["score"], "w")


# ---------------------------------------------------------------------- splits


def texts(splits: datasets.DatasetDict) -> dict[str, list[str]]:
    return {name: data["text"][:] for name, data in splits.items()}


def test_one_table_is_split_by_the_seed(tmp_path):
    path = save(tmp_path / "t.csv", numbered(50))
    splits = load_splits(path, COLUMNS, validation_fraction=0.2, seed=3)
    assert list(splits) == ["train", "validation", "test"]
    assert [len(data) for data in splits.values()] == [35, 10, 5]
    assert sorted(text for part in texts(splits).values() for text in part) == sorted(f"text {i}" for i in range(50))
    assert texts(splits) == texts(load_splits(str(path), COLUMNS, validation_fraction=0.2, seed=3))
    assert texts(splits) != texts(load_splits(path, COLUMNS, validation_fraction=0.2, seed=4))
    assert splits["test"].features == splits["train"].features


@pytest.mark.parametrize("seed", range(5))
def test_equal_texts_stay_together(seed):
    rows = [{"a": f"a{i % 20}", "b": f"b{i % 2}", "score": i} for i in range(200)]
    splits = load_splits(datasets.Dataset.from_list(rows), Columns(("a", "b"), ("score",)), seed=seed)
    keys = {name: set(zip(data["a"], data["b"], strict=True)) for name, data in splits.items()}
    assert not keys["train"] & keys["validation"]
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]
    assert [len(data) for data in splits.values()] == [160, 20, 20]


@pytest.mark.parametrize("seed", range(5))
def test_a_text_with_most_of_the_rows_is_trained_on(seed):
    rows = [*numbered(20), *([{"text": "same", "score": 1.0}] * 80)]
    splits = load_splits(datasets.Dataset.from_list(rows), COLUMNS, seed=seed)
    assert [len(data) for data in splits.values()] == [80 + 0, 10, 10]


def test_every_text_rated_ten_times():
    rows = [{"text": f"text {i // 10}", "score": float(i)} for i in range(90)]
    splits = load_splits(datasets.Dataset.from_list(rows), COLUMNS)
    assert [len(data) for data in splits.values()] == [70, 10, 10]  # 9 rows are wanted, 10 are nearest
    for data in splits.values():
        assert label_matrix(data)[:, 0].tolist() == sorted(label_matrix(data)[:, 0])  # in the table's order


def test_test_is_left_out_on_request():
    splits = load_splits(datasets.Dataset.from_list(numbered(20)), COLUMNS, test_fraction=0)
    assert {name: len(data) for name, data in splits.items()} == {"train": 18, "validation": 2}


@pytest.mark.parametrize(
    ("n", "fractions"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        (10, {"validation_fraction": 0.01}),
        (10, {"validation_fraction": 0.5, "test_fraction": 0.5}),
    ],
)
def test_too_few_rows(n, fractions):
    with raises("cannot split", f"{n} rows", "Add rows"):
        load_splits(datasets.Dataset.from_list(numbered(n)), COLUMNS, **fractions)


def test_too_few_different_texts():
    with raises("cannot split", "100 rows", "2 different texts"):
        load_splits(datasets.Dataset.from_list([{"text": f"{i % 2}", "score": i} for i in range(100)]), COLUMNS)


@pytest.mark.parametrize(
    "fractions",
    [{"validation_fraction": 0}, {"validation_fraction": 1}, {"test_fraction": -0.1}, {"test_fraction": float("nan")}],
)
def test_bad_fractions(fractions):
    with raises("fraction", "between 0 and 1"):
        load_splits(datasets.Dataset.from_list(numbered(20)), COLUMNS, **fractions)


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev", "Dev"])
def test_a_folder_of_splits(tmp_path, name):
    save(tmp_path / "train.csv", numbered(8))
    save(tmp_path / f"{name}.jsonl", [{"text": "v", "score": 1}])
    save(tmp_path / "test.parquet", [{"text": "t", "score": 1}])
    (tmp_path / "notes.txt").write_text("not a table", encoding="utf-8")
    splits = load_splits(tmp_path, COLUMNS)
    assert texts(splits) == {"train": [f"text {i}" for i in range(8)], "validation": ["v"], "test": ["t"]}
    assert [row["text"] for row in read_rows(str(tmp_path), split="dev")] == ["v"]
    assert guess_text_columns(tmp_path, ["score"]) == ("text",)


def test_what_a_folder_lacks_comes_from_its_training_rows(tmp_path):
    save(tmp_path / "train.csv", numbered(20))
    save(tmp_path / "test.csv", [{"text": "t", "score": 1}])
    splits = load_splits(tmp_path, COLUMNS)
    assert [len(data) for data in splits.values()] == [18, 2, 1]


def test_folders_that_are_refused(tmp_path):
    with raises(str(tmp_path), "train, validation or test"):
        load_splits(tmp_path, COLUMNS)
    save(tmp_path / "test.csv", ROWS)
    with raises("no train split", "['test']"):
        load_splits(tmp_path, COLUMNS)
    save(tmp_path / "train.csv", ROWS)
    save(tmp_path / "train.jsonl", ROWS)
    with raises("second table", "train"):
        load_splits(tmp_path, COLUMNS)


def test_a_dataset_dict_and_sources_that_win():
    parts = {name: datasets.Dataset.from_list([{"text": name, "score": 1.0}]) for name in ("dev", "test", "other")}
    source = datasets.DatasetDict(train=datasets.Dataset.from_list(numbered(20)), **parts)
    assert texts(load_splits(source, COLUMNS))["validation"] == ["dev"]
    splits = load_splits(source, COLUMNS, validation=parts["other"], test=source)
    assert texts(splits) == {"train": [f"text {i}" for i in range(20)], "validation": ["other"], "test": ["test"]}


def test_an_error_in_a_split_names_it(tmp_path):
    save(tmp_path / "train.csv", numbered(20))
    save(tmp_path / "dev.csv", [{"text": "v", "score": "bad"}])
    with raises("dev.csv", "row 1", "'bad'"):
        load_splits(tmp_path, COLUMNS)
    with raises("data set 'validation'", "row 1"):
        bad = datasets.Dataset.from_list([{"text": "v", "score": "bad"}])
        load_splits(tmp_path / "train.csv", COLUMNS, validation=bad)


def test_texts_that_the_users_own_splits_share_are_reported(caplog):
    train = datasets.Dataset.from_list(numbered(20))
    load_splits(train, COLUMNS, test=datasets.Dataset.from_list(numbered(3)))
    assert [r.message[:47] for r in caplog.records] == ["3 text(s) of the test data are in the train dat"]


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
