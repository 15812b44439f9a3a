"""The command line over a language model's own numbers: RAIL, decoding, and RAFT with LoRA."""

import csv
import json
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import BACKBONES, SCORES, TEXTS, TOKENIZERS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from modeling_relish import RelishForSequenceRegression, RelishTrainingArguments, cli, cli_numbers, cli_score, cli_train
from modeling_relish.cli_numbers import Method, load_scorer, parse_grid
from modeling_relish.cli_shared import load_model
from modeling_relish.decoding import decode_numbers
from modeling_relish.number_grid_relish import NumberGrid, NumberGridError
from modeling_relish.trainer import RelishTrainer

# peft asks transformers by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

TEMPLATE = "Text: {text}\nScore:"
TYPED = "Text: {text}\\nScore:"  # as a shell leaves it


@pytest.fixture(autouse=True, scope="module")
def settings(tmp_path_factory):
    original = RelishTrainingArguments.__post_init__

    def exact(self):
        self.use_cpu, self.disable_tqdm = True, True
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELISH_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(cli_train, "compute_dtype", lambda: "float32")
        patch.setattr(cli_numbers, "compute_dtype", lambda: "float32")
        patch.setattr(RelishTrainingArguments, "__post_init__", exact)
        yield


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A tiny causal language model and its tokenizer in a folder."""
    folder = tmp_path_factory.mktemp("lm")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(BACKBONES["llama"]()).save_pretrained(folder)
    TOKENIZERS["llama"]().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "score"])
        writer.writerows((f"{TEXTS[i % 24]} {i}", SCORES[i % 24]) for i in range(40))
    return path


def run(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def column(path, name="prediction"):
    with path.open(encoding="utf-8", newline="") as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def texts_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [row["text"] for row in csv.DictReader(file)]


def refused(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["relish", *map(str, arguments)])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "values", "strings"),
    [
        ("0:5", (0, 1, 2, 3, 4, 5), ("0", "1", "2", "3", "4", "5")),
        ("0:1:0.5", (0, 0.5, 1), ("0.0", "0.5", "1.0")),
        ("1, 2.5,4", (1, 2.5, 4), ("1.0", "2.5", "4.0")),
        ("bad=1,good=2", (1, 2), ("bad", "good")),
    ],
)
def test_grids_as_a_user_types_them(text, values, strings):
    assert (parse_grid(text).values, parse_grid(text).strings) == (values, strings)


@pytest.mark.parametrize("text", ["", "five", "1:2:3:4", "a=1,2", "1,x"])
def test_grid_that_cannot_be_read_says_how_to_write_one(text):
    with pytest.raises(NumberGridError, match="FROM:TO"):
        parse_grid(text)


def test_a_language_model_untrained_is_asked_three_ways(language_model, table, tmp_path):
    asked = ["predict", language_model, table, "--template", TYPED, "--grid", "0:5", "--output"]
    run(*asked, tmp_path / "rail.csv", "--method", "rail")
    model = RelishForSequenceRegression.from_backbone(
        language_model, head_type="number_grid", number_grid=NumberGrid.between(0, 5), prompt_template=TEMPLATE
    )
    texts = texts_of(table)
    np.testing.assert_allclose(column(tmp_path / "rail.csv"), model.predict(texts), rtol=1e-5)

    said = run(*asked, tmp_path / "decoded.csv", "--method", "decode")
    found = decode_numbers(model.backbone, model._own_tokenizer(), texts, prompt_template=TEMPLATE, batch_size=32)
    np.testing.assert_allclose(column(tmp_path / "decoded.csv"), found.values, rtol=1e-6)
    assert f"{found.not_numbers} of 40 answers were no number" in said

    sampled = [*asked, tmp_path / "a.csv", "--method", "rail-sample", "--samples", 3]
    said = run(*sampled)
    assert "of 120 answers" in said
    again = [*asked, tmp_path / "b.csv", "--method", "rail-sample", "--samples", 3]
    run(*again)
    assert (column(tmp_path / "a.csv") == column(tmp_path / "b.csv")).all()


def test_answers_that_are_no_number_are_counted_over_all_parts(language_model, table, tmp_path, monkeypatch):
    asked = [
        "predict",
        language_model,
        table,
        "--template",
        TYPED,
        "--method",
        "rail-sample",
        "--samples",
        3,
        "--output",
    ]
    monkeypatch.setattr(cli_score, "CHUNK_ROWS", 8)
    (expected,) = (line for line in run(*asked, tmp_path / "alone.csv").splitlines() if "no number" in line)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said_by in (("1", False), ("0", True)):  # the second process scores its parts, then the first
        monkeypatch.setenv("RANK", rank)
        assert (expected in run(*asked, tmp_path / "shared.csv").splitlines()) is said_by
    assert expected.endswith("of 120 answers were no number and counted as 0.0")


@pytest.mark.parametrize("method", [Method.rail, Method.decode, Method.rail_sample, Method.model])
def test_every_method_runs_on_the_gpu_of_its_process(method, language_model, tmp_path, monkeypatch):
    name, template, grid = str(language_model), TYPED, "0:5"
    if method is Method.model:
        RelishForSequenceRegression.from_backbone(name, prompt_template=TEMPLATE).save_pretrained(tmp_path)
        name, template, grid = str(tmp_path), None, None
    moved = []
    monkeypatch.setattr(RelishForSequenceRegression, "to", lambda model, device: moved.append(device) or model)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for there_is_one, expected in ((False, []), (True, ["cuda:1"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=there_is_one: found)
        load_scorer(load_model, name, method, template, grid, 2, 0)
        assert moved == expected


def test_raft_with_lora_from_table_to_scores(language_model, table, tmp_path):
    said = run(
        "train", table, "--label", "score", "--backbone", language_model, "--output", tmp_path / "out", "--objective", "raft",
        "--lora", "--lora-rank", 2, "--epochs", 2, "--batch-size", 16, "--label-min", 0, "--label-max", 5,
    )  # fmt: skip
    assert "0, 1, 2, 3, 4, 5" in said
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["head_type"], settings["objective"]) == ("number_grid", "raft")
    run("predict", tmp_path / "out", table, "--output", tmp_path / "scored.csv")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(column(tmp_path / "scored.csv"), loaded.predict(texts_of(table)), rtol=1e-5)
    untrained = RelishForSequenceRegression.from_backbone(
        language_model, head_type="number_grid", number_grid=NumberGrid.between(0, 5),
        prompt_template=settings["prompt_template"],
    )  # fmt: skip
    assert np.abs(untrained.predict(texts_of(table)) - column(tmp_path / "scored.csv")).max() > 1e-4
    run("predict", tmp_path / "out", table, "--output", tmp_path / "decoded.csv", "--method", "decode")
    assert len(column(tmp_path / "decoded.csv")) == 40


@pytest.mark.parametrize("trained", [["--lora"], ["--train-backbone"]])
def test_huber_over_a_number_grid_from_the_command_line(trained, language_model, table, tmp_path, monkeypatch):
    rates = []
    original = RelishTrainer.train
    monkeypatch.setattr(
        RelishTrainer, "train", lambda self, **kw: rates.append(self.args.learning_rate) or original(self, **kw)
    )
    run(
        "train", table, "--label", "score", "--backbone", language_model, "--output", tmp_path / "out", "--head", "number_grid",
        "--objective", "huber", *trained, "--epochs", 1, "--batch-size", 16, "--label-min", 0, "--label-max", 5,
    )  # fmt: skip
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert (loaded.config.head_type, loaded.config.objective) == ("number_grid", "huber")
    assert np.isfinite(loaded.predict(texts_of(table)[:4])).all()
    assert rates == [2e-4 if trained == ["--lora"] else 2e-5]  # 1e-3 would wreck a language model


def test_what_does_not_go_together_is_told(language_model, table, tmp_path, monkeypatch, capsys):
    train = ["train", table, "--label", "score", "--backbone", language_model, "--output", tmp_path / "out"]
    assert "--lora" in refused(monkeypatch, capsys, *train, "--objective", "raft")
    assert "--grid" in refused(monkeypatch, capsys, *train, "--grid", "0:5")
    assert "leave out --head" in refused(monkeypatch, capsys, *train, "--head", "mlp", "--objective", "raft", "--lora")
    assert "leave out --head" in refused(
        monkeypatch, capsys, *train, "--head", "relish", "--objective", "mbr", "--lora"
    )
    ask = ["predict", language_model, table, "--output", tmp_path / "o.csv"]
    assert "--method" in refused(monkeypatch, capsys, *ask)
    assert "--template" in refused(monkeypatch, capsys, *ask, "--method", "rail")
    run(*train, "--epochs", 1)
    ask[1] = tmp_path / "out"
    assert "its states" in refused(monkeypatch, capsys, *ask, "--method", "decode")
    assert "--template" in refused(monkeypatch, capsys, *ask, "--template", TYPED)
    adapter = get_peft_model(
        AutoModelForCausalLM.from_pretrained(language_model), LoraConfig(target_modules=["q_proj"])
    )
    ask[1] = tmp_path / "adapter"
    adapter.save_pretrained(ask[1])
    assert "merge_and_unload" in refused(
        monkeypatch, capsys, *ask, "--method", "rail", "--template", TYPED, "--grid", "0:5"
    )
    assert not (tmp_path / "o.csv").exists()
