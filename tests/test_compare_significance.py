"""A difference is called one only when it is: against scipy's bootstrap, and over many comparisons of equals."""

import math

import numpy as np
import pytest
from scipy import stats
from test_compare_results import KEY, VALIDATION, result_of

from modeling_relish.compare.results import METRICS, ResultError, RunKey, RunResult
from modeling_relish.compare.significance import RowBootstrap, resample_metrics


def method(name, predictions, labels, deterministic=False):
    """One run per row of predictions (seeds, N)."""
    return [
        RunResult.from_predictions(
            RunKey(name, "frozen", "set", "tiny", seed), test_predictions=row, test_labels=labels, label_range=(0, 5),
            validation=VALIDATION, trainable_parameters=10, is_deterministic=deterministic,
        )
        for seed, row in enumerate(predictions)
    ]  # fmt: skip


def noisy(labels, noise, seeds=3, spread=0.0, seed=0):
    """Predictions that share one error over all seeds (the method's), and one of their own (the seed's)."""
    generator = np.random.default_rng(seed)
    shared = noise * generator.normal(size=len(labels))
    return labels + shared + spread * generator.normal(size=(seeds, len(labels)))


def labels_of(count, seed=1):
    return np.round(np.random.default_rng(seed).uniform(0, 5, count), 1)


def direct(predictions, labels):
    return {
        "pearson": stats.pearsonr(predictions, labels).statistic,
        "spearman": stats.spearmanr(predictions, labels).statistic,
        "nrmse": math.sqrt(np.mean((predictions - labels) ** 2)) / 5,
    }


def test_metrics_of_a_resample_are_those_of_the_rows_that_were_drawn():
    labels = labels_of(60)
    predictions = np.stack([labels + 1, np.round(labels), np.random.default_rng(0).normal(size=60), 1e6 + labels**2])
    found = resample_metrics(labels, predictions, 5.0, 7, np.random.default_rng(3))
    drawn = np.random.default_rng(3).integers(60, size=(7, 60))
    for r, rows in enumerate(drawn):
        for run, values in enumerate(predictions):
            for metric, expected in direct(values[rows], labels[rows]).items():
                assert found[metric][r, run] == pytest.approx(expected, abs=1e-9), (metric, run)


@pytest.mark.parametrize("metric", METRICS)
def test_interval_over_rows_is_that_of_scipys_paired_bootstrap(metric):
    labels = labels_of(300)
    first, second = method("a", noisy(labels, 0.8), labels), method("b", noisy(labels, 1.2, seed=9), labels)
    one, other = np.array(first[0].test_predictions), np.array(second[0].test_predictions)

    def statistic(a, b, y):
        return direct(a, y)[metric] - direct(b, y)[metric]

    expected = stats.bootstrap(
        (one, other, labels), statistic, paired=True, vectorized=False, n_resamples=500, method="percentile", rng=0
    )
    found = RowBootstrap([*first, *second]).difference(first[:1], second[:1], metric)
    assert found.value == pytest.approx(statistic(one, other, labels), abs=1e-6)
    interval = expected.confidence_interval
    width = interval.high - interval.low
    assert found.rows == (
        pytest.approx(interval.low, abs=0.15 * width), pytest.approx(interval.high, abs=0.15 * width)
    )  # fmt: skip


def test_where_rows_say_little_the_interval_is_welchs_over_seeds():
    """With very many rows, what is left is the seeds: each of them a method of its own accuracy."""
    labels = labels_of(20_000)
    first = method(
        "a", np.concatenate([noisy(labels, noise, 1, seed=i) for i, noise in enumerate([0.5, 1.0, 1.5])]), labels
    )
    second = method(
        "b", np.concatenate([noisy(labels, noise, 1, seed=9 + i) for i, noise in enumerate([2, 3, 4, 2])]), labels
    )
    found = RowBootstrap([*first, *second], metrics=["pearson"], resamples=2000).difference(first, second, level=0.9)
    expected = stats.ttest_ind(
        [r.test["pearson"] for r in first], [r.test["pearson"] for r in second], equal_var=False
    ).confidence_interval(0.9)
    assert found.interval == (pytest.approx(expected.low, rel=0.02), pytest.approx(expected.high, rel=0.02))
    assert found.rows[1] - found.rows[0] < (expected.high - expected.low) / 10


def test_where_seeds_agree_the_interval_is_that_of_the_rows():
    labels = labels_of(300)
    first, second = (method(n, [noisy(labels, 1, 1, seed=s)[0]] * 3, labels) for n, s in (("a", 0), ("b", 1)))
    found = RowBootstrap([*first, *second], metrics=["pearson"], resamples=300).difference(first, second)
    assert found.interval == pytest.approx(found.rows, abs=1e-12)


