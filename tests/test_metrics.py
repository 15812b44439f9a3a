"""metrics.py against formulas written here in numpy float64."""

import math
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from modeling_relish.metrics import (
    METRIC_NAMES,
    ConstantInputWarning,
    MetricError,
    RegressionMetrics,
    make_compute_metrics,
    regression_metrics,
)

# ---------------------------------------------------------------------- oracles


def oracle_pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())


def oracle_ranks(x):
    """Ranks from 1; ties share the mean of their ranks. Counted pairwise, so nothing is sorted."""
    below = (x[None, :] < x[:, None]).sum(1)
    equal = (x[None, :] == x[:, None]).sum(1)
    return below + (equal + 1) / 2


def oracle(x, y, width):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    rmse = math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x))
    return {
        "pearson": oracle_pearson(x, y),
        "spearman": oracle_pearson(oracle_ranks(x), oracle_ranks(y)),
        "nrmse": rmse / width,
        "rmse": rmse,
        "mae": sum(abs(a - b) for a, b in zip(x, y, strict=True)) / len(x),
    }


def sample(rows, targets=None, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    shape = (rows,) if targets is None else (rows, targets)
    labels = rng.uniform(0, 5, shape)
    if ties:
        labels = np.round(labels)
    predictions = 0.7 * labels + rng.normal(0, 0.8, shape)
    return (np.round(predictions) if ties else predictions), labels


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert type(got[name]) is float
        assert got[name] == pytest.approx(value, abs=1e-12), name


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("rows", [3, 20, 501])
@pytest.mark.parametrize("ties", [False, True])
def test_one_target_equals_the_formulas(rows, ties):
    predictions, labels = sample(rows, seed=rows, ties=ties)
    assert_same(regression_metrics(predictions, labels, label_range=(0, 5)), oracle(predictions, labels, 5.0))
    width = labels.max() - labels.min()
    assert_same(regression_metrics(predictions, labels), oracle(predictions, labels, width))


def test_figures_computed_by_hand():
    got = regression_metrics([1, 2, 4], [1, 3, 3], label_range=(0, 4))
    # errors 0, -1, 1; deviations (-4/3, -1/3, 5/3) and (-4/3, 2/3, 2/3); ranks (1, 2, 3) and (1, 2.5, 2.5)
    assert_same(
        got,
        {
            "pearson": (16 - 2 + 10) / math.sqrt((16 + 1 + 25) * (16 + 4 + 4)),
            "spearman": 1.5 / math.sqrt(2 * 1.5),
            "nrmse": math.sqrt(2 / 3) / 4,
            "rmse": math.sqrt(2 / 3),
            "mae": 2 / 3,
        },
    )


def test_column_and_flat_shapes_are_the_same():
    predictions, labels = sample(17)
    flat = regression_metrics(predictions, labels)
    for p in (predictions, predictions[:, None], predictions.tolist()):
        for y in (labels, labels[:, None], labels.tolist()):
            assert regression_metrics(p, y) == flat


def test_several_targets_give_means_and_each():
    predictions, labels = sample(40, 3)
    labels *= [1.0, 10.0, 100.0]
    ranges = [(0, 5), (-10, 60), (0, 1000)]
    each = [oracle(predictions[:, k], labels[:, k], high - low) for k, (low, high) in enumerate(ranges)]
    wanted = {name: sum(e[name] for e in each) / 3 for name in METRIC_NAMES}
    wanted |= {f"{name}_{k}": each[k][name] for k in range(3) for name in METRIC_NAMES}
    assert_same(regression_metrics(predictions, labels, label_range=ranges), wanted)


def test_one_range_serves_all_targets_and_two_targets_are_not_taken_for_a_range():
    predictions, labels = sample(10, 2)
    shared = regression_metrics(predictions, labels, label_range=(0, 8))
    assert shared == regression_metrics(predictions, labels, label_range=[(0, 8), (0, 8)])
    assert shared["nrmse_1"] == pytest.approx(shared["rmse_1"] / 8, abs=1e-15)
    own = regression_metrics(predictions, labels)
    assert own["nrmse_0"] == pytest.approx(own["rmse_0"] / (labels[:, 0].max() - labels[:, 0].min()), abs=1e-15)


def test_arithmetic_is_float64_whatever_comes_in():
    # In fp32 the mean of these squares loses the small error.
    labels = np.array([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], dtype=np.float32)
    predictions = labels + np.array([0.25, -0.25, 0.25, -0.25], dtype=np.float32)
    assert_same(regression_metrics(predictions, labels), oracle(predictions.astype(float), labels.astype(float), 3.0))
    halves = torch.tensor([1.0, 2.0, 4.5], dtype=torch.bfloat16, requires_grad=True)
    assert regression_metrics(halves, torch.tensor([1, 2, 3])) == regression_metrics([1.0, 2.0, 4.5], [1, 2, 3])


def test_perfect_and_reversed_order():
    labels = [0.0, 1.0, 2.0, 7.0]
    assert_same(
        regression_metrics(labels, labels), {"pearson": 1.0, "spearman": 1.0, "nrmse": 0.0, "rmse": 0.0, "mae": 0.0}
    )
    assert regression_metrics([3.0, 2.0, 1.0, 0.0], labels)["spearman"] == pytest.approx(-1.0, abs=1e-12)


# ---------------------------------------------------------------------- where no correlation is defined


def only_warning(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    assert [w.category for w in caught] == [ConstantInputWarning]
    assert caught[0].filename == __file__
    return result, str(caught[0].message)


@pytest.mark.parametrize(
    ("predictions", "labels", "named", "not_named"),
    [
        ([2.5, 2.5, 2.5], [1.0, 2.0, 3.0], ["predictions", "2.5"], ["labels"]),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], ["labels", "4"], ["predictions"]),
        ([1.0, 1.0], [0.0, 0.0], ["predictions", "labels"], []),
        ([0.3, 0.1 + 0.2, 0.3], [1.0, 2.0, 3.0], ["predictions"], ["labels"]),
        ([1.0], [2.0], ["only one row"], ["constant"]),
    ],
)
def test_constant_input_is_nan_with_one_warning(predictions, labels, named, not_named):
    result, message = only_warning(lambda: regression_metrics(predictions, labels, label_range=(0, 5)))
    assert math.isnan(result["pearson"])
    assert math.isnan(result["spearman"])
    errors = np.subtract(predictions, labels)
    assert result["nrmse"] == pytest.approx(math.sqrt((errors**2).mean()) / 5, abs=1e-12)
    assert result["mae"] == pytest.approx(abs(errors).mean(), abs=1e-12)
    assert all(word in message for word in named)
    assert not any(word in message for word in not_named)


