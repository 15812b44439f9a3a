"""`relish train` from the outside: tables in, models out, runs that were interrupted."""

import shutil

import numpy as np
import pytest
import torch
from command_line import MODEL_FILES, load, options, read_json, rows, run, same, score, tree, weights
from safetensors.torch import load_file
from table_files import save
from tiny import TEXTS
from transformers import TrainerCallback

from modeling_relish import (
    RelishForSequenceRegression,
    RelishTrainer,
    cli_shared,
    trainer,
)
from modeling_relish.data import Columns, load_splits
from modeling_relish.metrics import regression_metrics

pytestmark = pytest.mark.usefixtures("exact_command_line")


def test_defaults_for_columns_template_layer_and_splits(base, tmp_path):
    data = save(tmp_path / "data.csv", rows(40))
    out = tmp_path / "deep" / "out"
    said = run("train", data, "--label", "score", *options(base, out))
    assert "rows: train 32, validation 4, test 4" in said
    assert r"'Text: {text}\nScore:'" in said
    assert str(out) in said
    files = {path.name for path in out.iterdir()}
    assert files >= {*MODEL_FILES, "metrics.json", "tokenizer.json", "tokenizer_config.json"}
    assert not [name for name in files if name.startswith("checkpoints") or name.endswith((".tmp", ".bin"))]
    assert all(name.startswith("score.") for name in weights(out))

    config = read_json(out / "config.json")
    assert config["prompt_template"] == "Text: {text}\nScore:"
    assert (config["backbone_layer"], config["head_type"], config["objective"]) == (2, "relish", "huber")
    splits = load_splits(data, Columns(text=("text",), label=("score",)), seed=0)
    labels = np.array(splits["train"]["labels"][:])
    assert config["label_mean"] == pytest.approx([labels.mean()])
    assert (config["label_min"], config["label_max"]) == ([labels.min()], [labels.max()])
    metrics = read_json(out / "metrics.json")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "32 rows of `data.csv`" in card
    for name in ("validation", "test"):
        assert f"| {name} | 4 | score | {metrics[name]['pearson']:.4f} |" in card
        expected = regression_metrics(
            score(out, splits[name]["text"][:]), splits[name]["labels"][:], label_range=(labels.min(), labels.max())
        )
        assert metrics[name] == pytest.approx(expected, abs=1e-5)


