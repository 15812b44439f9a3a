"""`relish predict` killed and taken up again, and shared among processes: one output, in input order, whole or not at all."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_accelerate import launch
from tiny import SCORES, TEXTS, byte_bpe_tokenizer, digit_bpe_tokenizer, save_backbone, sentencepiece_tokenizer
from training import SCALE, tiny_model
from transformers import AutoTokenizer, PythonBackend
from typer.testing import CliRunner

from modeling_relish import cli, cli_score
from modeling_relish.score_parts import Part, ScorePartError, ScoreParts, tokenizer_digest

ROWS = [{"id": i, "text": f"{TEXTS[i % 24]} {i}", "score": SCORES[i % 24]} for i in range(22)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base") / "llama"))


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    return saved(base, tmp_path_factory.mktemp("model") / "one")


@pytest.fixture
def table(tmp_path):
    return written(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of four rows, and the rows that are really scored, in order."""
    seen = []
    original = cli_score.score_rows

    def counting(scorer, texts, *args, **kwargs):
        seen.extend(int(row["text"].rsplit(" ", 1)[1]) for row in texts)
        return original(scorer, texts, *args, **kwargs)

    monkeypatch.setattr(cli_score, "CHUNK_ROWS", 4)
    monkeypatch.setattr(cli_score, "score_rows", counting)
    return seen


def saved(base, folder, seed=0):
    tiny_model(base, seed=seed, prompt_template="Text: {text}\nScore:", **SCALE).save_pretrained(folder)
    return folder


