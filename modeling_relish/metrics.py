"""Predictions and labels in the label's own unit -> Pearson, Spearman, NRMSE, RMSE, MAE. Nothing here needs a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import evaluate
import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from transformers import EvalPrediction

METRIC_NAMES = ("pearson", "spearman", "nrmse", "rmse", "mae")

# (minimum, maximum) of the scale for every target, or a list with one such pair per target.
LabelRange = Sequence[float] | Sequence[Sequence[float]]


class MetricError(ValueError):
    """Predictions, labels or a label range that no metric can be computed from; the message says what was expected."""


class ConstantInputWarning(UserWarning):
    """Pearson and Spearman are not defined and are returned as NaN; the message names the side that is constant."""


def regression_metrics(predictions: Any, labels: Any, *, label_range: LabelRange | None = None) -> dict[str, float]:
    """Compare predictions with labels.

    Args:
        predictions: (N,), (N, 1) or (N, K) numbers in label units: array, tensor or nested list.
        labels: The same shape; (N,) and (N, 1) are the same thing.
        label_range: (minimum, maximum) of the scale, for the normalised error; a list of K such pairs where the targets
            differ. `None` takes the range of the given labels, so that the value depends on the sample.

    Returns:
        `pearson`, `spearman`, `nrmse` (RMSE divided by the width of the scale), `rmse` and `mae`, computed in float64. For
        K > 1 these are means over the targets, and `pearson_0`, `spearman_0`, ..., `mae_{K-1}` follow.

        Constant predictions or labels, or a single row: `pearson` and `spearman` are NaN, with one
        [`ConstantInputWarning`]. `nrmse` is NaN where `label_range` is `None` and the labels have no width.

    Raises:
        MetricError: for shapes that do not fit, no row at all, values that are not finite numbers, or a label range that is
            not minimum < maximum.
    """
    predicted, wanted = _matrix(predictions, "predictions"), _matrix(labels, "labels")
    if predicted.shape != wanted.shape:
        _refuse_shapes(predicted.shape, wanted.shape)
    rows, targets = predicted.shape
    if rows == 0:
        raise MetricError("metrics need at least one row, got none: predictions and labels are empty.")
    _check_finite(predicted, "predictions")
    _check_finite(wanted, "labels")
    widths = _widths(label_range, wanted)

    undefined = _undefined(predicted, wanted)
    if undefined:
        warnings.warn(f"Pearson and Spearman are NaN: {undefined}.", ConstantInputWarning, stacklevel=2)
    each = [_one_target(predicted[:, k], wanted[:, k], widths[k]) for k in range(targets)]
    if targets == 1:
        return each[0]
    means = {name: float(np.mean([values[name] for values in each])) for name in METRIC_NAMES}
    return means | {f"{name}_{k}": values[name] for k, values in enumerate(each) for name in METRIC_NAMES}


def make_compute_metrics(label_range: LabelRange | None = None) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a `compute_metrics` for `transformers.Trainer`.

    Args:
        label_range: As for [`regression_metrics`].

    Returns:
        A function from an `EvalPrediction`, whose predictions are (N, K) or a tuple that begins with that array, to the
        metrics.
    """

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        # A model that also returns hidden states or attentions hands them over behind the logits.
        logits = logits[0] if isinstance(logits, tuple) else logits
        return regression_metrics(logits, prediction.label_ids, label_range=label_range)

    return compute_metrics


