"""From tables to data sets: labels, texts and weights, columns that are guessed, splits."""

from datetime import date

import datasets
import numpy as np
import pytest
from table_files import COLUMNS, ROWS, numbered, raises, save

from modeling_relish.data import (
    Columns,
    TableError,
    check_label,
    guess_label_column,
    guess_text_columns,
    label_matrix,
    load_split,
    load_splits,
    read_rows,
)

pytestmark = pytest.mark.usefixtures("no_hub")


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


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_label_is_the_one_column_of_numbers_or_it_is_asked_for(ending, tmp_path):
    rows = [
        {"id": i, "text": f"t{i}", "year": "1999" if i == 3 else "", "flag": "yes", "score": i / 2} for i in range(5)
    ]
    assert guess_label_column(save(tmp_path / f"one.{ending}", rows)) == "score"
    two = [{**row, "other": 3} for row in rows]
    with raises("['score', 'other'] all have numbers"):
        guess_label_column(save(tmp_path / f"two.{ending}", two))
    holed = [{**row, "score": "" if i == 1 else "3,5"} for i, row in enumerate(rows)]  # the loader says what is wrong
    assert guess_label_column(save(tmp_path / f"holed.{ending}", holed)) == "score"
    rows = [{**row, "score": "good"} for row in rows]
    with raises("none of the columns", "'score'"):
        guess_label_column(save(tmp_path / f"none.{ending}", rows))


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
