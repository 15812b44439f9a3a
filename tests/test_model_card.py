"""Model cards: what huggingface_hub reads in them, what a user reads in them, and the finished cards' figures."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from tiny import BACKBONES

from modeling_relish import RelishConfig
from modeling_relish.model_card import ModelCardError, model_card, note_evaluation

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
METRICS = {"pearson": 0.91234567, "spearman": 0.9, "nrmse": 0.1, "rmse": 0.8, "mae": 0.6}


def config(**settings):
    return RelishConfig(backbone_config=BACKBONES["llama"](), **{"backbone_name_or_path": "org/base", **settings})


def parsed(text):
    """The card as huggingface_hub reads it, which raises for metadata that is not valid."""
    card = ModelCard(text)
    assert yaml.safe_load(re.match(r"---\n(.*?)\n---", text, re.S)[1]) == json.loads(json.dumps(card.data.to_dict()))
    return card


def test_what_a_reader_needs_is_there():
    evaluation = note_evaluation(None, "test", METRICS, 100, dataset="org/reviews", train_rows=900)
    text = model_card(
        config(
            backbone_layer=3, backbone_revision="abc", backbone_in_checkpoint=False, prompt_template="A: {a}\nB: {b}\nScore:",
            label_min=0.0, label_max=5.0, label_mean=2.5, label_std=1.25, max_length=64, evaluation=evaluation,
            id2label={0: "similarity"},
        ),
        repo_id="user/name", license="mit", language=["en", "de"], tags=["sts"],
    )  # fmt: skip
    card = parsed(text)
    assert card.data.to_dict() | {"model-index": None} == {
        "license": "mit", "language": ["en", "de"], "library_name": "transformers", "pipeline_tag": "text-classification",
        "tags": ["relish", "regression", "sts"], "base_model": "org/base", "datasets": "org/reviews", "model-index": None,
    }  # fmt: skip
    results = {r.metric_type: (r.metric_value, r.dataset_type, r.dataset_split) for r in card.data.eval_results}
    assert results["pearsonr"] == (0.9123, "org/reviews", "test")
    assert set(results) == {"pearsonr", "spearmanr", "nrmse", "rmse", "mae"}
    for wanted in (
        "base model | `org/base`", "licence | mit", "layer 3 of 4", "the head alone", "revision `abc`", "64 tokens",
        "A: {a}\nB: {b}\nScore:", "similarity | 0 to 5 | 2.5 | 1.25", "900 rows of `org/reviews`",
        "| test | 100 | similarity | 0.9123 | 0.9000 | 0.1000 | 0.8000 | 0.6000 |", "## Limits", "trust_remote_code=True",
    ):  # fmt: skip
        assert wanted in text, wanted
    (python,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len([line for line in python.splitlines() if line.strip()]) <= 5
    compile(python, "card", "exec")


def test_what_is_not_known_is_said_and_not_made_up():
    text = model_card(config(backbone_name_or_path="/home/me/base"))
    card = parsed(text)
    assert card.data.eval_results is None
    assert card.data.license is None
    assert card.data.base_model is None
    assert "/home" not in text
    for wanted in ("not stated", "No measurement comes with it", "None were measured", "Not stated by who trained it"):
        assert wanted in text


def test_several_targets_and_numbers_that_are_none():
    metrics = {**METRICS, "pearson": math.nan, "pearson_0": math.nan, "pearson_1": 0.5, "mae_1": 0.25, "runtime": 3.0}
    evaluation = note_evaluation(None, "validation", metrics, 7)
    text = model_card(config(num_labels=2, id2label={0: "a|b", 1: "<b>"}, evaluation=evaluation))
    assert {r.metric_type for r in parsed(text).data.eval_results} == {"spearmanr", "nrmse", "rmse", "mae"}
    assert "| validation | 7 | all | - | 0.9000" in text
    assert "| validation | 7 | &lt;b> | 0.5000 | - | - | - | 0.2500 |" in text
    assert "a\\|b" in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize(
    "evaluation",
    [
        {"results": {"test": {"pearson": "0.99"}}},
        {
            "results": {"test": {"pearson": 0.9, "note": "<script>"}, "x\ny": {"pearson": 1.0}},
            "dataset": "a\n---\nb: `c`",
        },
        {"results": None, "dataset": ["x"]},
        {"results": {"test": 3}},
        {"weights": 1},
    ],
)
def test_another_configs_evaluation_cannot_write_into_the_card(evaluation):
    text = model_card(config(evaluation=evaluation))
    parsed(text)
    assert "<script>" not in text
    assert "0.99" not in text
    assert "\n---\nb:" not in text


def test_template_with_fences_stays_inside_its_fence():
    template = "```\n{text}\n````\n# Not a heading"
    text = model_card(config(prompt_template=template))
    assert f"`````\n{template}\n`````" in text


def test_bad_metadata_is_an_error_of_ours():
    with pytest.raises(ModelCardError, match="metadata is not valid"):
        model_card(config(), tags=[{"a": object()}])


# ---------------------------------------------------------------------- the finished cards


def script():
    spec = importlib.util.spec_from_file_location("model_cards", ROOT / "benchmarks" / "model_cards.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_cards"] = module
    spec.loader.exec_module(module)
    return module


def test_finished_cards_are_what_the_script_writes():
    wanted = {name: write() for name, write in script().CARD_OF.items()}
    found = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").iterdir()}
    assert found == wanted, "python benchmarks/model_cards.py brings them up to date"


@pytest.mark.parametrize("name", ["tweets", "stsb"])
def test_figures_of_the_finished_cards_are_those_measured(name):
    text = (ROOT / "model_cards" / f"relish-smollm2-135m-{name}.md").read_text(encoding="utf-8")
    card = parsed(text)
    if name == "tweets":
        measured = json.loads((RESULTS / "demo.json").read_text())["test"]["RELISH"]
    else:
        runs = json.loads((RESULTS / "heads-stsb.json").read_text())["rows"]["RELISH, layer 16"]["runs"]
        measured = max(runs, key=lambda run: max(run["validation_pearson"]))["test"]
    kinds = {"pearsonr": "pearson", "spearmanr": "spearman", "nrmse": "nrmse", "rmse": "rmse", "mae": "mae"}
    quoted = {kinds[r.metric_type]: r.metric_value for r in card.data.eval_results if r.dataset_split == "test"}
    assert quoted == {name: pytest.approx(value, abs=5e-5) for name, value in measured.items()}
    (row,) = [line for line in text.splitlines() if line.startswith("| test |")]
    assert [float(cell) for cell in row.strip("| ").split("|")[3:]] == pytest.approx(list(measured.values()), abs=5e-5)
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert card.data.license == "apache-2.0"


@pytest.mark.parametrize(
    ("label", "method"),
    [
        ("RELISH on the layer that a search finds", "RELISH, layer search"),
        ("an MLP over mean states, with a layer search of its own", "MLP, mean, layer search"),
        ("RELISH on the last layer", "RELISH"),
        ("the MLP on the last layer", "MLP, mean"),
        ("ridge regression on TF-IDF, without a language model", "TF-IDF, ridge"),
    ],
)
def test_the_finished_card_quotes_other_methods_from_their_runs(label, method):
    text = (ROOT / "model_cards" / "relish-smollm2-135m-stsb.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(rf"[:;] {label} (-?\d\.\d{{3}})", text)
    runs = [json.loads(path.read_text()) for path in (RESULTS / "paper" / "frozen" / "results").glob("stsb--*.json")]
    own = [r for r in runs if r["method"] == method and r["backbone"] in ("", "SmolLM2-135M-Instruct")]
    assert float(quoted) == pytest.approx(sum(r["test"]["pearson"] for r in own) / len(own), abs=5.1e-4)