def test_constant_target_among_several_is_named_once():
    predictions, labels = sample(6, 3)
    predictions[:, 1] = 2.0
    labels[:, 2] = 1.0
    result, message = only_warning(lambda: regression_metrics(predictions, labels, label_range=(0, 5)))
    assert "predictions of target(s) [1]" in message
    assert "labels of target(s) [2]" in message
    assert math.isnan(result["pearson"])
    assert math.isnan(result["pearson_1"])
    assert math.isnan(result["spearman_2"])
    assert not math.isnan(result["pearson_0"])
    assert math.isfinite(result["nrmse"])


def test_labels_without_width_have_no_normalised_error():
    result, _ = only_warning(lambda: regression_metrics([1.0, 2.0], [3.0, 3.0]))
    assert math.isnan(result["nrmse"])
    assert result["rmse"] == pytest.approx(math.sqrt(2.5))


def test_scipy_does_not_warn_about_nearly_constant_input():
    predictions = 1.0 + 1e-12 * np.arange(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert regression_metrics(predictions, np.arange(5.0))["spearman"] == pytest.approx(1.0)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("predictions", "labels", "words"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0], ["(3, 1)", "(2, 1)", "row 2"]),
        ([[1.0, 2.0]], [[1.0]], ["(1, 2)", "(1, 1)", "targets"]),
        (np.zeros((2, 2, 2)), [1.0, 2.0], ["predictions", "(2, 2, 2)"]),
        (1.0, 1.0, ["predictions", "()"]),
        ([], [], ["empty"]),
        (np.zeros((0, 3)), np.zeros((0, 3)), ["empty"]),
        ([1.0, float("nan"), float("inf")], [1.0, 2.0, 3.0], ["predictions", "nan", "row 1", "2 of 3"]),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, -float("inf")]], ["labels", "-inf", "row 1, target 1"]),
        (["a", "b"], [1.0, 2.0], ["predictions", "numbers"]),
        ([1.0, 2.0], [1.0, {}], ["labels", "numbers"]),
        ([[1.0, 2.0], [3.0]], [1.0, 2.0], ["predictions", "shape"]),
    ],
)
def test_bad_input_is_a_named_error(predictions, labels, words):
    with pytest.raises(MetricError) as caught:
        regression_metrics(predictions, labels)
    assert isinstance(caught.value, ValueError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("label_range", [(5, 0), (1, 1), (0, float("inf")), (0, 1, 2), [(0, 1), (0, 1)], "ab", 5])
def test_bad_label_range(label_range):
    with pytest.raises(MetricError, match="label_range"):
        regression_metrics([1.0, 2.0], [1.0, 3.0], label_range=label_range)


# ---------------------------------------------------------------------- Trainer and evaluate


def test_compute_metrics_for_trainer():
    predictions, labels = sample(12, 1)
    compute = make_compute_metrics(label_range=(0, 5))
    wanted = regression_metrics(predictions, labels, label_range=(0, 5))
    assert compute(EvalPrediction(predictions=predictions, label_ids=labels[:, 0])) == wanted
    hidden = np.zeros((12, 7, 4))
    assert compute(EvalPrediction(predictions=(predictions, hidden), label_ids=labels)) == wanted


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"touched the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def files_below(folder):
    return [p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_evaluate_module_without_network(no_network, tmp_path):
    predictions, labels = sample(30)
    wanted = regression_metrics(predictions, labels, label_range=(0, 5))
    metric = RegressionMetrics(cache_dir=str(tmp_path))
    assert metric.compute(predictions=predictions, references=labels, label_range=(0, 5)) == wanted
    for part in np.array_split(np.arange(30), 4):
        metric.add_batch(predictions=predictions[part], references=labels[part])
    assert metric.compute(label_range=(0, 5)) == wanted
    for p, y in zip(predictions, labels, strict=True):
        metric.add(prediction=p, reference=y)
    assert metric.compute() == regression_metrics(predictions, labels)
    assert files_below(tmp_path) == []


def test_evaluate_module_takes_integers_and_names_bad_rows(no_network, tmp_path):
    metric = RegressionMetrics(cache_dir=str(tmp_path))
    assert metric.compute(predictions=[1, 2, 4], references=[1, 3, 3]) == regression_metrics([1, 2, 4], [1, 3, 3])
    with pytest.raises(MetricError, match="row 1"):
        metric.compute(predictions=[1.0, float("nan")], references=[1.0, 2.0])
    assert metric.compute(predictions=[1, 2, 4], references=[1, 3, 3])["mae"] == pytest.approx(2 / 3)


SCRIPT = """
import socket, sys, os, pathlib

def refuse(*args, **kwargs):
    print("touched the network", args)
    os._exit(3)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from modeling_relish.metrics import RegressionMetrics
metric = RegressionMetrics()
metric.add_batch(predictions=[1.0, 2.0], references=[1.0, 3.0])
metric.add_batch(predictions=[4.0], references=[3.0])
print(sorted(metric.compute(label_range=(0, 5))))
"""


def test_clean_process_stays_off_the_network_and_in_its_cache(tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    root = str(Path(__file__).parents[1])
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=work,
        env={**keep, "HOME": str(home), "PYTHONPATH": root, "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == str(sorted(METRIC_NAMES))
    assert list(work.iterdir()) == []
    outside = [p for p in files_below(home) if (home / ".cache" / "huggingface") not in p.parents]
    assert outside == []


def test_a_number_whose_square_is_infinite_has_a_finite_error():
    found = regression_metrics([1e200, 1.0, 2.0, 3.0], [1.0, 1.0, 2.0, 3.0], label_range=(0, 5))
    assert found["rmse"] == pytest.approx(0.5e200)
    assert found["nrmse"] == pytest.approx(1e199)
