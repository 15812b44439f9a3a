"""`relish train --backbone-layer auto` and `relish cache`, from the outside."""

import json

import pytest
from tiny import save_backbone
from typer.testing import CliRunner

from modeling_relish import RelishForSequenceRegression, RelishTrainingArguments, cli, feature_files, layer_search


@pytest.fixture
def home(tmp_path, monkeypatch):
    original = RelishTrainingArguments.__post_init__

    def quiet(self):
        self.disable_tqdm = True
        original(self)

    monkeypatch.setattr(RelishTrainingArguments, "__post_init__", quiet)
    monkeypatch.setattr(layer_search, "candidate_layers", lambda n: [1, 3, n])
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "home"))
    lines = [f"word {'good ' * (i % 5)} number {i},{i % 5}" for i in range(40)]
    (tmp_path / "data.csv").write_text("text,score\n" + "\n".join(lines) + "\n")
    save_backbone("llama", tmp_path / "base")
    return tmp_path


def run(*arguments, code=0, **kwargs):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], **kwargs)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def train(home, *more):
    return run(
        "train", home / "data.csv", "--label", "score", "--output", home / "out", "--backbone", home / "base",
        "--epochs", 1, "--batch-size", 8, *more,
    )  # fmt: skip


def test_auto_searches_reports_and_stores_the_layer(home):
    output = train(home, "--backbone-layer", "auto")
    config = json.loads((home / "out" / "config.json").read_text())
    assert set(config["layer_search"]) == {"1", "3", "4"}
    best = max(config["layer_search"], key=lambda layer: config["layer_search"][layer])
    assert config["backbone_layer"] == int(best)
    assert f"{best}◀" in output
    assert f"layer {best}" in output
    model = RelishForSequenceRegression.from_pretrained(home / "out")
    assert len(model.backbone.layers) == int(best)
    assert model.config.layer_search == config["layer_search"]


def test_caches_are_listed_and_cleared(home):
    train(home, "--backbone-layer", "2")
    (entry,) = feature_files.list_caches()
    listed = run("cache", "ls")
    assert entry.name in listed.replace("\n", "")
    assert str(entry.texts) in listed
    run("cache", "clear", input="n\n", code=1)
    assert feature_files.list_caches()
    run("cache", "clear", "no-such", code=1)
    assert feature_files.list_caches()
    assert "1 cache(s) removed" in run("cache", "clear", entry.name, "--yes")
    assert not feature_files.list_caches()
    assert run("cache", "ls")
    assert "0 cache(s) removed" in run("cache", "clear", "-y")
