"""One training run: from a model and its settings to predictions, validation metrics and what they cost."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from ..base_model_relish import load_backbone
from ..configuration_relish import RelishConfig
from ..language_model_relish import last_logits
from ..lm_heads_relish import FinalLogitsHead
from ..metrics import make_compute_metrics
from ..objectives_relish import regression_loss
from ..trainer import RelishTrainer
from ..training_args import RelishTrainingArguments
from .results import METRICS, measure
from .tasks import CompareError, Task
from .workbench import Workbench, device

_SHORT = 200  # tokens: the plain attention keeps all weights for the backward pass
EVAL_BATCH = 32


@dataclass(frozen=True)
class Outcome:
    """What one run found, before it has a name; fields as in [`RunResult`]."""

    predictions: np.ndarray
    validation: Mapping[str, float]
    trainable_parameters: int = 0
    train_seconds: float = 0.0
    extraction_seconds: float | None = 0.0
    predict_seconds: float = 0.0
    curve: Sequence[tuple[float, float]] = ()
    notes: Sequence[str] = ()

    def with_extraction(self, bench: Workbench, layer: int | None) -> Outcome:
        """Add what the hidden states cost when they were made."""
        seconds = bench.extraction_seconds(layer)
        notes = ["its states lay in the cache before: extraction was not timed"] if seconds is None else []
        return replace(self, notes=[*self.notes, *notes]).with_seconds(seconds)

    def with_seconds(self, seconds: float | None) -> Outcome:
        """Add to the time of extraction; what was not timed makes it unknown."""
        known = self.extraction_seconds is not None and seconds is not None
        return replace(self, extraction_seconds=self.extraction_seconds + seconds if known else None)  # type: ignore[operator]


def fit(
    bench: Workbench,
    model: Any,
    settings: Mapping[str, Any],
    seed: int,
    *,
    peft_config: Any = None,
    **trainer_settings: Any,
) -> tuple[Any, Outcome]:
    """Train with RelishTrainer, keep the epoch with the best validation Pearson, and predict the test rows.

    Args:
        bench: Data set and backbone.
        model: A RELISH model or a causal language model, from the caller's seed.
        settings: `learning_rate`, `epochs`, `batch_size`; others are not read.
        seed: Of the order of rows and dropout.
        peft_config: Puts an adapter on the model.
        **trainer_settings: For [`RelishTrainer`] (`number_grid`, ...) and its arguments (`objective`, `freeze_backbone`, ...).

    Returns:
        What was trained, in the adapter's wrapper if there is one, and the outcome.
    """
    passed = {
        name: trainer_settings.pop(name) for name in ("number_grid", "prompt_template") if name in trainer_settings
    }
    if peft_config is not None:
        _attend_plainly(bench, getattr(model, "backbone", model))
    with tempfile.TemporaryDirectory() as folder:
        args = RelishTrainingArguments(
            output_dir=folder, eval_strategy="epoch", save_strategy="epoch", features_dir=bench.features_dir,
            max_length=bench.max_length, **_arguments(settings, seed), **trainer_settings,
        )  # fmt: skip
        splits = bench.task.splits
        trainer = RelishTrainer(
            model, args, train_dataset=splits["train"], eval_dataset=splits["validation"],
            processing_class=bench.tokenizer, compute_metrics=make_compute_metrics(bench.task.label_range),
            peft_config=peft_config, **passed,
        )  # fmt: skip
        outcome = _train(trainer, splits["test"])
    return trainer.model, outcome


def _attend_plainly(bench: Workbench, backbone: Any) -> None:
    """Leave torch's fused attention where it is slower: on short rows, its backward pass takes a CPU longer."""
    longest = max(len(row) for split in bench.task.splits for row in bench.ids[split])
    if device() == "cpu" and longest <= _SHORT and backbone.config._attn_implementation == "sdpa":
        backbone.set_attn_implementation("eager")


