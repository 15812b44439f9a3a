"""From a data set and names of methods to results on disk and a report; a run that is done is never done again."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..cli_shared import DEFAULT_BACKBONE, compute_dtype, write_json
from ..metrics import MetricError
from .budget import Clock, budget_seconds, minutes
from .method import Options
from .methods import find_methods
from .plan import REGIMES, Chosen, Job, make_benches, make_jobs, read_settings, split_names
from .report import write_report
from .results import ResultError, RunKey, RunResult, load_result, read_results, save_result
from .summary import on_rows
from .tasks import CompareError, Task, load_task
from .training import Outcome, PeakMemory

DEFAULT_ENCODER = "embedded:all-MiniLM-L6-v2"
RESULTS, SEARCH, SETTINGS, LEFT_OUT = "results", "search", "settings.json", "left_out.json"


@dataclass
class Comparison:
    """What a comparison found.

    Args:
        folder: Its folder: `results/` with one JSON a run, `search/` with those the settings were chosen among, `settings.json`,
            `shared/` with layer searches and times, `report.md`, `report.csv`, `report.html`.
        runs: Results of the jobs that were asked for, those of earlier calls among them.
        left_out: Job -> why it was not run.
        settings: What was chosen, as [`compare`] takes it: backbone -> `method/regime` -> settings.
        report: `md`, `csv`, `html` -> file; empty where none was asked for.
    """

    folder: Path
    runs: list[RunResult] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    report: dict[str, Path] = field(default_factory=dict)


def compare(
    data: Any,
    output: str | Path,
    *,
    methods: str | Sequence[str] = "all",
    backbones: str | Sequence[str] = DEFAULT_BACKBONE,
    encoder: str = DEFAULT_ENCODER,
    regimes: str | Sequence[str] = REGIMES,
    seeds: int | Sequence[int] = 3,
    budget: str | float | None = None,
    settings: Chosen | str | Path | None = None,
    options: Options | None = None,
    features_dir: str | Path | None = None,
    max_length: int = 1024,
    layer_settings: Mapping[str, Any] | None = None,
    write_reports: bool = True,
    title: str | None = None,
    log: Callable[[str], None] = print,
    **task: Any,
) -> Comparison:
    """Run every method on one data set, one after the other, and report what they give and cost.

    Every run is written as soon as it ends. Called again with the same folder, it goes on where it was interrupted: a run with
    the same data, weights, seed and settings is read from its file. Where a method is trained, as many settings as for every
    other are tried with the first seed; the best by validation Pearson is held for the other seeds.

    Args:
        data: A [`Task`], or what [`load_task`] reads.
        output: Folder of the comparison.
        methods: `"all"`, or names of [`METHODS`].
        backbones: Hub ids, folders or `embedded:NAME`; their names must differ.
        encoder: Of the encoder baselines.
        regimes: Of `frozen`, `lora` and `full` (the encoders alone); what has no backbone is always run.
        seeds: How many, from 0, or which.
        budget: `"30m"`, `"2h"` or minutes: what does not fit is left out, and named. Estimated by the speed of this machine and
            corrected by runs that are done.
        settings: Chosen before: a mapping or the file `settings.json` of another comparison. Methods in it are not searched.
        options: [`Options`]: epochs, how many settings are tried, ranks, sizes.
        features_dir: Root of the feature cache; `None` = the user's.
        max_length: Longest prompt in tokens.
        layer_settings: For [`search_layer`]: `layers`, `sample_rows`, `validation_rows`, `epochs`.
        write_reports: Whether to write the report (it needs matplotlib).
        title: Of the report.
        log: Gets a line for every run.
        **task: For [`load_task`], where `data` is no [`Task`].

    Raises:
        CompareError: for an unknown method or regime, nothing to run, a folder in use, or where every run has failed.
        ResultError: for a result in the folder that was changed.
    """
    if isinstance(data, Task) and task:
        raise CompareError(f"a Task has its settings already, got {sorted(task)} too.")
    chosen_methods = find_methods(methods)
    chosen_regimes = split_names(regimes)
    if unknown := [regime for regime in chosen_regimes if regime not in REGIMES]:
        raise CompareError(f"there is no regime {unknown}; the known ones are {', '.join(REGIMES)}.")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise CompareError("seeds must name at least one.")
    held = read_settings(settings)
    clock = Clock(budget_seconds(budget), options or Options())
    folder = Path(output)
    with _only_one(folder):
        the_task = data if isinstance(data, Task) else load_task(data, **task)
        benches = make_benches(
            the_task, split_names(backbones), encoder, folder, features_dir, max_length, layer_settings
        )
        log(str(the_task))
        if unused := sorted(set(held) - {b.name for kind in benches.values() for b in kind} - {""}):
            log(f"settings for {', '.join(unused)} are not used: the backbones here have other names.")
        jobs, left_out = make_jobs(benches, chosen_methods, chosen_regimes, numbers)
        if not jobs:
            raise CompareError(f"there is nothing to run: {left_out}.")
        work = _Work(folder, clock, held, log, numbers[0])
        work.found.left_out.update(left_out)
        work.run(jobs)
        found = work.found
        write_json(folder / LEFT_OUT, found.left_out)
        if not found.runs:
            raise CompareError(f"no run has succeeded: {found.left_out}.")
        if write_reports:
            ran = {run.backbone for run in found.runs}
            notes = [*the_task.notes, *(note for b in benches["backbone"] if b.name in ran for note in b.notes)]
            notes += [f"left out: {name}: {reason}" for name, reason in found.left_out.items()]
            everything = read_results(folder / RESULTS)
            runs = on_rows(everything, the_task.name, the_task.labels("test").tolist(), the_task.label_range)
            if others := len(everything) - len(runs):
                notes.append(f"{others} earlier runs on other test rows or another label scale are not shown.")
            found.report = write_report(runs, folder, title=title or f"Comparison on {the_task.name}", notes=notes)
    return found


class _Work:
    """Jobs one after the other."""

    def __init__(self, folder: Path, clock: Clock, held: dict, log: Callable[[str], None], search_seed: int) -> None:
        self.folder, self.clock, self.log, self.search_seed = folder, clock, log, search_seed
        self.found = Comparison(folder, settings={})
        self.held = held
        self.jobs: Sequence[Job] = ()
        self.failed: dict[tuple[str, ...], str] = {}  # owner, choice, setting -> why it came to nothing

    def run(self, jobs: Sequence[Job]) -> None:
        """Run what is not done and fits."""
        self.jobs = jobs
        for job in jobs:  # what is done teaches how long the rest will take
            try:
                if done := self._done(job):
                    self.clock.learn(job, done)
            except ResultError:
                raise
            except Exception:  # told below, where the job's turn comes
                pass
        for number, job in enumerate(jobs, 1):
            place = f"[{number}/{len(jobs)}] {job.name}"
            try:
                results = self._done(job)
                if results is None:
                    if (reason := self._does_not_fit(job)) is not None:
                        self._leave_out(place, job, reason)
                        continue
                    started = time.monotonic()
                    results = self._do(job)
                    told = f"validation Pearson {results[-1].validation['pearson']:.3f}"
                    self.log(f"{place}: {told}, {time.monotonic() - started:.0f} s")
                    self.clock.learn(job, results)
                else:
                    self.log(f"{place}: done before")
                self.found.runs += results
            except Exception as error:  # one method's failure must not cost the others
                if os.environ.get("RELISH_DEBUG"):
                    raise
                self._leave_out(place, job, f"it failed: {type(error).__name__}: {error}")
            gc.collect()

    def _leave_out(self, place: str, job: Job, reason: str) -> None:
        self.found.left_out[job.name] = reason
        self.log(f"{place}: left out: {reason}")

    def _does_not_fit(self, job: Job) -> str | None:
        if not self.clock.is_limited:
            return None
        runs = 1
        if self._held(job) is None:  # the search comes first, whichever seed asks; with its own seed, it holds the run
            runs = sum(not self._searched(job, candidate) for candidate in self._grid(job))
            runs += job.seed != self.search_seed
        seconds = self.clock.estimate(job, runs)
        if seconds <= self.clock.left:
            return None
        return (
            f"it would take about {minutes(seconds)}, and {minutes(max(0.0, self.clock.left))} of the budget are left"
        )

    # ------------------------------------------------------------------ settings

    def _grid(self, job: Job) -> Sequence[Mapping[str, Any]]:
        return job.method.grid(job.regime)[: self.clock.options.candidates]

    def _held(self, job: Job) -> dict[str, Any] | None:
        """Return the settings that were chosen, before or given; those of a method without a choice too."""
        found = self.held.get(job.owner, {}).get(job.choice)
        if found is None:
            grid = self._grid(job)
            found = dict(grid[0]) if len(grid) == 1 else self.found.settings.get(job.owner, {}).get(job.choice)
        return found

    def _choose(self, job: Job) -> dict[str, Any]:
        held = self._held(job)
        if held is None:
            tried = {json.dumps(candidate): self._try(job, candidate) for candidate in self._grid(job)}
            reasons = [why for (*of, _), why in self.failed.items() if of == [job.owner, job.choice]]
            if len(reasons) == len(tried):
                raise CompareError(f"no setting came to a result: {'; '.join(reasons)}")
            best = max(tried, key=lambda candidate: -2.0 if tried[candidate] != tried[candidate] else tried[candidate])
            held = dict(json.loads(best))
        self.found.settings.setdefault(job.owner, {})[job.choice] = held
        kept = read_settings(self.folder / SETTINGS) if (self.folder / SETTINGS).exists() else {}
        for owner, choices in self.found.settings.items():
            kept.setdefault(owner, {}).update(choices)
        write_json(self.folder / SETTINGS, kept)
        return held

    def _try(self, job: Job, candidate: Mapping[str, Any]) -> float:
        """Return a candidate's validation Pearson; NaN where it diverged, which must not cost the others."""
        name = (job.owner, job.choice, json.dumps(candidate))
        if name in self.failed:
            return math.nan
        try:
            results = self._searched(job, candidate) or self._execute(job, candidate, SEARCH, self.search_seed)
        except ResultError:
            raise
        except Exception as error:  # one setting's failure must not cost the others
            if os.environ.get("RELISH_DEBUG") and not isinstance(error, MetricError):
                raise
            self.failed[name] = f"{dict(candidate)}: {type(error).__name__}: {error}"
            self.log(f"{job.name}, {self.failed[name]}")
            return math.nan
        return results[-1].validation["pearson"]

    def _all_settings(self, job: Job, candidate: Mapping[str, Any]) -> dict[str, Any]:
        own = {**job.method.settings(job.bench, job.regime, self.clock.options), **job.method.grid(job.regime)[0]}
        known = {*own, *job.method.more_settings}
        if unknown := sorted(set(candidate) - known):
            raise CompareError(f"{job.method.key} has no setting {unknown}; it has {sorted(known)}.")
        task = job.bench.task
        common: dict[str, Any] = {"data": task.digest, "train_rows": len(task.splits["train"])}
        if job.method.backbone_kind != "none":
            common |= {
                "prompt_template": job.bench.prompt, "max_length": job.bench.max_length, "weights": job.bench.fingerprint,
                "dtype": "float32" if job.regime == "full" else compute_dtype(),
            }  # fmt: skip
        return {**common, **own, **candidate}

    # ------------------------------------------------------------------ runs

    def _keys(self, job: Job, candidate: Mapping[str, Any], seed: int) -> list[RunKey]:
        settings = self._all_settings(job, candidate)
        of = (job.bench.task.name, job.label, seed, settings)
        return [RunKey(row, job.regime, *of) for row in job.method.rows(job.bench)]

    def _load(self, where: str, job: Job, candidate: Mapping[str, Any], seed: int) -> list[RunResult] | None:
        """Return results where all are there, on the label scale of today: NRMSE and number grids depend on it."""
        keys, scale = self._keys(job, candidate, seed), job.bench.task.label_range
        found = [load_result(self.folder / where, key) for key in keys]
        same = [result for result in found if result is not None and result.label_range == scale]
        return same if len(same) == len(keys) else None

    def _searched(self, job: Job, candidate: Mapping[str, Any]) -> list[RunResult] | None:
        """Return a candidate's results where they are there; a layer search that was not made is not made for this."""
        if job.method.needs_layer_search(job.bench):
            return None
        return self._load(SEARCH, job, candidate, self.search_seed)

    def _done(self, job: Job) -> list[RunResult] | None:
        """Return a job's results where they are there."""
        if job.method.needs_layer_search(job.bench):
            return None
        if self._held(job) is None and not all(self._searched(job, candidate) for candidate in self._grid(job)):
            return None
        return self._load(RESULTS, job, self._choose(job), job.seed)

    def _do(self, job: Job) -> list[RunResult]:
        chosen = self._choose(job)
        found = self._load(RESULTS, job, chosen, job.seed) or self._load(SEARCH, job, chosen, job.seed)
        if found is None:
            return self._execute(job, chosen, RESULTS, job.seed)
        for result in found:
            save_result(self.folder / RESULTS, result)
        return found

    def _execute(self, job: Job, candidate: Mapping[str, Any], where: str, seed: int) -> list[RunResult]:
        keys, task = self._keys(job, candidate, seed), job.bench.task
        if not (self.clock.is_limited or job.bench.upcoming):  # under a budget, nothing is done for what may not fit
            job.bench.upcoming = self._upcoming(job)
        with PeakMemory() as peak:
            outcomes = job.method.run(job.bench, job.regime, seed, keys[0].settings)
        results = [
            _result(key, outcome, task, peak.bytes, not job.method.has_seeds)
            for key, outcome in zip(keys, outcomes, strict=True)
        ]
        for result in results:
            save_result(self.folder / where, result)
        return results

    def _upcoming(self, job: Job) -> list[int | None]:
        """Return the layers that the job's bench will be asked for: they are searched before the pass that keeps them all."""
        found = job.method.layers(job.bench, job.regime)
        for method in {j.method for j in self.jobs if found and j.bench is job.bench and j.regime == job.regime}:
            with contextlib.suppress(Exception):  # what is wrong with it is told where its own turn comes
                found += method.layers(job.bench, job.regime)
        return found


def _result(key: RunKey, outcome: Outcome, task: Task, peak: int | None, is_deterministic: bool) -> RunResult:
    names = ("trainable_parameters", "train_seconds", "extraction_seconds", "predict_seconds", "curve", "notes")
    return RunResult.from_predictions(
        key, test_predictions=outcome.predictions, test_labels=task.labels("test"), label_range=task.label_range,
        validation=outcome.validation, peak_memory_bytes=peak, is_deterministic=is_deterministic,
        **{name: getattr(outcome, name) for name in names},
    )  # fmt: skip


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one comparison work in a folder at a time, and keep transformers' progress and advice off the screen."""
    folder.mkdir(parents=True, exist_ok=True)
    verbosity = logging.get_verbosity()
    with (folder / ".lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # not on Windows
        except OSError as error:
            raise CompareError(
                f"another comparison is at work in {folder}; wait for it, or choose another folder."
            ) from error
        logging.set_verbosity_error()
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
