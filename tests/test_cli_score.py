"""`relish predict` and `relish evaluate` from the outside: tables in, tables and metrics out."""

import shutil

import numpy as np
import pytest
from command_line import load, options, read_json, rows, run, score, tree
from table_files import save

from modeling_relish import (
    cli_score,
)

pytestmark = pytest.mark.usefixtures("exact_command_line")


@pytest.mark.parametrize(
    ("read", "write"), [("csv", "jsonl"), ("tsv", "csv"), ("jsonl", "parquet"), ("parquet", "tsv")]
)
def test_predict_keeps_rows_columns_and_order_in_every_format(read, write, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_score, "CHUNK_ROWS", 4)
    table = [{"n": i, **row, "note": 'a "quoted", note\nover two lines'} for i, row in enumerate(rows(13))]
    table[3]["text"] = table[9]["text"]  # equal texts keep their own rows
    data = save(tmp_path / f"data.{read}", table)
    kept = load(data)
    said = run("predict", trained, data, "--output", tmp_path / "new" / f"scored.{write}", "--batch-size", "3")
    assert "13 rows written" in said
    found = load(tmp_path / "new" / f"scored.{write}")
    assert list(found[0]) == [*kept[0], "prediction"]
    assert [float(row.pop("prediction")) for row in found] == pytest.approx(
        score(trained, [row["text"] for row in table]), rel=1e-6, abs=1e-6
    )
    assert [{k: str(v) for k, v in row.items()} for row in found] == [{k: str(v) for k, v in r.items()} for r in kept]
    assert set(tree(tmp_path)) == {f"data.{read}", f"new/scored.{write}"}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predict_takes_one_split_of_a_folder(ending, trained, tmp_path, fails):
    for name, n, start in (("train", 9, 0), ("dev", 4, 9), ("test", 5, 13)):
        save(tmp_path / "data" / f"{name}.{ending}", rows(n, start))
    for split, n, start in (("test", 5, 13), ("validation", 4, 9)):
        run("predict", trained, tmp_path / "data", "--split", split, "--output", tmp_path / "scored.jsonl")
        found = load(tmp_path / "scored.jsonl")
        assert [row["id"] for row in found] == [f"r{i}" for i in range(start, start + n)]
        expected = score(trained, [row["text"] for row in rows(n, start)])
        assert [row["prediction"] for row in found] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert "name one" in fails("predict", trained, tmp_path / "data", "--output", tmp_path / "none.csv")


def test_predict_may_take_the_place_of_its_own_table(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_score, "CHUNK_ROWS", 4)
    data = save(tmp_path / "data.csv", rows(10))
    before = load(data)
    run("predict", trained, data, "--output", data, "--column", "guess")
    assert [{k: v for k, v in row.items() if k != "guess"} for row in load(data)] == before


def test_predict_needs_the_templates_columns_alone(trained, tmp_path):
    data = save(
        tmp_path / "data.jsonl", [{"text": "a {brace} is no field"}, {"more": [1, {"a": 2}], "text": "7"}, {"text": 7}]
    )
    run("predict", trained, data, "--output", tmp_path / "scored.jsonl")
    found = load(tmp_path / "scored.jsonl")
    assert [row.keys() - {"prediction"} for row in found] == [{"text"}, {"text", "more"}, {"text"}]
    assert [r["prediction"] for r in found] == pytest.approx(
        score(trained, ["a {brace} is no field", "7", "7"]), rel=1e-6
    )


def broken(tmp_path, **cells):
    """Save nine rows, the seventh with other cells."""
    table = rows(9)
    table[6] |= cells
    return save(tmp_path / "data.jsonl", [{k: v for k, v in row.items() if v is not ...} for row in table])


@pytest.mark.parametrize(
    ("cells", "arguments", "words"),
    [
        ({"text": None}, [], ["data.jsonl, row 7, column 'text'", "None"]),
        ({"text": ...}, [], ["data.jsonl, row 7", "'text'", "'score'"]),
        ({"prediction": 1.0}, [], ["data.jsonl", "'prediction'", "--column"]),
        ({}, ["--column", "score"], ["data.jsonl", "'score'", "--column"]),
        ({"text": "long " * 2000}, ["--truncation", "error"], ["data.jsonl, row 7 ", "max_length"]),
    ],
)
def test_predict_that_fails_leaves_nothing_behind(cells, arguments, words, trained, tmp_path, monkeypatch, fails):
    monkeypatch.setattr(cli_score, "CHUNK_ROWS", 4)
    data = broken(tmp_path, **cells)
    out = save(tmp_path / "out" / "scored.jsonl", [{"an": "earlier table"}])
    before = tree(tmp_path)
    for path in (out, tmp_path / "out" / "new.csv"):
        line = fails("predict", trained, data, "--output", path, *arguments)
        assert [word for word in words if word not in line] == []
        assert tree(tmp_path) == before


def test_predict_says_what_is_not_there(trained, tmp_path, fails):
    data = save(tmp_path / "data.csv", rows(3))
    before = tree(tmp_path)
    for model, table, output, word in (
        (trained, tmp_path / "none.csv", "s.csv", "none.csv"),
        (trained, data, "s.xlsx", "s.xlsx"),
        (tmp_path / "nobody", data, "s.csv", "nobody"),
        (tmp_path, data, "s.csv", str(tmp_path)),
    ):
        assert word in fails("predict", model, table, "--output", tmp_path / output)
        assert tree(tmp_path) == before


def test_evaluate_pairs_several_labels_with_the_targets_by_name(base, tmp_path):
    data = save(tmp_path / "data.csv", [{**row, "other": 50 - 3 * row["score"] ** 2} for row in rows(30)])
    table, out = load(data), tmp_path / "out"
    run("train", data, "--label", "score", "--label", "other", *options(base, out))
    predicted = score(out, [row["text"] for row in table])
    for order in (("score", "other"), ("other", "score")):
        labels = [word for name in order for word in ("--label", name)]
        run("evaluate", out, data, *labels, "--output", tmp_path / "m.json")
        found = read_json(tmp_path / "m.json")
        for k, name in enumerate(("score", "other")):  # as the model was trained
            error = predicted[:, k] - np.array([float(row[name]) for row in table])
            assert found[f"mae_{k}"] == pytest.approx(np.abs(error).mean(), rel=1e-4)


def test_evaluate_says_what_is_wrong(trained, tmp_path, fails):
    data = save(tmp_path / "data.csv", [{**row, "note": "good"} for row in rows(5)])
    for name in ("train", "test"):
        shutil.copy(data, tmp_path / f"{name}.csv")
    assert "'grade'" in fails("evaluate", trained, data, "--label", "grade")
    assert "row 1, column 'note'" in fails("evaluate", trained, data, "--label", "note")
    assert "'test', 'train'" in fails("evaluate", trained, tmp_path, "--label", "score")
    assert "'dev'" in fails("evaluate", trained, tmp_path, "--label", "score", "--split", "dev")
    line = fails("evaluate", trained, data, "--label", "score", "--label", "id")
    assert "column 'id'" in line
    twice = save(tmp_path / "twice.csv", [{**row, "other": 1} for row in rows(5)])
    before = tree(tmp_path)
    line = fails("evaluate", trained, twice, "--label", "score", "--label", "other", "--output", tmp_path / "m.json")
    assert "1" in line
    assert "2" in line
    assert tree(tmp_path) == before
