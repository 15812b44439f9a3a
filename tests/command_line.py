"""The command line in tests: what a user types, the tables and folders around it."""

import csv
import json
import sys

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from table_files import save
from tiny import SCORES, TEXTS, save_backbone
from typer.testing import CliRunner

from modeling_relish import (
    RelishForSequenceRegression,
    RelishTrainingArguments,
    cli,
    cli_train,
)

MODEL_FILES = {"config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def exact_command_line(tmp_path_factory):
    """Keep everything in float32, so that numbers can be compared, and nothing in the user's home."""
    original = RelishTrainingArguments.__post_init__

    def exact(self):
        self.features_dtype, self.use_cpu, self.disable_tqdm = "float32", True, True
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELISH_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("RELISH_DEBUG", raising=False)
        patch.setattr(cli_train, "compute_dtype", lambda: "float32")
        patch.setattr(RelishTrainingArguments, "__post_init__", exact)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_backbone("llama", tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def trained(base, exact_command_line, tmp_path_factory):
    """A model for one target; the tests read it only."""
    folder = tmp_path_factory.mktemp("trained")
    run("train", save(folder / "data.csv", rows(40)), "--label", "score", *options(base, folder / "out"))
    return folder / "out"


@pytest.fixture
def fails(monkeypatch, capsys):
    """Run what the user would type; expect exit code 1 and one line, which is returned."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["relish", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as info:
            cli.main()
        err = capsys.readouterr().err
        assert info.value.code == 1
        assert "Traceback" not in err
        *before, line = err.replace("\r", "\n").splitlines()
        assert line.startswith("error: ")
        assert not [other for other in before if other.startswith("error: ")]
        return line

    return call


def run(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def options(base, output, **more):
    given = {"backbone": base, "output": output, "epochs": 1, "batch_size": 16, **more}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def rows(n, start=0, **more):
    """Different texts with their scores, and a column that is no text."""
    numbers = range(start, start + n)
    return [{"id": f"r{i}", "text": f"{TEXTS[i % 24]} {i}", "score": SCORES[i % 24], **more} for i in numbers]


def load(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def score(folder, texts):
    return RelishForSequenceRegression.from_pretrained(folder).predict(texts)
