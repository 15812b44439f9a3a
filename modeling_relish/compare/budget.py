"""How long will it take: a budget in minutes, estimates of runs, and what finished runs teach about them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .method import Method, Options
from .plan import Job
from .results import RunResult
from .tasks import CompareError
from .workbench import Workbench

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Of a layer search, in passes over its sample: reading it once, and short fits on eight layers.
_SEARCH_PASSES = 1.5
_SEARCH_ROWS, _SEARCH_FIT_SECONDS = 2250, 8 * 4 * 1500 * 3e-3


def budget_seconds(budget: str | float | None) -> float:
    """Read `"30m"`, `"2h"`, `"1h30m"`, `"90s"`, or a number of minutes; `None` is no limit.

    Raises:
        CompareError: for anything else.
    """
    if budget is None:
        return math.inf
    text = str(budget).strip().lower()
    if re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        return sum(float(number) * _UNITS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([hms])", text))
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return 60 * float(text)
    raise CompareError(f"a budget is a time such as 30m, 2h or 1h30m, got {budget!r}.")


def minutes(seconds: float) -> str:
    """Write a time as people say it."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass
class Clock:
    """What is left of the budget, and estimates that finished runs correct.

    Args:
        limit: Seconds.
        options: Of the comparison.
    """

    limit: float
    options: Options
    started: float = field(default_factory=time.monotonic)
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget at all."""
        return math.isfinite(self.limit)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.limit - (time.monotonic() - self.started)

    def estimate(self, job: Job, runs: int) -> float:
        """Estimate the seconds of a job's runs, with what has to be shared first: states and layer search."""
        bench, method = job.bench, job.method
        own = method.cost(bench, job.regime, self.options) * self.ratios.get(_kind(job), 1.0)
        return runs * own + self._shared(bench, method, job.regime)

    def _shared(self, bench: Workbench, method: Method, regime: str) -> float:
        if method.backbone_kind == "none":
            return 0.0
        searches = method.needs_layer_search(bench)
        seconds = 0.0
        if searches:
            rows = min(_SEARCH_ROWS, len(bench.task.splits["train"]) + len(bench.task.splits["validation"]))
            tokens = rows * bench.tokens("train") / len(bench.task.splits["train"])
            seconds += _SEARCH_PASSES * tokens / bench.tokens_per_second + _SEARCH_FIT_SECONDS * rows / _SEARCH_ROWS
        everything = sum(bench.tokens(split) for split in bench.task.splits)
        if searches:
            return seconds + (0.6 * everything / bench.tokens_per_second if regime == "frozen" else 0.0)
        total = bench.config.num_hidden_layers
        for layer in method.layers(bench, regime):
            if not bench.is_extracted(layer):
                seconds += everything * (layer or total) / total / bench.tokens_per_second
        return seconds

    def learn(self, job: Job, results: Sequence[RunResult]) -> None:
        """Correct the estimates of a method by a run that is done."""
        if not self.is_limited:
            return
        took = max(run.train_seconds for run in results) + sum(run.predict_seconds for run in results)
        self.ratios[_kind(job)] = max(0.05, took) / job.method.cost(job.bench, job.regime, self.options)


def _kind(job: Job) -> tuple[str, str]:
    return (job.owner, job.choice)
