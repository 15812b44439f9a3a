"""From predictions and labels to a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class LabelError(ValueError):
    """Labels that cannot be trained on; the message says what came and what was expected."""


def check_labels(labels: torch.Tensor, batch_size: int, num_labels: int) -> torch.Tensor:
    """Return labels as (B, K) fp32.

    Args:
        labels: (B,), (B, 1) or (B, K); any integer or float dtype.
        batch_size: B.
        num_labels: K.

    Raises:
        LabelError: for a wrong shape (with both numbers) or a value that is not finite (with its row and target).
    """
    shape = tuple(labels.shape)
    expected = (batch_size, num_labels)
    if shape != expected and not (num_labels == 1 and shape == (batch_size,)):
        got = labels.shape[1] if labels.dim() == 2 else 1
        raise LabelError(
            f"labels have shape {shape}, that is {got} target(s) a row; the model has num_labels={num_labels} and the batch "
            f"{batch_size} row(s), so {expected} was expected."
        )
    if labels.dtype == torch.bool:
        raise LabelError("labels are true/false; regression needs numbers.")
    labels = labels.to(torch.float32).view(expected)
    if not torch.compiler.is_compiling():
        bad = ~torch.isfinite(labels)
        if bool(bad.any()):
            row, target = (int(i) for i in bad.nonzero()[0])
            raise LabelError(
                f"label of row {row} of the batch, target {target}, is {float(labels[row, target])}: not a number."
            )
    return labels


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean of `-log sigmoid(chosen - rejected - margin)` over the pairs, in fp32 (Bradley and Terry, 1952).

    Args:
        chosen: (B,) rewards of the preferred texts.
        rejected: (B,) rewards of the others.
        margin: (B,) by how much the first should lie above the second, in units of the reward (Llama 2, section 3.2.2).

    Returns:
        A scalar.
    """
    difference = chosen.float() - rejected.float()
    return -F.logsigmoid(difference if margin is None else difference - margin.float()).mean()


def regression_loss(
    predictions: torch.Tensor,
    targets: torch.Tensor,
    objective: str,
    huber_delta: float = 1.0,
    sample_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean loss on standardised values, in fp32.

    The mean runs over rows and targets, and weights multiply without being divided out again: a weight of 1 is an ordinary
    row, and the loss of a batch is the mean of the losses of its parts, as gradient accumulation and several processes need.

    Args:
        predictions: (B, K) standardised predictions.
        targets: (B, K) standardised labels.
        objective: `"huber"` (RELISH, section 4) or `"mse"`.
        huber_delta: Where Huber turns linear, in standard deviations.
        sample_weight: (B,) or (B, 1) weights, >= 0.

    Returns:
        A scalar.
    """
    predictions, targets = predictions.float(), targets.float()
    if objective == "huber":
        loss = F.huber_loss(predictions, targets, reduction="none", delta=huber_delta)
    elif objective == "mse":
        loss = F.mse_loss(predictions, targets, reduction="none")
    else:
        raise ValueError(f"objective must be one of ['huber', 'mse'], got {objective!r}.")
    return weighted_mean(loss, sample_weight)


def grid_loss(
    log_probs: torch.Tensor,
    values: torch.Tensor,
    targets: torch.Tensor,
    objective: str,
    *,
    scale: float = 1.0,
    huber_delta: float = 1.0,
    normalize: bool = False,
    sample_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss of a distribution over a number grid, in fp32.

    With p the probabilities and y the label, in units of `scale` (the labels' deviation, so that losses of different scales
    compare; 1 is the paper's):

    - raft (and mse): (y - sum_g p_g g)^2, the squared error of the expected number (RAFT, section 4)
    - huber: the same error under Huber
    - mbr: sum_g p_g (y - g)^2, the expected squared error (RAFT, ablation); it needs `normalize`, for p = 0 is its least
    - cross_entropy: -log p of the grid's number nearest to y, the lower of two as near (standard fine-tuning)

    Args:
        log_probs: (B, G).
        values: (G,) in label units.
        targets: (B, 1) labels in label units.
        objective: one of those above.
        scale: Divides errors.
        huber_delta: Where Huber turns linear, in units of `scale`.
        normalize: Make the probabilities sum to one first.
        sample_weight: (B,) or (B, 1) weights, >= 0.

    Returns:
        A scalar.
    """
    targets = targets.float()
    if objective == "cross_entropy":
        nearest = nearest_number(values, targets)
        loss = -(log_probs.log_softmax(1) if normalize else log_probs).gather(1, nearest)
    elif objective == "mbr" and normalize:
        probs = grid_probs(log_probs, normalize)
        loss = (probs * ((targets - values) / scale) ** 2).sum(1, keepdim=True)
    elif objective in ("raft", "mse", "huber"):
        expected = grid_probs(log_probs, normalize) @ values[:, None]
        kind = "huber" if objective == "huber" else "mse"
        return regression_loss(expected / scale, targets / scale, kind, huber_delta, sample_weight)
    else:
        raise ValueError(
            "objective must be one of ['raft', 'huber', 'mse', 'mbr' (normalized), 'cross_entropy'], got "
            f"{objective!r}, normalize={normalize}."
        )
    return weighted_mean(loss, sample_weight)


def nearest_number(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return (B, 1) places in (G,) `values` of the number nearest to each of (B, 1) targets, the lower of two as near."""
    # As near as fp32 can tell: 0.25 lies as far from 0.2 as from 0.3, and their fp32 values do not. The first in order wins.
    ascending = torch.argsort(values.detach())
    in_order = values.detach().double()[ascending]
    targets = targets.double().clamp(
        in_order[0], in_order[-1]
    )  # beyond an end, that is the nearest; and rounding is small
    distances = (targets - in_order).abs()
    rounding = torch.finfo(torch.float32).eps / 2 * (targets.abs() + in_order.abs())
    as_near = distances - rounding <= (distances + rounding).amin(1, keepdim=True)
    return ascending[as_near.int().argmax(1, keepdim=True)]


def grid_probs(log_probs: torch.Tensor, normalize: bool = False) -> torch.Tensor:
    """Return (B, G) probabilities: those under the whole vocabulary, or made to sum to one."""
    return log_probs.softmax(1) if normalize else log_probs.exp()


def weighted_mean(loss: torch.Tensor, sample_weight: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of (B, K) losses, each row's multiplied by its weight, which is checked, as in [`regression_loss`]."""
    if sample_weight is not None:
        weights = sample_weight.float().view(-1, 1)
        if not torch.compiler.is_compiling() and bool((bad := ~(torch.isfinite(weights) & (weights >= 0))).any()):
            row = int(bad.flatten().int().argmax())
            raise LabelError(
                f"sample_weight of row {row} of the batch is {float(weights[row])}: it must be a number >= 0."
            )
        loss = loss * weights
    return loss.mean()