def with_tokenizer(model, folder, tokenizer):
    """Copy a model, and give it another tokenizer."""
    shutil.copytree(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def predict(model, table, output, *arguments):
    words = ["predict", model, table, "--output", output, *arguments]
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Path(output).read_text(encoding="utf-8")


KILLED = """
import os, signal, sys
from modeling_relish import cli, cli_score
cli_score.CHUNK_ROWS = 4
score_rows, left = cli_score.score_rows, int(sys.argv.pop(1))
def dies(*args, **kwargs):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return score_rows(*args, **kwargs)
cli_score.score_rows = dies
cli.main()
"""


def killed(parts, model, table, output):
    """Run `relish predict`, and kill it (kill -9) once so many parts are done."""
    command = [sys.executable, "-c", KILLED, str(parts), "predict", str(model), str(table), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGKILL, done.stderr


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_killed_run_goes_on_where_it_stopped_and_nothing_foreign_is_mixed_in(base, model, table, tmp_path, small_parts):
    expected = predict(model, table, tmp_path / "whole.jsonl")
    assert small_parts == list(range(22))
    out = tmp_path / "out"
    out.mkdir()
    killed(3, model, table, out / "scored.jsonl")
    assert not (out / "scored.jsonl").exists()
    (parts,) = out.iterdir()
    assert len(files(parts)) == 3
    backup = tmp_path / "backup"
    shutil.copytree(out, backup)

    small_parts.clear()
    assert predict(model, table, out / "scored.jsonl") == expected
    assert small_parts == list(range(12, 22))
    assert files(out) == ["scored.jsonl"]

    damaged = next(iter(backup.iterdir())) / "000001.json"
    damaged.write_text(damaged.read_text().replace("1", "2", 3))
    small_parts.clear()
    shutil.copytree(backup, tmp_path / "b")
    assert predict(model, table, tmp_path / "b" / "scored.jsonl") == expected
    assert small_parts == [4, 5, 6, 7, *range(12, 22)]

    for other_model, rows, *arguments in (
        (saved(base, tmp_path / "two", seed=1), ROWS),
        (with_tokenizer(model, tmp_path / "three", digit_bpe_tokenizer()), ROWS),
        (model, [{**row, "text": f"{row['text']}0"} for row in ROWS]),
        (model, ROWS[1:]),
        (model, ROWS[4:]),
        (model, ROWS, "--truncation", "error"),
    ):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(backup, tmp_path / "c")
        data = written(tmp_path / "other.jsonl", rows)
        small_parts.clear()
        found = predict(other_model, data, tmp_path / "c" / "scored.jsonl", *arguments)
        assert len(small_parts) == len(rows)
        assert found == predict(other_model, data, tmp_path / "fresh.jsonl", *arguments)
        assert files(tmp_path / "c") == ["scored.jsonl"]  # what nobody will take up any more is gone


def test_error_while_scoring_keeps_what_is_done_and_writes_no_output(model, table, tmp_path, monkeypatch, small_parts):
    scoring = cli_score.score_rows

    def fails(scorer, texts, *args, **kwargs):
        if len(small_parts) >= 8:
            raise RuntimeError("out of memory")
        return scoring(scorer, texts, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cli_score, "score_rows", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            predict(model, table, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    small_parts.clear()
    predict(model, table, tmp_path / "out.jsonl", "--batch-size", "2")
    assert small_parts == list(range(8, 22))


def test_bad_row_at_the_end_is_told_before_the_first_is_scored(model, tmp_path, small_parts):
    data = written(tmp_path / "rows.jsonl", [*ROWS, {"text": None}])
    with pytest.raises(ValueError, match="row 23"):
        predict(model, data, tmp_path / "out.jsonl")
    assert small_parts == []
    assert files(tmp_path) == ["rows.jsonl"]


def test_tokenizers_that_differ_have_other_digests(tmp_path):
    shorter, unlike = byte_bpe_tokenizer(), byte_bpe_tokenizer()
    shorter.model_max_length = 7
    unlike.bos_token = "a"
    others = [byte_bpe_tokenizer(add_bos=True), shorter, unlike, digit_bpe_tokenizer(), sentencepiece_tokenizer()]
    slow = [SlowTokenizer({"a": 0, "b": 1}), SlowTokenizer({"a": 1, "b": 0})]
    digests = [tokenizer_digest(tokenizer) for tokenizer in (byte_bpe_tokenizer(), *others, *slow)]
    assert len(set(digests)) == len(digests)
    byte_bpe_tokenizer().save_pretrained(tmp_path)
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == digests[0]
    assert tokenizer_digest(SlowTokenizer({"b": 1, "a": 0})) == tokenizer_digest(slow[0])


class SlowTokenizer(PythonBackend):
    """A tokenizer in Python, whose vocabulary is its own."""

    def __init__(self, words):
        self.words = words
        super().__init__()

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return self.words


def test_table_that_changes_meanwhile_is_an_error(tmp_path):
    parts = ScoreParts(tmp_path / "out.csv", ["one"])
    parts.write(0, "digest", Part(torch.tensor([[1.5], [float("nan")]]).numpy(), 1, 6))
    found = parts.read(0, "digest")
    assert (found.scores[0].tolist(), found.not_numbers, found.answers) == ([1.5], 1, 6)
    assert parts.read(1, "digest") is None
    with pytest.raises(ScorePartError, match="the table changed"):
        parts.read(0, "another")


SHARED = """
import os, sys
from pathlib import Path
from modeling_relish import cli, cli_score
cli_score.CHUNK_ROWS = 4
score_rows, seen, folder = cli_score.score_rows, [], sys.argv.pop(1)
def counting(scorer, texts, *args, **kwargs):
    seen.extend(texts)
    return score_rows(scorer, texts, *args, **kwargs)
cli_score.score_rows = counting
cli.app(standalone_mode=False)
Path(folder, "seen" + os.environ["RANK"]).write_text(str(len(seen)))
"""


def test_two_processes_share_a_table_and_write_one_output(model, table, tmp_path):
    alone = predict(model, table, tmp_path / "alone.csv")
    script = tmp_path / "run.py"
    script.write_text(SHARED)
    done = launch(script, tmp_path, "predict", model, table, "--output", tmp_path / "new" / "scored.csv")
    assert done.stdout.count("rows written") == 1
    assert files(tmp_path / "new") == ["scored.csv"]
    assert (tmp_path / "new" / "scored.csv").read_text() == alone
    assert [int((tmp_path / f"seen{rank}").read_text()) for rank in (0, 1)] == [12, 10]
