"""A run's result on disk: what is written comes back, what cannot be is refused, and a run that is done is found."""

import json
import math

import numpy as np
import pytest

from modeling_relish.compare.results import ResultError, RunKey, RunResult, load_result, read_results, save_result

KEY = RunKey("RELISH, layer search", "frozen", "stsb", "SmolLM2-135M", 0, {"learning_rate": 3e-4, "layers": [8, 16]})
VALIDATION = {"pearson": 0.8, "spearman": 0.7, "nrmse": 0.2}
LABELS = [0.0, 1.0, 2.5, 4.0]


def result_of(key=KEY, predictions=(0.5, 1.0, 2.0, 4.5), labels=LABELS, validation=VALIDATION, **rest):
    return RunResult.from_predictions(
        key, test_predictions=predictions, test_labels=labels, label_range=(0, 5), validation=validation, **rest
    )


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_what_is_written_comes_back_and_the_metrics_are_the_test_rows(tmp_path):
    result = result_of(
        trainable_parameters=2_517_505, train_seconds=12.5, extraction_seconds=60.0, predict_seconds=1.5,
        peak_memory_bytes=10**9, curve=[(10, 0.5), (20, 0.75)], notes=["one answer was no number"],
    )  # fmt: skip
    path = save_result(tmp_path, result)
    assert path.parent == tmp_path
    assert load_result(tmp_path, KEY) == read_results(tmp_path)[0] == result
    assert result.test["pearson"] == pytest.approx(np.corrcoef([0.5, 1, 2, 4.5], LABELS)[0, 1])
    assert result.test["nrmse"] == pytest.approx(math.sqrt((0.5**2 + 0.5**2 + 0.5**2) / 4) / 5)
    assert result.test["spearman"] == pytest.approx(1)
    assert result.total_seconds == 74
    assert {"python", "torch", "numpy"} <= set(result.versions)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_run_is_known_by_what_it_compares_and_by_every_setting(tmp_path):
    save_result(tmp_path, result_of())
    others = [
        RunKey(**{**KEY.__dict__, name: value})
        for name, value in {
            "method": "RELISH", "regime": "lora", "dataset": "sickr", "backbone": "Gemma", "seed": 1,
            "settings": {"learning_rate": 1e-3, "layers": [8, 16]},
        }.items()
    ]  # fmt: skip
    assert len({key.file_name for key in [KEY, *others]}) == 7
    assert all(load_result(tmp_path, key) is None for key in others)
    again = RunKey(**{**KEY.__dict__, "settings": {"layers": (8, 16), "learning_rate": 0.0003}})
    assert load_result(tmp_path, again) is not None


def test_a_name_of_a_file_can_be_written_everywhere():
    name = RunKey("MLP / mean: <b>é</b>", "none", "my data", "", 3).file_name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")


def test_constant_predictions_are_nan_and_come_back_as_nan(tmp_path):
    path = save_result(tmp_path, result_of(predictions=[2.0] * 4, curve=[(1, math.nan)]))
    assert "NaN" not in path.read_text()
    back = load_result(tmp_path, KEY)
    assert math.isnan(back.test["pearson"])
    assert math.isnan(back.curve[0][1])
    assert back.test["nrmse"] > 0


def test_a_metric_that_its_own_predictions_do_not_give_is_refused(tmp_path):
    path = save_result(tmp_path, result_of())
    changed(path, test={"pearson": 0.999, "spearman": 1.0, "nrmse": 0.0866})
    with pytest.raises(ResultError, match=r"pearson is 0\.999") as info:
        read_results(tmp_path)
    assert path.name in str(info.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"regime": "cold"}, "cold"),
        ({"schema": 99}, "99"),
        ({"train_seconds": -1}, "seconds"),
        ({"validation": {"pearson": 1.0}}, "spearman"),
        ({"test_labels": [1.0, 2.0]}, "one prediction per label"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path, change, words):
    path = save_result(tmp_path, result_of())
    changed(path, **change)
    with pytest.raises(ResultError, match=words) as info:
        load_result(tmp_path, KEY)
    assert path.name in str(info.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1', "\ufeff"])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ResultError, match="x.json"):
        read_results(tmp_path)


def test_an_empty_folder_and_values_that_are_not_finite_are_told(tmp_path):
    with pytest.raises(ResultError, match="no result"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="finite"):
        result_of(predictions=[1.0, math.nan, 2.0, 3.0])