def _arguments(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        "num_train_epochs": settings["epochs"], "learning_rate": settings["learning_rate"], "seed": seed, "warmup_steps": 0.1,
        "per_device_train_batch_size": settings["batch_size"], "per_device_eval_batch_size": EVAL_BATCH,
        "save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "pearson", "greater_is_better": True,
        "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def _train(trainer: Trainer, test: Any) -> Outcome:
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    trainer.train()
    trained = time.monotonic()
    predictions = np.asarray(trainer.predict(test).predictions, dtype=np.float64).reshape(-1)
    model: Any = trainer.model
    evaluated = [entry for entry in trainer.state.log_history if "eval_pearson" in entry]
    best = max(evaluated, key=lambda entry: _low_if_nan(entry["eval_pearson"]))
    return Outcome(
        predictions=predictions,
        validation={metric: float(best[f"eval_{metric}"]) for metric in METRICS},
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        train_seconds=round(trained - started, 4),
        predict_seconds=round(time.monotonic() - trained, 4),
        curve=[(float(entry["step"]), float(entry["eval_pearson"])) for entry in evaluated],
    )


def _low_if_nan(value: float) -> float:
    return -math.inf if math.isnan(value) else value


# ---------------------------------------------------------------------- an MLP on the logits of a frozen model


class LogitsRegressor(nn.Module):
    """[`FinalLogitsHead`] behind a frozen output layer: from the last token's state to a number in label units.

    The logits of a text never change while the language model is frozen, and are too many to keep: they are made anew from
    the state, which is kept.

    Args:
        output: The language model's output layer.
        config: Of the model whose head this is.
        mean: Of the training labels.
        std: Of the training labels.
    """

    def __init__(self, output: nn.Module, config: RelishConfig, mean: float, std: float) -> None:
        super().__init__()
        self.frozen = (output.requires_grad_(False),)  # in a tuple, so that no checkpoint holds it
        self.score = FinalLogitsHead(config)
        self.mean, self.std, self.delta = mean, std, config.huber_delta

    def forward(self, states: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return `logits` (B, 1) in label units and, given labels (B, 1), the Huber `loss` on standardised values."""
        prediction, _ = self.score(self.logits(states))
        found = {"logits": prediction * self.std + self.mean}
        if labels is not None:
            found = {"loss": regression_loss(prediction, (labels - self.mean) / self.std, "huber", self.delta), **found}
        return found

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return (B, V) logits of (B, D) states, fp32."""
        output = self.frozen[0].to(states.device)
        return output(states.to(next(output.parameters()).dtype)).float()


def fit_on_logits(bench: Workbench, settings: Mapping[str, Any], seed: int) -> Outcome:
    """Train RAFT's MLP on the last token's logits of a frozen language model.

    Raises:
        CompareError: where the logits are more than the output layer of the last state (a soft cap, a scale).
    """
    language_model = load_backbone(bench.backbone, causal_lm=True, dtype=bench.model(1).backbone.dtype)
    labels = bench.task.labels("train")
    set_seed(seed)
    config = RelishConfig(
        backbone_config=bench.config, head_type="final_logits_mlp", head_hidden_size=settings["hidden_size"]
    )
    model = LogitsRegressor(
        language_model.get_output_embeddings(), config, float(labels.mean()), float(labels.std()) or 1.0
    )
    rows = {split: _state_rows(bench, split) for split in ("train", "validation", "test")}
    _check_logits(bench, language_model, model, rows["test"][0]["states"])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, eval_strategy="epoch", save_strategy="epoch", label_names=["labels"],
            dataloader_pin_memory=torch.cuda.is_available(), **_arguments(settings, seed),
        )  # fmt: skip
        trainer = Trainer(
            model, args, train_dataset=rows["train"], eval_dataset=rows["validation"],  # type: ignore[arg-type]
            compute_metrics=make_compute_metrics(bench.task.label_range),
        )  # fmt: skip
        return _train(trainer, rows["test"])


def _state_rows(bench: Workbench, split: str) -> list[dict[str, torch.Tensor]]:
    labels = torch.tensor(bench.task.labels(split), dtype=torch.float32)
    return [{"states": s, "labels": v} for s, v in zip(bench.last_states(split), labels[:, None], strict=True)]


@torch.no_grad()
def _check_logits(bench: Workbench, language_model: Any, model: LogitsRegressor, state: torch.Tensor) -> None:
    """Compare the output layer of a cached state with what the language model itself says."""
    ids = torch.tensor([bench.ids["test"][0]])
    said = last_logits(language_model, ids, torch.ones_like(ids))[0].float()
    made = model.logits(state)
    if (said - made).abs().max() > 0.05 * said.std().clamp(min=1e-6) + 0.05 * said.abs().max():
        raise CompareError(
            f"{bench.name}: the logits are not the output layer of the last state alone ({bench.config.model_type} changes "
            "them); leave final_logits_mlp out under the frozen regime."
        )


# ---------------------------------------------------------------------- what it took


class PeakMemory:
    """Context manager; `bytes` is the process' (or the GPU's) highest memory inside it, `None` where that cannot be told."""

    bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # Linux: the high-water mark begins anew
                Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        if device() == "cuda":
            self.bytes = torch.cuda.max_memory_allocated()
            return
        with suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            self.bytes = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def validated(task: Task, predictions: np.ndarray, rows: Sequence[int] | None = None) -> dict[str, float]:
    """Measure predictions on the validation rows, or on some of them."""
    labels = task.labels("validation")
    return measure(predictions, labels if rows is None else labels[list(rows)], task.label_range)
