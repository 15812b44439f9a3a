"""RelishTrainingArguments: what training a RELISH model adds to `transformers.TrainingArguments`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

ERROR_METRIC = re.compile(r"(^|_)(nrmse|rmse|mae)(_\d+)?$")


@dataclass
class RelishTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of a small head on a frozen backbone, and RELISH's own settings."""

    learning_rate: float = field(
        default=3e-4, metadata={"help": "Peak learning rate; a head takes more than a backbone."}
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows per device and step."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows per device in evaluation."})
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin batches for a GPU; on where there is one."}
    )
    objective: str | None = field(
        default=None,
        metadata={
            "help": "huber or mse; raft, mbr or cross_entropy over a number grid; None keeps the model config's."
        },
    )
    huber_delta: float | None = field(default=None, metadata={"help": "Where Huber turns linear, in label deviations."})
    freeze_backbone: bool = field(default=True, metadata={"help": "Train the head alone; False trains everything."})
    label_columns: list[str] | None = field(
        default=None, metadata={"help": "Columns that hold the targets; None takes labels, label or score."}
    )
    weight_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with a weight >= 0 per row, scaled to mean 1 over the training rows; None takes sample_weight."
        },
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Name of the training data for the model card: a Hub id, or any name."}
    )
    standardize_labels: bool = field(
        default=True,
        metadata={"help": "Measure the training labels' mean and deviation, and undo them in predictions."},
    )
    max_length: int = field(
        default=1024,
        metadata={"help": "Longest prompt in tokens for a plain language model; a RELISH model's config has its own."},
    )
    normalize_grid: bool | None = field(
        default=None,
        metadata={
            "help": "For a plain language model: make the grid's probabilities sum to one; None = for mbr alone."
        },
    )
    grid_diagnostics: bool = field(
        default=False, metadata={"help": "Report the mass on the number grid and the entropy over it at evaluation."}
    )
    cache_features: bool | None = field(
        default=None, metadata={"help": "Run a frozen backbone once per text and keep its states; None = when frozen."}
    )
    features_dir: str | None = field(
        default=None, metadata={"help": "Folder of the feature cache; None = the user's cache."}
    )
    features_dtype: str = field(default="bfloat16", metadata={"help": "bfloat16, float16 or float32 on disk."})

    def __post_init__(self) -> None:
        if isinstance(self.label_columns, str):
            self.label_columns = [self.label_columns]
        # Trainer takes every name that does not end in "loss" for one of which more is better.
        if self.greater_is_better is None and ERROR_METRIC.search(self.metric_for_best_model or ""):
            self.greater_is_better = False
        super().__post_init__()
