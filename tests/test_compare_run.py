"""`compare` from the outside: every method to its result, nothing done twice, budgets, settings that are held."""

import json
import shutil

import numpy as np
import pytest
from comparing import OPTIONS, SCALE, compare_on, save_everything
from scipy import stats

from modeling_relish.backbone_relish import BackboneError
from modeling_relish.compare import CompareError, load_task
from modeling_relish.compare.results import read_results
from modeling_relish.text_relish import TemplateError

# PEFT 0.21 asks transformers 5.24 for it by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROWS = {
    ("TF-IDF, ridge", "none"), ("TF-IDF, random forest", "none"),
    *((f"tiny-bert, {pooling}", regime) for pooling in ("mean of tokens", "first token") for regime in ("frozen", "full")),
    ("zero-shot decoding", "frozen"), ("many-shot decoding", "frozen"), ("RAIL, grid", "frozen"), ("RAIL, sampling", "frozen"),
    ("cross-entropy, decoding", "lora"), ("cross-entropy, RAIL", "lora"), ("RAFT", "lora"), ("MBR", "lora"),
    *((f"{head}, mean", regime) for head in ("linear", "MLP") for regime in ("frozen", "lora")),
    ("linear, mean, layer search", "frozen"), ("MLP, mean, layer search", "frozen"),
    *((head, regime) for head in ("RELISH", "RELISH, layer search", "special token", "MLP on final logits")
      for regime in ("frozen", "lora")),
}  # fmt: skip
NOT_TRAINED = {"zero-shot decoding", "many-shot decoding", "RAIL, grid", "RAIL, sampling"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return save_everything(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def run(places, tmp_path_factory):
    return compare_on(places, tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def everything(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("all") / "out"
    return run(folder, write_reports=True)


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "results").glob("*.json")}


def test_every_method_comes_to_its_result(everything, places):
    assert everything.left_out == {}
    assert {(r.method, r.regime) for r in everything.runs} == ROWS
    stored = read_results(everything.folder / "results")
    assert len(stored) == len(ROWS)
    labels = load_task(str(places[0]), **SCALE).labels("test")
    for result in stored:
        assert len(result.test_predictions) == len(labels) == 12
        assert result.test_labels == pytest.approx(labels, abs=1e-6)
        assert result.dataset == "words"
        assert result.backbone in ("", "tiny-qwen")
        assert (result.trainable_parameters == 0) == (result.method in NOT_TRAINED), result.method
        assert result.predict_seconds > 0
        assert (len(result.curve) > 0) == (result.trainable_parameters > 0 and "TF-IDF" not in result.method)
        if result.method == "many-shot decoding":
            assert not any("examples fit" in note for note in result.notes)  # as many as were asked for
        if len(set(result.test_predictions)) > 1:
            expected = stats.pearsonr(result.test_predictions, labels).statistic
            assert result.test["pearson"] == pytest.approx(expected, abs=1e-4)


def test_results_hold_numbers_and_no_text_of_the_data(everything):
    for path in (everything.folder / "results").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "wonderful" not in text
        values = json.loads(text)
        assert all(isinstance(v, float) for v in values["test_predictions"] + values["test_labels"])


def test_trained_adapters_count_with_the_head(everything):
    found = {(r.method, r.regime): r.trainable_parameters for r in everything.runs}
    assert found["RELISH", "lora"] > found["RELISH", "frozen"] > found["linear, mean", "frozen"] == 33
    assert found["linear, mean", "lora"] - found["linear, mean", "frozen"] == found["RAFT", "lora"]


def test_the_report_has_every_row_and_opens_without_network(everything):
    page = everything.report["html"].read_text(encoding="utf-8")
    for method, _ in ROWS:
        assert method in page
    assert "default-src 'none'" in page


def test_nothing_that_is_done_is_done_again(everything, run):
    before, said = files(everything.folder), []
    again = run(everything.folder, log=said.append)
    assert files(everything.folder) == before
    assert all(line.endswith("done before") for line in said[1:])
    assert {r.key for r in map(_hashable, again.runs)} == {r.key for r in map(_hashable, everything.runs)}
    assert again.settings == everything.settings


def _hashable(result):
    class Named:
        key = result.key.file_name

    return Named


def test_as_many_settings_are_tried_for_every_trained_method_and_validation_chooses(everything):
    tried = {}
    for result in read_results(everything.folder / "search"):
        tried.setdefault((result.method, result.regime), []).append(result)
    trained = {row for row in ROWS if row[0] not in NOT_TRAINED}
    assert tried.keys() == trained
    for (method, regime), results in tried.items():
        assert len(results) == OPTIONS.candidates, method
        chosen = [r for r in everything.runs if (r.method, r.regime) == (method, regime)]
        if method == "cross-entropy, decoding":  # its settings are those of the training that both readings share
            continue
        best = max(results, key=lambda r: np.nan_to_num(r.validation["pearson"], nan=-2))
        assert chosen[0].validation["pearson"] == pytest.approx(best.validation["pearson"], nan_ok=True), method


def test_the_layer_is_searched_once_for_each_head_and_named(everything):
    searched = [r for r in everything.runs if "layer search" in r.method]
    layers = {r.method: r.settings["backbone_layer"] for r in searched}
    assert len(searched) == len(layers) + 1  # RELISH's row under LoRA reads the layer of its frozen row
    assert set(layers.values()) <= {2, None}
    kept = [json.loads(path.read_text()) for path in (everything.folder / "shared").glob("layers--*.json")]
    assert [set(search["found"]) for search in kept] == [{"2", "4"}] * 3
    assert all(any("layer" in note for note in r.notes) for r in searched)


def test_held_settings_are_not_searched_again(everything, run, tmp_path):
    found = run(tmp_path, methods="linear,tfidf_ridge", settings=everything.folder / "settings.json", regimes="frozen")
    assert not (tmp_path / "search").exists()
    earlier = {(r.method, r.regime): r for r in everything.runs}
    for result in found.runs:
        assert result.settings == earlier[result.method, result.regime].settings
        assert result.test_predictions == earlier[result.method, result.regime].test_predictions
    held = {"tiny-qwen": {"linear/frozen": {"learning_rat": 1.0}}}
    with pytest.raises(CompareError, match=r"linear has no setting \['learning_rat'\]; it has .*'learning_rate'"):
        run(tmp_path / "misspelt", methods="linear", settings=held, regimes="frozen")


def test_an_ablation_is_a_setting_and_a_row_of_its_own(run, tmp_path):
    """Settings of the head, of the grid: another model each, beside the usual one in the report."""
    rate = {"learning_rate": 1e-3}

    def changed(method, regime, **settings):
        held = {"tiny-qwen": {f"{method}/{regime}": {**rate, **settings}}}
        found = run(tmp_path, methods=method, settings=held, regimes=regime, write_reports=True)
        return found.runs[0], found.report["md"].read_text(encoding="utf-8")

    plain, _ = changed("relish", "frozen")
    short, _ = changed("relish", "frozen", num_refinement_steps=1)
    several, _ = changed("relish", "frozen", num_latents=2, latent_combination="concat")
    mixed, report = changed("relish", "frozen", backbone_layers=[1, 2])
    assert short.trainable_parameters < plain.trainable_parameters < several.trainable_parameters
    assert mixed.trainable_parameters == plain.trainable_parameters + 2
    assert mixed.extraction_seconds > 0
    assert "RELISH (num\\_refinement\\_steps=1)" in report
    digit, _ = changed("raft", "lora", number_grid={"5": 5})
    letters, _ = changed("raft", "lora", number_grid={"A": 0, "B": 5})
    # 5 p("5") and 5 p("B"): of other tokens' probabilities, both below 5.
    assert digit.test_predictions != pytest.approx(letters.test_predictions, rel=0.01)
    assert 0 < max(digit.test_predictions + letters.test_predictions) < 5


def test_another_table_or_other_weights_are_other_runs(run, tmp_path):
    first = run(tmp_path, methods="tfidf_ridge")
    second = run(tmp_path, methods="tfidf_ridge", train_rows=20)
    assert first.runs[0].settings["data"] != second.runs[0].settings["data"]
    assert second.runs[0].settings["train_rows"] == 20
    assert len(files(tmp_path)) == 2


def test_report_goes_on_where_the_test_rows_or_the_scale_are_others(places, run, tmp_path):
    run(tmp_path / "out", methods="tfidf_ridge", write_reports=True)
    assert "12 test rows, 24 training rows, labels from 0 to 5" in (tmp_path / "out" / "report.md").read_text()
    found = run(tmp_path / "out", methods="tfidf_ridge", write_reports=True, label_max=10.0)
    text = found.report["md"].read_text()
    assert "labels from 0 to 10" in text
    shutil.copytree(places[0], tmp_path / "words")
    table = tmp_path / "words" / "test.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-2]))
    found = run(tmp_path / "out", methods="tfidf_ridge", write_reports=True, data=tmp_path / "words")
    assert "10 test rows" in found.report["md"].read_text()
    assert "1 earlier runs on other test rows or another label scale are not shown" in found.report["html"].read_text()


def test_texts_in_two_splits_and_what_is_compared_are_told(places, run, tmp_path):
    shutil.copytree(places[0], tmp_path / "words")
    rows = (tmp_path / "words" / "train.csv").read_text().splitlines(keepends=True)
    (tmp_path / "words" / "test.csv").write_text("".join(rows[:9]))
    lines = []
    found = run(tmp_path / "out", methods="tfidf_ridge", write_reports=True, data=tmp_path / "words", log=lines.append)
    assert "8 text(s) of the test data are in the train data too" in found.report["md"].read_text()
    assert lines[0].startswith("words: rows: train 24, validation 12, test 8; labels from 0 to 5; prompt: 'text_a: ")


@pytest.mark.parametrize("budget", [None, "5m"])
def test_a_backbone_that_is_not_there_is_told_at_once(places, run, tmp_path, budget):
    with pytest.raises((BackboneError, OSError), match="tiny-qwenn"):
        run(tmp_path, backbones=f"{places[1]}n", budget=budget, methods="tfidf_ridge,linear")


def test_seeds_change_what_is_random_and_nothing_else(run, tmp_path):
    found = run(tmp_path, methods=["tfidf_ridge", "linear", "rail"], regimes="frozen", seeds=2)
    seeds = {}
    for result in found.runs:
        seeds.setdefault(result.method, []).append(result)
    assert {name: len(runs) for name, runs in seeds.items()} == {"TF-IDF, ridge": 1, "linear, mean": 2, "RAIL, grid": 1}
    one, other = seeds["linear, mean"]
    assert one.settings == other.settings
    assert one.test_predictions != other.test_predictions


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": "relish,rafd"}, r"no method \['rafd'\]; the known ones are .*raft.*relish"),
        ({"methods": ""}, "no method was named"),
        ({"regimes": "frozen,warm"}, r"no regime \['warm'\]; the known ones are frozen, lora, full"),
        ({"methods": "raft", "regimes": "frozen"}, "nothing to run.*raft.*lora"),
        ({"budget": "soon"}, "a budget is a time such as 30m"),
        ({"seeds": 0}, "seeds must name at least one"),
        ({"settings": {"tiny-qwen": {"relihs/frozen": {}}}}, r"no method \['relihs'\]"),
        ({"settings": {"tiny-qwen": {"linear/frozn": {}}}}, "linear has frozen, lora; got 'linear/frozn'"),
        ({"label_max": 3.0}, "outside the scale 0 to 3"),
        ({"text": ["text_a"], "template": "{text_b}: "}, r"asks for \['text_b'\], and train has the columns"),
        ({"template": "{text_a} {}"}, "{text_a} {}"),
        ({"label_max": None}, "belong together"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(run, tmp_path, changed, message):
    with pytest.raises((CompareError, TemplateError), match=message):
        run(tmp_path / "out", **changed)
    assert not (tmp_path / "out" / "results").exists()


def test_an_encoder_as_backbone_leaves_out_what_needs_a_language_model(run, places, tmp_path):
    found = run(tmp_path, methods="raft,zero_shot,linear", backbones=places[2], regimes="frozen,lora")
    assert {r.method for r in found.runs} == {"linear, mean"}
    assert set(found.left_out) == {"RAFT, lora, tiny-bert, seed 0", "zero-shot decoding, frozen, tiny-bert, seed 0"}
    assert all("no causal language model" in reason for reason in found.left_out.values())


def test_a_prompt_that_ends_in_the_text_leaves_out_what_needs_words_there(run, tmp_path):
    found = run(tmp_path, methods="rail,linear", template="{text_a} and {text_b}", regimes="frozen")
    assert {r.method for r in found.runs} == {"linear, mean"}
    assert "ends in a field" in found.left_out["RAIL, grid, frozen, tiny-qwen, seed 0"]


def test_a_budget_takes_what_fits_and_names_the_rest(run, tmp_path):
    found = run(tmp_path, methods="tfidf_ridge,linear,raft", regimes="frozen,lora", budget="18s", seeds=3)
    assert ("TF-IDF, ridge", "none") in {(r.method, r.regime) for r in found.runs}
    assert "RAFT, lora, tiny-qwen, seed 0" in found.left_out
    assert all("of the budget are left" in reason for reason in found.left_out.values())
    assert json.loads((tmp_path / "left_out.json").read_text()) == found.left_out
    with_time = run(tmp_path, methods="tfidf_ridge,linear,raft", regimes="frozen", budget="1h", write_reports=True)
    assert {(r.method, r.regime) for r in with_time.runs} == {("TF-IDF, ridge", "none"), ("linear, mean", "frozen")}
    assert "left out: raft: it is run under lora" in with_time.report["md"].read_text().replace("\\", "")


def test_another_label_scale_is_not_what_was_done_before(run, tmp_path):
    """NRMSE is divided by the scale's width: a result of another scale must not come back as one of this."""
    first = run(tmp_path, methods="tfidf_ridge")
    second = run(tmp_path, methods="tfidf_ridge", label_min=0, label_max=10)
    assert first.runs[0].test["nrmse"] == pytest.approx(2 * second.runs[0].test["nrmse"])
    assert second.runs[0].label_range == (0, 10)
