"""Is it a difference? Paired bootstrap over the test rows and the spread over seeds, in one interval.

Two things could have come out otherwise: which texts the test set happens to hold, and how a run happened to start. For the
first, test rows are drawn anew with replacement, the same rows for all methods, and the difference of two methods' means over
seeds is taken on each draw. For the second, every draw is moved by what other seeds could have given: Welch's t distribution
with the seeds' own variance. A difference is called one where the interval of both together does not hold zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .results import METRICS, ResultError, RunResult

RESAMPLES = 4000
LEVEL = 0.95
MIN_ROWS = 30  # the bootstrap's interval of fewer rows is too narrow: of two equals, one would often be called better
_UNDEFINED = 0.01  # share of resamples without a correlation, above which the others do not stand for all
_CHUNK = 2**22  # numbers of one block of resamples: rows times resamples


@dataclass(frozen=True)
class Difference:
    """How one method's runs differ from another's, on one metric.

    Args:
        metric: One of `pearson`, `spearman`, `nrmse`.
        value: Mean over the seeds of the first minus that of the second; NaN where the metric is not defined for one of them.
        rows: (low, high), what other test rows could have given: the paired bootstrap's interval; infinite for fewer than
            30 rows, or where too many resamples have no correlation.
        interval: (low, high), what other test rows and other seeds could have given; infinite where something that
            depends on the seed has one.
        level: Of both intervals.
    """

    metric: str
    value: float
    rows: tuple[float, float]
    interval: tuple[float, float]
    level: float

    @property
    def is_one(self) -> bool:
        """Whether it is a difference: the interval does not hold zero."""
        return _excludes_zero(self.interval)

    @property
    def verdict(self) -> str:
        """`"better"` or `"worse"` for the first; else `"not shown"`, or why nothing can be said."""
        if math.isnan(self.value):
            return "not defined"
        if self.is_one:
            return "better" if (self.value > 0) != (self.metric == "nrmse") else "worse"
        if math.isinf(self.rows[0]):
            return "too few rows, or too few different answers: not called"
        if _excludes_zero(self.rows) and math.isinf(self.interval[0]):
            return "one seed: not called"
        return "not shown"


class RowBootstrap:
    """One set of resampled test rows for all methods on a data set, and every run's metrics on each resample.

    Args:
        runs: On the same test rows.
        metrics: Which to measure; Spearman takes most of the time.
        resamples: How often the rows are drawn.
        seed: Of the draws.

    Raises:
        ResultError: where the runs' test labels are not the same.
    """

    def __init__(
        self,
        runs: Sequence[RunResult],
        *,
        metrics: Sequence[str] = METRICS,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> None:
        check_same_rows(runs)
        self._place = {id(run): i for i, run in enumerate(runs)}
        low, high = runs[0].label_range
        labels = np.asarray(runs[0].test_labels, dtype=np.float64)
        predictions = np.asarray([run.test_predictions for run in runs], dtype=np.float64)
        generator = np.random.default_rng(seed)
        self.samples = resample_metrics(labels, predictions, high - low, resamples, generator, metrics)
        self._quantiles = (generator.permutation(resamples) + 0.5) / resamples  # of the seeds' part, for every draw

    def difference(
        self, first: Sequence[RunResult], second: Sequence[RunResult], metric: str = "pearson", *, level: float = LEVEL
    ) -> Difference:
        """Compare two methods by their runs, one per seed, all of which were given at the start.

        Args:
            first: Runs of one method.
            second: Runs of another.
            metric: One of `pearson`, `spearman`, `nrmse`.
            level: Of the intervals; for m comparisons side by side, `1 - 0.05 / m` keeps the chance of any false call at 5 %.
        """
        values = [np.array([run.test[metric] for run in runs]) for runs in (first, second)]
        value = float(values[0].mean() - values[1].mean())
        if math.isnan(value):
            nothing = (math.nan, math.nan)
            return Difference(metric, value, nothing, nothing, level)
        samples = self.samples[metric]
        means = [samples[:, [self._place[id(run)] for run in runs]].mean(1) for runs in (first, second)]
        # A resample in which all predictions or labels are equal has no correlation; such are left out.
        rows = means[0] - means[1]
        fixed = [all(run.is_deterministic for run in runs) for runs in (first, second)]
        deviation, freedom = _over_seeds(values, fixed)
        both = (-math.inf, math.inf)
        if len(first[0].test_labels) < MIN_ROWS or np.isnan(rows).mean() > _UNDEFINED:
            return Difference(metric, value, both, both, level)
        if math.isfinite(deviation):
            both = _interval(rows + (deviation * stats.t.ppf(self._quantiles, freedom) if deviation else 0.0), level)
        return Difference(metric, value, _interval(rows, level), both, level)


def check_same_rows(runs: Sequence[RunResult]) -> None:
    """Refuse runs that were not measured on the same test rows in the same order."""
    for run in runs[1:]:
        if list(run.test_labels) != list(runs[0].test_labels) or run.label_range != runs[0].label_range:
            raise ResultError(
                f"{run.key.file_name} and {runs[0].key.file_name} have other test labels or another label_range: they were "
                "not measured on the same rows, and cannot be compared."
            )


def resample_metrics(
    labels: np.ndarray,
    predictions: np.ndarray,
    width: float,
    resamples: int,
    generator: np.random.Generator,
    metrics: Sequence[str] = METRICS,
) -> dict[str, np.ndarray]:
    """Draw rows with replacement and measure every run on them.

    A resample is how often each row was drawn, w (N,): every metric is then one of weighted sums, and is exactly that of the
    drawn rows. For Spearman, a value's mean rank among the drawn is what was drawn below it, plus (its own count + 1) / 2.

    Args:
        labels: (N,).
        predictions: (runs, N).
        width: Of the label's scale.
        resamples: R.
        generator: Of the draws.
        metrics: Which.

    Returns:
        Metric -> (R, runs); NaN where a resample's correlation is not defined.
    """
    N, runs = len(labels), len(predictions)
    found = {metric: np.empty((resamples, runs)) for metric in metrics}
    # Centred and scaled, so that the differences of large sums lose nothing; no correlation sees it.
    x, y = _standard(predictions), _standard(labels[None])[0]
    squared = ((predictions - labels) ** 2).T
    step = max(1, _CHUNK // N)
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        drawn = generator.integers(N, size=(count, N)) + N * np.arange(count)[:, None]
        w = np.bincount(drawn.ravel(), minlength=count * N).reshape(count, N).astype(np.float64)
        block = slice(start, start + count)
        if "nrmse" in found:
            found["nrmse"][block] = np.sqrt(w @ squared / N) / width
        if "pearson" in found:
            mean_x, mean_y = w @ x.T / N, (w @ y / N)[:, None]
            found["pearson"][block] = _correlation(
                w @ (x * y).T / N - mean_x * mean_y,
                w @ (x * x).T / N - mean_x**2,
                (w @ (y * y) / N)[:, None] - mean_y**2,
            )
        if "spearman" in found:
            found["spearman"][block] = _spearman(labels, predictions, w)
    return found


def _standard(values: np.ndarray) -> np.ndarray:
    spread = values.std(1, keepdims=True)
    return (values - values.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1)


def _correlation(covariance: np.ndarray, variance: np.ndarray, other_variance: np.ndarray) -> np.ndarray:
    """Return covariance / sqrt(variance * other), NaN where all that was drawn is equal but for rounding."""
    defined = (variance > 1e-12) & (other_variance > 1e-12)
    return np.where(defined, covariance / np.sqrt(np.where(defined, variance * other_variance, 1.0)), np.nan)


def _spearman(labels: np.ndarray, predictions: np.ndarray, w: np.ndarray) -> np.ndarray:
    ranks = _ranks(labels, w)
    weighted = w * ranks
    variance = (weighted * ranks).sum(1)
    columns = []
    for values in predictions:
        own = _ranks(values, w)
        columns.append(_correlation((weighted * own).sum(1), (w * own * own).sum(1), variance))
    return np.stack(columns, axis=1)


def _ranks(values: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return (R, N) mean ranks of the values among those drawn, less their mean (N + 1) / 2."""
    unique, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(unique)))
    counts = np.add.reduceat(w[:, order], starts, axis=1)
    middle = np.cumsum(counts, axis=1) - (counts - 1) / 2
    return middle[:, group] - (len(values) + 1) / 2


def _over_seeds(values: Sequence[np.ndarray], deterministic: Sequence[bool]) -> tuple[float, float]:
    """Return the standard error over seeds of a difference of two means, and Welch's degrees of freedom.

    What every seed gives alike has no spread; one seed of anything else has one that nobody knows: infinity.
    """
    parts = []
    for found, fixed in zip(values, deterministic, strict=True):
        if len(found) == 1 and not fixed:
            return math.inf, math.nan
        parts.append(0.0 if len(found) == 1 else float(found.var(ddof=1)) / len(found))
    variance = sum(parts)
    if variance == 0:
        return 0.0, math.nan
    freedom = variance**2 / sum(
        part**2 / (len(found) - 1) for part, found in zip(parts, values, strict=True) if part > 0
    )
    return math.sqrt(variance), freedom


def _interval(samples: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.nanquantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _excludes_zero(interval: tuple[float, float]) -> bool:
    return interval[0] > 0 or interval[1] < 0