class RegressionMetrics(evaluate.Metric):
    """The same metrics as an `evaluate` module, for one target.

    `evaluate.load` would fetch a script from the Hub; an object of this class is made directly and needs no network:

    ```python
    metric = RegressionMetrics()
    metric.add_batch(predictions=[1.0, 2.5], references=[1.0, 3.0])
    metric.compute(label_range=(0, 5))
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Pearson, Spearman, NRMSE, RMSE and MAE of predictions in label units.",
            citation="",
            inputs_description=(
                "\n        predictions: Numbers, one per row.\n        references: The labels, one per row."
                "\n        label_range: (minimum, maximum) of the scale; default: that of the references.\n"
            ),
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(
        self, predictions: Sequence[float], references: Sequence[float], label_range: LabelRange | None = None
    ) -> dict[str, float]:
        return regression_metrics(predictions, references, label_range=label_range)


# ---------------------------------------------------------------------- checks


def _matrix(values: Any, name: str) -> np.ndarray:
    """Bring numbers into the form (N, K) float64."""
    if hasattr(values, "detach"):  # a torch tensor: numpy has no bfloat16, and reads no tensor that lies on a GPU
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MetricError(f"{name} must be an array of numbers of shape (N,) or (N, K): {error}") from error
    if array.ndim not in (1, 2):
        raise MetricError(f"{name} must have shape (N,) or (N, K), got {array.shape}.")
    return array[:, None] if array.ndim == 1 else array


def _refuse_shapes(predicted: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    got = f"got {predicted} predictions and {wanted} labels (rows, targets)"
    if predicted[0] != wanted[0]:
        raise MetricError(
            f"expected one prediction per label, {got}: row {min(predicted[0], wanted[0])} has no partner."
        )
    raise MetricError(f"expected as many predicted targets as labels per row, {got}.")


def _check_finite(array: np.ndarray, name: str) -> None:
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        row, target = (int(i) for i in bad[0])
        count = len(np.unique(bad[:, 0]))
        raise MetricError(
            f"{name} must be finite, got {array[row, target]} in row {row}, target {target} ({count} of {len(array)} rows)."
        )


def _widths(label_range: LabelRange | None, labels: np.ndarray) -> np.ndarray:
    """Return the width of every target's scale, (K,)."""
    targets = labels.shape[1]
    if label_range is None:
        return np.ptp(labels, axis=0)
    expected = f"label_range must be (minimum, maximum) or {targets} such pair(s), got {label_range!r}"
    try:
        pairs = np.asarray(label_range, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MetricError(f"{expected}.") from error
    if pairs.shape == (2,):
        pairs = np.tile(pairs, (targets, 1))
    if pairs.shape != (targets, 2):
        raise MetricError(f"{expected}.")
    if not (np.isfinite(pairs).all() and (pairs[:, 0] < pairs[:, 1]).all()):
        raise MetricError(f"{expected}: every minimum must be finite and below its maximum.")
    return pairs[:, 1] - pairs[:, 0]


def _is_constant(values: np.ndarray) -> bool:
    # A spread that float64 arithmetic alone can make says nothing, as scipy holds too.
    return bool(np.ptp(values) <= 1e-13 * np.abs(values).max())


def _undefined(predicted: np.ndarray, wanted: np.ndarray) -> str:
    """Say why a correlation is not defined for some target; an empty string where all are."""
    rows, targets = predicted.shape
    if rows < 2:
        return "there is only one row, and correlations need two"
    reasons = []
    for name, array in (("predictions", predicted), ("labels", wanted)):
        constant = [k for k in range(targets) if _is_constant(array[:, k])]
        if constant:
            where = f" of target(s) {constant}" if targets > 1 else f" (all {array[0, 0]:g})"
            reasons.append(f"the {name}{where} are constant")
    return " and ".join(reasons)


def _one_target(predicted: np.ndarray, wanted: np.ndarray, width: float) -> dict[str, float]:
    """Return the five metrics of one target, (N,) each."""
    pearson = spearman = float("nan")
    if len(wanted) > 1 and not _is_constant(predicted) and not _is_constant(wanted):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy's notes on nearly constant input
            pearson = float(stats.pearsonr(predicted, wanted).statistic)
            spearman = float(stats.spearmanr(predicted, wanted).statistic)
    error = predicted - wanted
    # A decoded number may be 1e200, whose square is infinite. By a power of two, which rounds nothing.
    size = 2.0 ** min(1023, max(0, int(np.frexp(np.abs(error).max())[1])))
    rmse = float(np.sqrt(np.mean((error / size) ** 2)) * size)
    return {
        "pearson": pearson,
        "spearman": spearman,
        "nrmse": rmse / float(width) if width > 0 else float("nan"),
        "rmse": rmse,
        "mae": float(np.mean(np.abs(error))),
    }
