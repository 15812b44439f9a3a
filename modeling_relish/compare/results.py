"""One run's result: what is kept of it, how it is written, and how a run that is done is found again.

A folder holds one JSON file per run. A run is known by its [`RunKey`]: what was compared, and the settings it ran with. The
file's name is made from it, so that a run is looked up without opening any other, and a changed setting is another run:

```python
key = RunKey("RELISH", "frozen", "stsb", "SmolLM2-135M-Instruct", seed=0, settings={"learning_rate": 3e-4})
result = load_result(folder, key)
if result is None:
    result = RunResult.from_predictions(key, test_predictions=..., test_labels=..., label_range=(0, 5), ...)
    save_result(folder, result)
```
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..metrics import ConstantInputWarning, regression_metrics

SCHEMA_VERSION = 1
METRICS = ("pearson", "spearman", "nrmse")
# frozen: the backbone is not trained (or nothing is); lora: adapters in it; full: all of it; none: there is no backbone.
REGIMES = ("frozen", "lora", "full", "none")
_PACKAGES = ("modeling-relish", "torch", "transformers", "peft", "scikit-learn", "numpy")
_TOLERANCE = 1e-4  # predictions are kept with seven digits


class ResultError(ValueError):
    """A result that cannot be: a file that is not one, or values that contradict each other."""


@dataclass(frozen=True)
class RunKey:
    """What a run is known by.

    Args:
        method: Name of the row in the tables, e.g. `"RELISH"`, `"RAFT"`, `"TF-IDF, ridge"`.
        regime: One of [`REGIMES`].
        dataset: Name of the data set.
        backbone: Name of the backbone, never a path; `""` under regime `"none"`.
        seed: Of weights and of the order of rows.
        settings: Every setting that could change the numbers, as JSON knows it (learning rate, epochs, layer, `train_rows`, ...).
    """

    method: str
    regime: str
    dataset: str
    backbone: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The result's file: readable, and with a digest of the whole key that tells settings apart."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        parts = (self.dataset, self.backbone, self.method, self.regime, f"seed{self.seed}", digest)
        return "--".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part) + ".json"


@dataclass(frozen=True)
class RunResult:
    """All that is kept of one run with one target. Construct it with [`from_predictions`], which measures the test rows.

    Args:
        method: As in [`RunKey`], and so the next five.
        regime: One of [`REGIMES`].
        dataset: Name of the data set.
        backbone: Name of the backbone.
        seed: Of the run.
        settings: Of the run.
        label_range: (minimum, maximum) of the label's scale, which NRMSE divides by.
        validation: `pearson`, `spearman`, `nrmse` on the validation rows, where the run was chosen.
        test: The same on the test rows; NaN (null in the file) where predictions are constant.
        test_predictions: (N,) in label units, in the test set's order.
        test_labels: (N,); equal in all runs on a data set, which lets runs be compared row by row.
        trainable_parameters: How many numbers training may change; 0 for what is not trained.
        train_seconds: Training alone.
        extraction_seconds: Running the frozen backbone over the texts, for what reads cached states; 0 otherwise. What came
            out of a shared cache counts with the time it took when it was made; `None` where nobody timed that.
        predict_seconds: Scoring the test rows.
        peak_memory_bytes: Of the process (or of the GPU), `None` where it was not measured.
        curve: (optimiser step, validation Pearson), as training went; empty for what is not trained.
        is_deterministic: Whether another seed would give the same numbers.
        versions: Package -> version.
        notes: What a reader must know, e.g. how many decoded answers were no number.
    """

    method: str
    regime: str
    dataset: str
    backbone: str
    seed: int
    settings: Mapping[str, Any]
    label_range: tuple[float, float]
    validation: Mapping[str, float]
    test: Mapping[str, float]
    test_predictions: Sequence[float]
    test_labels: Sequence[float]
    trainable_parameters: int = 0
    train_seconds: float = 0.0
    extraction_seconds: float | None = 0.0
    predict_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    curve: Sequence[tuple[float, float]] = ()
    is_deterministic: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def from_predictions(
        cls,
        key: RunKey,
        *,
        test_predictions: Iterable[float],
        test_labels: Iterable[float],
        label_range: tuple[float, float],
        validation: Mapping[str, float],
        **rest: Any,
    ) -> RunResult:
        """Measure the test rows and make the result; `rest` are this class's other fields, `versions` has a default.

        Raises:
            ResultError, MetricError: for values that cannot be.
        """
        predictions = [float(f"{float(p):.7g}") for p in test_predictions]
        labels = [float(v) for v in test_labels]
        return cls(
            **{f.name: getattr(key, f.name) for f in fields(key)},
            label_range=(float(label_range[0]), float(label_range[1])),
            validation={m: float(validation[m]) for m in METRICS},
            test=measure(predictions, labels, label_range),
            test_predictions=predictions,
            test_labels=labels,
            **{"versions": library_versions(), **rest},
        )

    def __post_init__(self) -> None:
        where = f"run {self.key.file_name}"
        if self.regime not in REGIMES:
            raise ResultError(f"{where}: regime must be one of {list(REGIMES)}, got {self.regime!r}.")
        for name, metrics in (("validation", self.validation), ("test", self.test)):
            if missing := [m for m in METRICS if m not in metrics]:
                raise ResultError(f"{where}: {name} needs {list(METRICS)}, {missing} are missing.")
        if any(not value >= 0 for value in (self.train_seconds, self.extraction_seconds or 0.0, self.predict_seconds)):
            raise ResultError(f"{where}: seconds must not be negative.")
        measured = measure(self.test_predictions, self.test_labels, self.label_range)
        for name in METRICS:
            if not _same(measured[name], self.test[name]):
                raise ResultError(
                    f"{where}: test {name} is {self.test[name]}, but its test_predictions and test_labels give "
                    f"{measured[name]:.6f}. The file was changed, or the metric was taken from other rows."
                )

    @property
    def key(self) -> RunKey:
        """What the run is known by."""
        return RunKey(**{f.name: getattr(self, f.name) for f in fields(RunKey)})

    @property
    def total_seconds(self) -> float | None:
        """Extraction, training and scoring together; `None` where a part is not known."""
        if self.extraction_seconds is None:
            return None
        return self.extraction_seconds + self.train_seconds + self.predict_seconds


def measure(predictions: Iterable[float], labels: Iterable[float], label_range: Sequence[float]) -> dict[str, float]:
    """Return `pearson`, `spearman` and `nrmse`; what a constant prediction leaves undefined is NaN, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        metrics = regression_metrics(list(predictions), list(labels), label_range=tuple(label_range))
    return {name: metrics[name] for name in METRICS}


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def save_result(folder: str | Path, result: RunResult) -> Path:
    """Write a result under its key's name, whole or not at all; return the file."""
    path = Path(folder) / result.key.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    values = _without_nan({"schema": SCHEMA_VERSION, **asdict(result)})
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in values.items())
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    temporary.replace(path)
    return path