def test_a_clear_difference_is_called_in_the_metrics_own_direction():
    labels = labels_of(400)
    good = method("good", noisy(labels, 0.4, spread=0.05), labels)
    bad = method("bad", noisy(labels, 2.0, spread=0.05, seed=5), labels)
    bootstrap = RowBootstrap([*good, *bad], resamples=1000)
    for metric in METRICS:
        assert bootstrap.difference(good, bad, metric).verdict == "better"
        assert bootstrap.difference(bad, good, metric).verdict == "worse"
        assert (bootstrap.difference(good, bad, metric).value > 0) is (metric != "nrmse")


def test_equals_are_seldom_called_different_and_rows_alone_would_often_do_so():
    """Two methods that are equally good in truth, each of whose seeds turns out better or worse: 60 times, 5 % are 3."""
    called = rows_alone = 0
    for trial in range(60):
        generator = np.random.default_rng([7, trial])
        labels = np.round(generator.uniform(0, 5, 200), 1)
        noise = [[generator.normal(size=200) * abs(1 + 0.3 * generator.normal()) for _ in range(3)] for _ in "ab"]
        first, second = (method(name, labels + np.array(n), labels) for name, n in zip("ab", noise, strict=True))
        found = RowBootstrap([*first, *second], metrics=["pearson"], resamples=300).difference(first, second)
        called += found.is_one
        rows_alone += found.rows[0] > 0 or found.rows[1] < 0
    assert called <= 6
    assert rows_alone >= 20


def test_rows_alone_do_not_make_a_difference():
    labels = labels_of(2000)
    lucky = method("lucky", np.concatenate([noisy(labels, n, 1, seed=i) for i, n in enumerate([0.4, 2.5, 1])]), labels)
    steady = method("steady", noisy(labels, 1.6, spread=0.01, seed=7), labels)
    found = RowBootstrap([*lucky, *steady], resamples=500).difference(lucky, steady)
    assert found.rows[0] > 0 > found.interval[0]
    assert found.verdict == "not shown"


@pytest.mark.parametrize("rows", [2, 3, 10, 29])
def test_few_rows_are_not_called(rows):
    labels = labels_of(rows)
    good = method("good", noisy(labels, 0.01, 3, spread=0.01), labels)
    bad = method("bad", noisy(labels, 9.0, 3, spread=0.01, seed=5), labels)
    found = RowBootstrap([*good, *bad], resamples=200).difference(good, bad, "nrmse")
    assert (found.verdict, found.is_one) == ("too few rows, or too few different answers: not called", False)


def test_an_answer_that_hardly_ever_differs_is_not_called():
    labels = labels_of(60)
    nearly = np.full((1, 60), 3.3)
    nearly[0, 4] = 1.1  # a third of the resamples miss it
    one = method("nearly", nearly, labels, deterministic=True)
    good = method("good", noisy(labels, 0.1, 1), labels, deterministic=True)
    assert (
        RowBootstrap([*one, *good], resamples=300).difference(good, one).verdict
        == "too few rows, or too few different answers: not called"
    )


def test_one_seed_is_not_called_unless_every_seed_gives_the_same():
    labels = labels_of(400)
    good, bad = method("good", noisy(labels, 0.3, 1), labels), method("bad", noisy(labels, 3.0, 1, seed=2), labels)
    assert RowBootstrap([*good, *bad], resamples=300).difference(good, bad).verdict == "one seed: not called"
    good = method("good", noisy(labels, 0.3, 3, spread=0.01), labels)
    bad = method("zero-shot", noisy(labels, 3.0, 1, seed=2), labels, deterministic=True)
    assert RowBootstrap([*good, *bad], resamples=300).difference(good, bad).verdict == "better"


def test_a_constant_prediction_has_no_correlation_and_is_not_called():
    labels = labels_of(50)
    constant = method("constant", np.full((2, 50), 2.5), labels)
    good = method("good", noisy(labels, 0.3, 2), labels)
    bootstrap = RowBootstrap([*constant, *good], resamples=200)
    assert bootstrap.difference(good, constant).verdict == "not defined"
    assert bootstrap.difference(good, constant, "nrmse").verdict == "better"
    assert np.isnan(bootstrap.samples["pearson"][:, :2]).all()
    assert np.isnan(bootstrap.samples["spearman"][:, :2]).all()


def test_a_resample_that_drew_one_value_only_has_no_correlation():
    """A decoder that nearly always answers the same: some resamples miss the one answer that differs."""
    labels = labels_of(30)
    nearly = np.full((1, 30), 3.3)
    nearly[0, 4] = 1.1
    found = resample_metrics(labels, nearly, 5.0, 300, np.random.default_rng(0))
    drawn = np.random.default_rng(0).integers(30, size=(300, 30))
    missed = ~(drawn == 4).any(1)
    assert 0 < missed.sum() < 300
    for metric in ("pearson", "spearman"):
        np.testing.assert_array_equal(np.isnan(found[metric][:, 0]), missed)


def test_runs_on_other_rows_are_refused():
    with pytest.raises(ResultError, match="not measured on the same rows"):
        RowBootstrap([result_of(), result_of(KEY, labels=[1.0, 0.0, 2.5, 4.0])])
