"""`relish explain` from the outside."""

import csv
import sys
from itertools import pairwise

import pytest
from tiny import TEXTS, save_backbone
from training import SCALE
from typer.testing import CliRunner

from modeling_relish import RelishForSequenceRegression, cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model over pairs, with its base model and tokenizer beside it."""
    folder = tmp_path_factory.mktemp("explain")
    base = save_backbone("llama", folder / "base")
    model = RelishForSequenceRegression.from_backbone(
        str(base),
        prompt_template="A: {one}\nB: {two}\nScore:",
        head_hidden_size=16,
        head_num_attention_heads=4,
        **SCALE,
    )
    model.save_pretrained(folder / "out")
    return folder / "out"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("one", "two", "note"), *((a, b, "x") for a, b in pairwise(TEXTS))])
    return path


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["explain", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_texts_are_explained_on_the_screen_and_in_both_files(trained, tmp_path):
    model = RelishForSequenceRegression.from_pretrained(trained)
    prediction = f"{model.predict([('[bold]Good', 'Bad.')])[0]:.4g}"
    words = [trained, "--text", "[bold]Good", "--text", "Bad."]
    assert prediction in run(*words)
    page = tmp_path / "new" / "explain.html"
    output = run(*words, "--output", page)
    assert "explain.html" in output
    assert f"RELISH: {prediction}</h1>" in page.read_text(encoding="utf-8")
    run(*words, "--output", tmp_path / "explain.png")
    assert (tmp_path / "explain.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_of_a_table_is_explained(trained, table):
    model = RelishForSequenceRegression.from_pretrained(trained)
    for row in (1, 5):
        prediction = model.predict([(TEXTS[row - 1], TEXTS[row])])[0]
        assert f"{prediction:.4g}" in run(trained, "--data", table, "--row", row)


def test_a_row_of_a_split_is_explained(trained, table, tmp_path):
    (tmp_path / "data").mkdir()
    for name, text in (("train", "Never this."), ("test", "A test.")):
        (tmp_path / "data" / f"{name}.csv").write_text(f"one,two\n{text},{text}\n", encoding="utf-8")
    prediction = RelishForSequenceRegression.from_pretrained(trained).predict([("A test.", "A test.")])[0]
    assert f"{prediction:.4g}" in run(trained, "--data", tmp_path / "data", "--split", "test")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--text"),
        (["--text", "a", "--text", "b", "--data", "TABLE"], "one of the two"),
        (["--text", "a"], "got 1 text"),
        (["--data", "TABLE", "--row", "99"], "no row 99"),
        (["--text", "a", "--text", "b", "--row", "3"], "one of the two"),
        (["--text", "a", "--text", " "], "--text is empty"),
        (["--text", "a", "--text", "b", "--output", "x.pdf"], "x.pdf"),
    ],
)
def test_what_the_user_can_mend_is_one_line(trained, table, arguments, words, monkeypatch, capsys):
    arguments = [str(table) if a == "TABLE" else a for a in arguments]
    monkeypatch.setattr(sys, "argv", ["relish", "explain", str(trained), *arguments])
    with pytest.raises(SystemExit) as info:
        cli.main()
    assert info.value.code == 1
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert words in err