def load_result(folder: str | Path, key: RunKey) -> RunResult | None:
    """Return the result of a run that is done, `None` where it is not: what a comparison resumes by."""
    path = Path(folder) / key.file_name
    return read_result(path) if path.exists() else None


def read_results(folder: str | Path) -> list[RunResult]:
    """Read all results of a folder, in the order of their names.

    Raises:
        ResultError: if there is none, or a file is not a result.
    """
    found = [read_result(path) for path in sorted(Path(folder).glob("*.json"))]
    if not found:
        raise ResultError(f"{folder} holds no result: one JSON file per run was expected.")
    return found


def read_result(path: str | Path) -> RunResult:
    """Read one result.

    Raises:
        ResultError: for a file that is not one, that another version wrote, or whose values contradict each other.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        schema = values.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ResultError(
            f"{path} is not the result of a run ({error!r}); remove it, and the run is made again."
        ) from error
    if schema != SCHEMA_VERSION:
        raise ResultError(f"{path} has schema {schema}, this version reads {SCHEMA_VERSION}.")
    for name in ("validation", "test"):
        values[name] = {m: math.nan if v is None else v for m, v in values.get(name, {}).items()}
    values["curve"] = [(step, math.nan if p is None else p) for step, p in values.get("curve", ())]
    try:
        return RunResult(**{**values, "label_range": tuple(values["label_range"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ResultError(f"{path}: {error}") from error


def _without_nan(value: Any) -> Any:
    """NaN is no JSON: null stands for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _without_nan(v) for k, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, (list, tuple)) else value


def _same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or abs(one - other) <= _TOLERANCE