def test_metrics_of_a_run_are_those_of_evaluate_and_of_the_predictions(base, tmp_path):
    tables = {
        name: save(tmp_path / f"{name}.csv", rows(n, start))
        for name, n, start in (("a", 32, 0), ("b", 9, 32), ("c", 11, 41))
    }
    out = tmp_path / "out"
    scale = {"label_min": -5, "label_max": 15}
    run(
        "train", tables["a"], "--label", "score", *options(base, out, validation=tables["b"], test=tables["c"], **scale)
    )
    metrics = read_json(out / "metrics.json")
    assert list(metrics) == ["validation", "test"]
    for split, name in (("validation", "b"), ("test", "c")):
        said = run("evaluate", out, tables[name], "--label", "score", "--output", tmp_path / "m.json")
        found = read_json(tmp_path / "m.json")
        assert list(found) == list(metrics[split]) == list(cli_shared.METRICS)
        assert found == pytest.approx(metrics[split], abs=1e-5)
        assert found["nrmse"] == pytest.approx(found["rmse"] / 20)
        assert f"{name}.csv" in said
        assert all(f"{value:.4f}" in said for value in found.values())
        run("predict", out, tables[name], "--output", tmp_path / "scored.csv")
        scored = load(tmp_path / "scored.csv")
        errors = np.array([float(row["prediction"]) - float(row["score"]) for row in scored])
        assert found["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), abs=1e-5)
        assert found["mae"] == pytest.approx(np.abs(errors).mean(), abs=1e-5)


@pytest.mark.parametrize("written", ["A: {text_a}\nB: {text_b}\nScore:", r"A: {text_a}\nB: {text_b}\nScore:", None])
def test_several_text_columns(written, base, tmp_path):
    table = [
        {"text_a": row["text"], "n": i, "text_b": TEXTS[i % 7], "score": row["score"]} for i, row in enumerate(rows(30))
    ]
    data, out = save(tmp_path / "data.csv", table), tmp_path / "out"
    run("train", data, "--label", "score", *options(base, out), *([] if written is None else ["--template", written]))
    template = read_json(out / "config.json")["prompt_template"]
    # In a shell, '\n' between single quotes stays two characters, as in the option's own help.
    assert template == (written or "text_a: {text_a}\ntext_b: {text_b}\nScore:").replace(r"\n", "\n")
    run("predict", out, data, "--output", tmp_path / "scored.csv")
    expected = score(out, [(row["text_a"], row["text_b"]) for row in table])
    assert [float(r["prediction"]) for r in load(tmp_path / "scored.csv")] == pytest.approx(expected, rel=1e-6)


def test_text_columns_can_be_chosen(base, tmp_path):
    table = [{**row, "title": f"title {i}"} for i, row in enumerate(rows(30))]
    data = save(tmp_path / "data.csv", table)
    run("train", data, "--label", "score", "--text", "title", "--text", "text", *options(base, tmp_path / "a"))
    assert read_json(tmp_path / "a" / "config.json")["prompt_template"] == "title: {title}\ntext: {text}\nScore:"
    run("train", data, "--label", "score", "--template", "{title}!", *options(base, tmp_path / "b"))
    run("predict", tmp_path / "b", save(tmp_path / "titles.csv", [{"title": "one"}]), "--output", tmp_path / "s.csv")
    assert float(load(tmp_path / "s.csv")[0]["prediction"]) == pytest.approx(
        score(tmp_path / "b", ["one"])[0], rel=1e-6
    )


def test_several_labels(base, tmp_path):
    table = [{**row, "other": 10 - 3 * row["score"] + i % 2} for i, row in enumerate(rows(40))]
    data, out = save(tmp_path / "data.jsonl", table), tmp_path / "out"
    labels = ["--label", "score", "--label", "other"]
    ends = {"label_min": -20, "label_max": 20}
    run("train", data, *labels, *options(base, out, head="mlp", pooling="last", objective="mse", **ends))
    config = read_json(out / "config.json")
    assert (config["head_type"], config["pooling"], config["objective"]) == ("mlp", "last", "mse")
    assert (config["label_min"], config["label_max"]) == ([-20] * 2, [20] * 2)
    run("predict", out, data, "--output", tmp_path / "scored.jsonl", "--column", "guess")
    found = load(tmp_path / "scored.jsonl")
    assert list(found[0]) == ["id", "text", "score", "other", "guess_score", "guess_other"]
    expected = score(out, [row["text"] for row in table])
    assert [[r["guess_score"], r["guess_other"]] for r in found] == [pytest.approx(e, rel=1e-6) for e in expected]
    run("evaluate", out, data, *labels, "--output", tmp_path / "m.json")
    metrics = read_json(tmp_path / "m.json")
    true = [[row["score"], row["other"]] for row in table]
    assert metrics == pytest.approx(regression_metrics(expected, true, label_range=(-20, 20)), abs=1e-5)
    assert read_json(out / "metrics.json")["test"].keys() == metrics.keys()


@pytest.mark.parametrize("ending", ["tsv", "jsonl", "parquet"])
def test_folder_of_splits(ending, base, tmp_path):
    folder = tmp_path / "data"
    for name, n, start in (("train", 20, 0), ("dev", 6, 20), ("test", 7, 26)):
        save(folder / f"{name}.{ending}", rows(n, start))
    said = run("train", folder, "--label", "score", *options(base, tmp_path / "out"))
    assert "rows: train 20, validation 6, test 7" in said
    metrics = read_json(tmp_path / "out" / "metrics.json")
    for name in ("validation", "test"):
        run("evaluate", tmp_path / "out", folder, "--label", "score", "--split", name, "--output", tmp_path / "m.json")
        assert read_json(tmp_path / "m.json") == pytest.approx(metrics[name], abs=1e-5)


def test_layer_learning_rate_and_max_length_reach_the_model(base, tmp_path, monkeypatch):
    seen = []

    class Spy(RelishTrainer):
        def train(self, *args, **kwargs):
            seen.append((self.args.learning_rate, self.args.num_train_epochs, self.args.train_batch_size))
            return super().train(*args, **kwargs)

    monkeypatch.setattr(trainer, "RelishTrainer", Spy)
    data = save(tmp_path / "data.csv", rows(20))
    for head, layer in (("relish", 3), ("linear", "last")):
        more = {"backbone_layer": layer, "head": head, "max_length": 40}
        run("train", data, "--label", "score", *options(base, tmp_path / head, **more))
        config = read_json(tmp_path / head / "config.json")
        assert (config["backbone_layer"], config["max_length"]) == (None if layer == "last" else layer, 40)
    run("train", data, "--label", "score", *options(base, tmp_path / "own", learning_rate=0.01, epochs=2))
    assert seen == [(3e-4, 1, 16), (1e-3, 1, 16), (0.01, 2, 16)]


def test_other_settings_of_the_config_are_set_by_name(base, fails, tmp_path):
    data = save(tmp_path / "data.csv", rows(40))
    given = ["train", data, "--label", "score", *options(base, tmp_path / "out")]
    run(*given, "--set", "num_latents=2", "--set", "latent_init=mean", "--set", "backbone_layers=[1,2]")
    config = RelishForSequenceRegression.from_pretrained(tmp_path / "out").config
    assert (config.num_latents, config.latent_init, config.backbone_layers) == (2, "mean", [1, 2])
    elsewhere = [*given, "--output", tmp_path / "other"]
    for wrong in ("num_latent=2", "num_latents", "label_mean=3"):
        assert wrong in fails(*elsewhere, "--set", wrong)
    assert "num_latents" in fails(*elsewhere, "--set", "num_latents=0")
    assert "choose one" in fails(*elsewhere, "--set", "backbone_layers=[1,2]", "--backbone-layer", "auto")
    assert not (tmp_path / "other").exists()


def test_weights_count_and_are_no_text(base, tmp_path):
    table = rows(30)
    variants = {
        "none": table,
        "equal": [{**row, "w": 2.5} for row in table],
        "some": [{**row, "w": float(i % 3)} for i, row in enumerate(table)],
    }
    heads = {}
    for name, variant in variants.items():
        data = save(tmp_path / f"{name}.csv", variant)
        weight = {} if name == "none" else {"weight": "w"}
        run("train", data, "--label", "score", *options(base, tmp_path / name, **weight))
        heads[name] = weights(tmp_path / name)
        assert read_json(tmp_path / name / "config.json")["prompt_template"] == "Text: {text}\nScore:"
    assert same(heads["none"], heads["equal"])
    assert not same(heads["none"], heads["some"])


def test_seed_decides(base, tmp_path):
    data = save(tmp_path / "data.csv", rows(30))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run("train", data, "--label", "score", *options(base, tmp_path / name, seed=seed))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert read_json(tmp_path / "a" / "metrics.json") == read_json(tmp_path / "b" / "metrics.json")
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_trained_backbone_is_saved_whole(base, tmp_path):
    moved = shutil.copytree(base, tmp_path / "moved")
    data, out = save(tmp_path / "data.csv", rows(20)), tmp_path / "out"
    run("train", data, "--label", "score", "--train-backbone", *options(moved, out, batch_size=4))
    shutil.rmtree(moved)
    found = weights(out)
    names = [name for name in found if name.startswith("backbone.layers.1.")]
    before = load_file(base / "model.safetensors")
    assert names
    assert not any(torch.equal(found[name], before[name.removeprefix("backbone.")]) for name in names)
    assert not [name for name in found if name.startswith("backbone.layers.2.")]  # above the middle
    run("predict", out, data, "--output", tmp_path / "scored.csv")
    expected = score(out, [row["text"] for row in rows(20)])
    assert [float(r["prediction"]) for r in load(tmp_path / "scored.csv")] == pytest.approx(expected, rel=1e-6)


def test_model_that_is_there_is_kept_unless_overwrite_is_said(base, trained, fails, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    before = tree(out)
    data = save(tmp_path / "data.csv", rows(20))
    line = fails("train", data, "--label", "score", *options(base, out))
    assert str(out) in line
    assert "--overwrite" in line
    assert tree(out) == before
    bad = save(tmp_path / "bad.csv", [*rows(20), {"id": "x", "text": "y", "score": "z"}])
    fails("train", bad, "--label", "score", "--overwrite", *options(base, out))
    assert tree(out) == before  # a run that fails costs nothing
    run("train", data, "--label", "score", "--overwrite", *options(base, out, head="linear"))
    assert read_json(out / "config.json")["head_type"] == "linear"
    assert tree(out).keys() == before.keys()


# ---------------------------------------------------------------------- a run that was interrupted


@pytest.fixture
def interrupted():
    """Make a call in which training is cut off once its first checkpoint is saved."""

    class Stop(TrainerCallback):
        def on_save(self, *args, **kwargs):
            raise RuntimeError("the power went out")

    class Interrupted(RelishTrainer):
        def train(self, *args, **kwargs):
            self.add_callback(Stop())
            return super().train(*args, **kwargs)

    def cut(call):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "RelishTrainer", Interrupted)
            return call()

    return cut


def test_resumed_run_is_the_uninterrupted_one(base, tmp_path, interrupted, fails):
    data = save(tmp_path / "data.csv", rows(40))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run("train", data, "--label", "score", *options(base, whole, epochs=3))
    command = ["train", data, "--label", "score", *options(base, cut, epochs=3)]
    assert "the power went out" in interrupted(lambda: fails(*command))
    assert not MODEL_FILES & {path.name for path in cut.iterdir()}
    assert {path.name for path in (cut / "checkpoints").iterdir()} == {"checkpoint-2", "run.json"}
    run(*command, "--resume")
    assert same(weights(whole), weights(cut))
    assert read_json(whole / "metrics.json") == read_json(cut / "metrics.json")
    assert tree(whole).keys() == tree(cut).keys()


def test_run_is_resumed_with_the_data_and_settings_that_it_began_with_alone(base, tmp_path, interrupted, fails):
    table = [{**row, "other": -row["score"]} for row in rows(40)]
    data, out, whole = save(tmp_path / "data.csv", table), tmp_path / "out", tmp_path / "whole"
    given = options(base, out, epochs=2)
    interrupted(lambda: fails("train", data, "--label", "score", *given))
    before = tree(out)
    for label, more, word in (
        ("score", ["--template", "{text}"], "template (then 'Text: {text}\\nScore:', now '{text}')"),
        ("other", [], "label (then ['score'], now ['other'])"),
        ("score", ["--seed", "1"], "seed (then 0, now 1)"),
        ("score", ["--objective", "mse"], "objective (then 'huber', now 'mse')"),
        ("score", ["--backbone-layer", "3"], "backbone_layer (then 'middle', now '3')"),
        ("score", ["--backbone", f"{base}/"], f"now '{base}/'"),
        ("score", ["--set", "num_latents=2"], "now {'num_latents': 2}"),
    ):
        line = fails("train", data, "--label", label, *given, *more, "--resume")
        assert [part for part in (word, str(out), "--overwrite") if part not in line] == []
        assert ("rows of" in line) == (word.startswith(("label", "seed")))  # a seed deals other rows
    # One label is another: the splits stay, and one of them has another row.
    corrected = [{**row, "score": 1.25} if i == 7 else row for i, row in enumerate(table)]
    line = fails("train", save(tmp_path / "new.csv", corrected), "--label", "score", *given, "--resume")
    assert line.count("rows of ") == 1
    assert "(then" not in line
    save(data, [*table, *({**row, "other": 0} for row in rows(20, 40))])
    line = fails("train", data, "--label", "score", *given, "--resume")
    assert [name for name in ("train", "validation", "test") if f"rows of {name}" not in line] == []
    assert tree(out) == before

    (out / "checkpoints" / "run.json").unlink()  # as an earlier version left them
    assert "run.json" in fails("train", save(data, table), "--label", "score", *given, "--resume")
    interrupted(lambda: fails("train", data, "--label", "score", *given, "--overwrite"))
    run("train", data, "--label", "score", *given, "--resume")
    run("train", data, "--label", "score", *options(base, whole, epochs=2))
    assert same(weights(whole), weights(out))


def test_resume_without_a_checkpoint_says_so(base, tmp_path, fails):
    data = save(tmp_path / "data.csv", rows(20))
    line = fails("train", data, "--label", "score", "--resume", *options(base, tmp_path / "out"))
    assert "checkpoint" in line
    assert not MODEL_FILES & set(tree(tmp_path))


def test_rests_of_a_run_are_kept_until_overwrite_is_said_and_then_gone(base, tmp_path, interrupted, fails):
    data = save(tmp_path / "data.csv", rows(40))
    fresh, out = tmp_path / "fresh", tmp_path / "out"
    command = ["train", data, "--label", "score"]
    interrupted(lambda: fails(*command, *options(base, out, epochs=2, batch_size=4)))  # checkpoint-8
    before = tree(out)
    line = fails(*command, *options(base, out, epochs=2))
    assert [word for word in (str(out / "checkpoints"), "--resume", "--overwrite") if word not in line] == []
    assert tree(out) == before
    interrupted(lambda: fails(*command, "--overwrite", *options(base, out, epochs=2)))  # checkpoint-2
    run(*command, "--resume", *options(base, out, epochs=2))
    run(*command, *options(base, fresh, epochs=2))
    assert same(weights(fresh), weights(out))
