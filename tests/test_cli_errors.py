"""What the command line says: one line for what the user can mend."""

import sys

import pytest
from command_line import options, rows, run, tree
from table_files import save
from typer.testing import CliRunner

from modeling_relish import (
    cli,
)

pytestmark = pytest.mark.usefixtures("exact_command_line")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--label", "grade"], ["data.csv", "'grade'", "'score'"]),
        (["--label", "score", "--text", "body"], ["data.csv", "'body'", "'text'"]),
        (["--label", "score", "--weight", "w"], ["data.csv", "'w'"]),
        (["--label", "text", "--text", "id"], ["data.csv", "row 1", "'text'", "Good. 0"]),
        (["--label", "text"], ["data.csv", "['id', 'text', 'score']", "looks like text"]),
        (["--label", "score", "--label-min", "0"], ["--label-min", "--label-max"]),
        (["--label", "score", "--label-max", "5"], ["--label-min", "--label-max"]),
        (["--label", "score", "--label-min", "5", "--label-max", "0"], ["label_min", "label_max"]),
        (["--label", "score", "--backbone-layer", "top"], ["--backbone-layer", "'top'", "middle"]),
        (["--label", "score", "--backbone-layer", "-1"], ["--backbone-layer", "'-1'"]),
        (["--label", "score", "--backbone-layer", "9"], ["9", "4"]),
        (["--label", "score", "--template", "no field"], ["no field"]),
        (["--label", "score", "--template", "{body}"], ["data.csv", "'body'"]),
        (["--label", "score", "--template", "{text.upper}"], ["{text.upper}"]),
        (["--label", "score", "--pooling", "max", "--head", "mlp"], ["pooling", "'max'"]),
        (["--label", "score", "--validation", "nowhere.csv"], ["nowhere.csv"]),
        (["--label", "score", "--backbone", "nowhere/at-all"], ["nowhere/at-all"]),
        (["--label", "score", "--backbone", "embedded:Nothing"], ["Nothing", "modeling_relish.embedded"]),
    ],
)
def test_wrong_training_command_is_told_in_one_line(arguments, words, base, tmp_path, fails):
    data = save(tmp_path / "data.csv", rows(20))
    before = tree(tmp_path)
    line = fails("train", data, *options(base, tmp_path / "out"), *arguments)
    assert [word for word in words if word not in line] == []
    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "column"), [("good", "score"), ("", "score"), ("nan", "score"), ("1,5", "score"), ("-1", "w"), ("x", "w")]
)
def test_bad_label_or_weight_is_named_with_file_column_and_row(value, column, base, tmp_path, fails):
    table = rows(20, w=1.0)
    table[6][column] = value
    data = save(tmp_path / "my ratings.csv", table)
    line = fails("train", data, "--label", "score", "--weight", "w", *options(base, tmp_path / "out"))
    assert str(data) in line
    assert f"row 7, column '{column}'" in line
    assert repr(value) in line
    assert not (tmp_path / "out").exists()


def test_table_that_cannot_be_read_is_told(base, tmp_path, fails):
    latin = tmp_path / "latin.csv"
    latin.write_bytes("text,score\nfine,1\ncafé au lait,2\n".encode("latin-1"))
    cases = {
        latin: ["latin.csv", "row 2, column 'text'", "UTF-8"],
        tmp_path / "none.csv": ["none.csv", "no such file"],
        save(tmp_path / "table.txt", rows(3)): ["table.txt", ".csv"],
        save(tmp_path / "two.csv", rows(2)): ["2 rows"],
    }
    (tmp_path / "empty.csv").write_text("text,score\n", encoding="utf-8")
    cases[tmp_path / "empty.csv"] = ["empty.csv", "empty"]
    for path, words in cases.items():
        line = fails("train", path, "--label", "score", *options(base, tmp_path / "out"))
        assert [word for word in words if word not in line] == []
    assert not (tmp_path / "out").exists()


def test_output_that_is_a_file_is_refused_before_training(base, tmp_path, fails):
    data = save(tmp_path / "data.csv", rows(20))
    before = tree(tmp_path)
    assert str(data) in fails("train", data, "--label", "score", *options(base, data))
    assert tree(tmp_path) == before


def test_what_is_missing_or_unknown_on_the_line_is_a_usage_error(base, tmp_path):
    for arguments, word in (
        (["train", "data.csv", "--output", "out"], "--label"),
        (["train", "data.csv", "--label", "score"], "--output"),
        (["train", "data.csv", *options(base, tmp_path / "out", label="score", head="transformer")], "transformer"),
        (["train", "data.csv", *options(base, tmp_path / "out", label="score", objective="mae")], "mae"),
        (["predict", "out", "data.csv"], "--output"),
        (["predict", "out", "data.csv", "--output", "s.csv", "--truncation", "somehow"], "somehow"),
        (["judge"], "judge"),
    ):
        result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert word in result.stderr
    for command in ("train", "predict", "evaluate"):
        assert command in run("--help")
        assert "--batch-size" in run(command, "--help")


def test_names_with_brackets_are_printed_as_they_are(trained, tmp_path, fails):
    folder = tmp_path / "[bold]"
    data = save(folder / "[red]data.csv", rows(4))
    assert str(folder / "scored.csv") in run("predict", trained, data, "--output", folder / "scored.csv")
    assert "[red]data.csv" in run("evaluate", trained, data, "--label", "score")
    assert str(data) in fails("evaluate", trained, data, "--label", "grade")


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("RELISH_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["relish", "predict", "m", str(tmp_path / "none.csv"), "--output", "x.csv"])
    with pytest.raises((ValueError, OSError)):
        cli.main()
