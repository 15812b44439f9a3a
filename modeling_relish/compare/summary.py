"""Runs -> tables: one per data set and backbone, one row per method, and averages over the data sets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .results import METRICS, ResultError, RunResult
from .significance import RESAMPLES, Difference, RowBootstrap, check_same_rows


@dataclass(frozen=True)
class Row:
    """The runs of one method with one set of settings, one per seed.

    Args:
        name: The method; where a table has it with several settings, what tells them apart too.
        regime: As in [`RunResult`].
        runs: In the order of their seeds.
    """

    name: str
    regime: str
    runs: tuple[RunResult, ...]

    def mean(self, metric: str, part: str = "test") -> float:
        """Return the mean over seeds of a metric on `"test"` or `"validation"`."""
        return float(np.mean([getattr(run, part)[metric] for run in self.runs]))

    def spread(self, metric: str) -> float:
        """Return the standard deviation over seeds on the test rows; NaN for one seed."""
        values = [run.test[metric] for run in self.runs]
        return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

    def average(self, field: str) -> float:
        """Return the mean over seeds of one of the run's numbers; NaN where it was not measured."""
        values = [getattr(run, field) for run in self.runs]
        return math.nan if None in values else float(np.mean(values))


@dataclass(frozen=True)
class Table:
    """All rows on one data set over one backbone, the best test Pearson first; what has no backbone is in each."""

    dataset: str
    backbone: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Name of the table."""
        return f"{self.dataset}, {self.backbone}" if self.backbone else self.dataset

    def reference(self, name: str | None = None) -> Row:
        """Return what the others are compared with: the row named, else the one with the best validation Pearson.

        The test rows have no say in it, for the best of many on them is in part the luckiest.

        Raises:
            ResultError: if no row has that name.
        """
        rows = [row for row in self.rows if name in (None, row.name)]
        if not rows:
            raise ResultError(f"{self.title} has no row {name!r}; there are {[row.name for row in self.rows]}.")
        by_name = sorted(rows, key=lambda row: (row.name, row.regime))  # of equals, not the one that tests best
        return max(by_name, key=lambda row: _low_if_nan(row.mean("pearson", "validation")))


def make_tables(results: Iterable[RunResult]) -> list[Table]:
    """Sort runs into tables.

    Raises:
        ResultError: for two runs with one key, or runs on one data set that were measured on other test rows.
    """
    results = list(results)
    names = [run.key.file_name for run in results]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ResultError(f"there are several results of one run: {sorted(twice)}; keep one of each.")
    tables = []
    for dataset in sorted({run.dataset for run in results}):
        runs = [run for run in results if run.dataset == dataset]
        check_same_rows(runs)
        for backbone in sorted({run.backbone for run in runs if run.backbone}) or [""]:
            rows = _rows([run for run in runs if run.backbone in ("", backbone)])
            tables.append(Table(dataset, backbone, tuple(sorted(rows, key=lambda r: -_low_if_nan(r.mean("pearson"))))))
    return tables


def on_rows(
    runs: Iterable[RunResult], dataset: str, labels: Sequence[float], label_range: tuple[float, float]
) -> list[RunResult]:
    """Return the runs that can stand in one report with others on these test labels: those, and all of other data sets."""
    today = (list(labels), tuple(label_range))
    return [run for run in runs if run.dataset != dataset or (list(run.test_labels), tuple(run.label_range)) == today]


def _rows(runs: Sequence[RunResult]) -> list[Row]:
    rows = []
    for method, regime, backbone in dict.fromkeys((run.method, run.regime, run.backbone) for run in runs):
        own = [run for run in runs if (run.method, run.regime, run.backbone) == (method, regime, backbone)]
        variants: dict[str, list[RunResult]] = {}
        for run in sorted(own, key=lambda run: run.seed):
            variants.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
        settings = [dict(json.loads(variant)) for variant in variants]
        keys = sorted({key for one in settings for key in one})
        telling = [key for key in keys if len({json.dumps(one.get(key)) for one in settings}) > 1]
        for one, found in zip(settings, variants.values(), strict=True):
            what = ", ".join(f"{key}={one[key]}" for key in telling if key in one)
            rows.append(Row(f"{method} ({what})" if what else method, regime, tuple(found)))
    return rows


def differences(
    table: Table, reference: Row, metric: str = "pearson", *, resamples: int = RESAMPLES
) -> dict[int, Difference]:
    """Compare every other row of a table with one of them; row number -> difference.

    The level is 95 % for all comparisons of the table together (Bonferroni).
    """
    runs = [run for row in table.rows for run in row.runs]
    bootstrap = RowBootstrap(runs, metrics=[metric], resamples=resamples)
    others = [(number, row) for number, row in enumerate(table.rows) if row is not reference]
    level = 1 - 0.05 / max(1, len(others))
    return {number: bootstrap.difference(row.runs, reference.runs, metric, level=level) for number, row in others}


@dataclass(frozen=True)
class Average:
    """A method's metrics, averaged over data sets."""

    name: str
    regime: str
    metrics: dict[str, float]


def macro_averages(tables: Sequence[Table]) -> dict[str, list[Average]]:
    """Average over the data sets of each backbone, for rows that are on all of them; backbone -> rows, best Pearson first.

    Backbones with one data set are left out.
    """
    found = {}
    for backbone in dict.fromkeys(table.backbone for table in tables):
        own = [{(row.name, row.regime): row for row in table.rows} for table in tables if table.backbone == backbone]
        if len(own) < 2:
            continue
        averages = [
            Average(*key, {m: float(np.mean([rows[key].mean(m) for rows in own])) for m in METRICS})
            for key in own[0]
            if all(key in rows for rows in own)
        ]
        found[backbone] = sorted(averages, key=lambda a: -_low_if_nan(a.metrics["pearson"]))
    return found


def gap_to_the_best_other(averages: Sequence[Average], one: Average) -> dict[str, float]:
    """Return, for every metric, how far one row is from the best of the others, relative to that: 0.067 = 6.7 % more.

    NaN where there is no other row with that metric, or none above zero to be relative to.
    """
    gaps = {}
    for metric in METRICS:
        others = [a.metrics[metric] for a in averages if a is not one and not math.isnan(a.metrics[metric])]
        best = (min if metric == "nrmse" else max)(others, default=math.nan)
        gaps[metric] = one.metrics[metric] / best - 1 if best > 0 else math.nan
    return gaps


def _low_if_nan(value: float) -> float:
    return -math.inf if math.isnan(value) else value
