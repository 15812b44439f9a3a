"""The demo on a tiny backbone, a small table and a lexicon of eight words: every line of its table, and what it writes."""

import csv
import json
import re

import numpy as np
import pytest
import typer
from tiny import NEGATIVE, POSITIVE, TEXTS, save_backbone, score_of
from typer.testing import CliRunner

from modeling_relish import RelishForSequenceRegression, RelishTrainingArguments, demo
from modeling_relish.data import Columns, label_matrix, load_splits
from modeling_relish.metrics import regression_metrics

LEXICON = f"""
import re
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        words = re.findall("[a-z]+", text.lower())
        good, bad = (sum(w in s for w in words) for s in ({POSITIVE!r}, {NEGATIVE!r}))
        return {{"neg": 0.0, "neu": 1.0, "pos": 0.0, "compound": (0.75 * good - 0.5 * bad) / 4}}
"""


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Lay out what the demo fetches, as the package registry would give it; return the folder."""
    home = tmp_path / "home"
    monkeypatch.setenv("RELISH_HOME", str(home))
    backbone = save_backbone("llama", home / "backbones" / "SmolLM2-135M-Instruct")
    lexicon = home / "lexicon" / "vaderSentiment-3.3.2"
    (lexicon / "vaderSentiment").mkdir(parents=True)
    (lexicon / "vaderSentiment" / "vaderSentiment.py").write_text(LEXICON, encoding="utf-8")
    tweets = home / "data" / "tweets.csv"
    tweets.parent.mkdir()
    with tweets.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "text", "score"))
        writer.writerows((i, f"{TEXTS[i % 24]} {i}", score_of(TEXTS[i % 24]) - 2.5) for i in range(72))
    asked = []
    monkeypatch.setattr(demo, "fetch_backbone", lambda name: asked.append(name) or backbone)
    monkeypatch.setattr(demo, "fetch_lexicon", lambda: lexicon)
    monkeypatch.setattr(demo, "fetch_tweets", lambda: tweets)
    yield home
    assert set(asked) == {"SmolLM2-135M-Instruct"}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Keep everything in float32, so that the numbers can be compared."""
    original = RelishTrainingArguments.__post_init__

    def settings(self):
        self.features_dtype, self.use_cpu, self.disable_tqdm = "float32", True, True
        original(self)

    monkeypatch.setattr(RelishTrainingArguments, "__post_init__", settings)
    monkeypatch.setattr(demo, "compute_dtype", lambda: "float32")
    monkeypatch.setattr(demo, "LAYER", 2)


def test_demo_compares_predicts_and_writes(fetched, tmp_path):
    app = typer.Typer()
    app.command()(demo.main)
    out, file = tmp_path / "out", tmp_path / "demo.json"
    arguments = ["--epochs", "1", "--seed", "1", "--output", str(out), "--json", str(file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "rated tweets: train 50, validation 11, test 11" in result.stdout

    written = json.loads(file.read_text(encoding="utf-8"))
    assert (written["seed"], written["epochs"]) == (1, 1.0)
    names = list(written["test"])
    assert names[1:] == [name for name, _, _ in demo.HEADS]
    assert names[0].startswith("lexicon")
    for name, metrics in written["test"].items():
        (line,) = [line for line in result.stdout.splitlines() if name in line]
        assert re.findall(r"-?\d\.\d{3}", line) == [f"{metrics[m]:.3f}" for m in ("pearson", "spearman", "nrmse")]
    assert written["test"][names[0]]["pearson"] == pytest.approx(1)  # this lexicon is what made the labels
    assert written["test"][names[0]]["nrmse"] == pytest.approx(0, abs=1e-6)
    assert len({metrics["pearson"] for metrics in written["test"].values()}) == len(names)

    model = RelishForSequenceRegression.from_pretrained(out)
    assert (model.config.head_type, model.config.label_range) == ("relish", [(-4.0, 4.0)])
    for text, score in zip(demo.EXAMPLES, model.predict(demo.EXAMPLES), strict=True):
        assert f"{score:+.2f}  {text}" in result.stdout.splitlines()
    splits = load_splits(
        str(fetched / "data" / "tweets.csv"), Columns(text=("text",), label=("score",)),
        validation_fraction=0.15, test_fraction=0.15, seed=1,
    )  # fmt: skip
    scores = model.predict(splits["test"]["text"][:])
    assert np.ptp(scores) > 0
    expected = regression_metrics(scores, label_matrix(splits["test"]), label_range=(-4, 4))
    assert written["test"]["RELISH"] == pytest.approx(expected, abs=1e-4)
    assert f"{written['test']['RELISH']['pearson']:.4f}" in (out / "README.md").read_text(encoding="utf-8")
    assert not [*tmp_path.rglob("*.tmp"), *out.rglob("checkpoint-*"), *out.rglob("*.bin")]


def test_demo_writes_nothing_unasked_and_gives_the_same_numbers_again(fetched, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "HEADS", demo.HEADS[-1:])
    said = []
    for _ in range(2):
        demo.main(epochs=1)
        said.append([line for line in capsys.readouterr().out.splitlines() if "after the downloads" not in line])
    assert [line for line in said[0] if "runtime" not in line] == [line for line in said[1] if "runtime" not in line]
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
