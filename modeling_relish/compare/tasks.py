"""What is compared on: a data set with train, validation and test rows, one label with its scale, and a prompt."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..cli_shared import default_template
from ..data import Columns, guess_text_columns, label_matrix, load_splits, shared_texts
from ..number_grid_relish import decimal_step, decimals_of
from ..tables import Source
from ..text_relish import PromptTemplate

SPLITS = ("train", "validation", "test")
MIN_HELD_OUT = 3  # rows below which a correlation is 1, -1 or nothing


class CompareError(ValueError):
    """A comparison that cannot be made as it was asked for; the message says what came and what is known."""


@dataclass(frozen=True)
class Task:
    """One data set, ready for every method.

    Args:
        name: In tables and file names.
        splits: `train`, `validation` and `test` with the template's text columns and `labels` (1,), in label units.
        template: The prompt; methods that let a language model say the number need one that ends in words.
        label_range: (minimum, maximum) of the label's scale: what NRMSE divides by, and the span of number grids.
    """

    name: str
    splits: datasets.DatasetDict
    template: str
    label_range: tuple[float, float]

    def __post_init__(self) -> None:
        if missing := [split for split in SPLITS if split not in self.splits]:
            raise CompareError(f"data set {self.name!r}: {missing} is missing; a comparison needs {list(SPLITS)}.")
        for split in SPLITS:
            if missing := [name for name in self.fields if name not in self.splits[split].column_names]:
                raise CompareError(
                    f"data set {self.name!r}: the prompt {self.template!r} asks for {missing}, and {split} has the columns "
                    f"{self.splits[split].column_names}."
                )
        low, high = self.label_range
        if not low < high:
            raise CompareError(f"data set {self.name!r}: the label's scale must run upwards, got {self.label_range}.")
        for split in SPLITS:
            labels = self.labels(split)
            if split != "train" and len(labels) < MIN_HELD_OUT:
                raise CompareError(
                    f"data set {self.name!r}: {len(labels)} {split} row(s) say nothing; at least {MIN_HELD_OUT} are needed."
                )
            if labels.min() < low or labels.max() > high:
                raise CompareError(
                    f"data set {self.name!r}: {split} labels lie between {labels.min():g} and {labels.max():g}, outside the "
                    f"scale {low:g} to {high:g}. Give the scale that they are on."
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The template's text columns."""
        return PromptTemplate(self.template).fields

    def texts(self, split: str) -> list[dict[str, str]]:
        """Return the rows' text columns."""
        columns = [self.splits[split][field][:] for field in self.fields]
        return [dict(zip(self.fields, row, strict=True)) for row in zip(*columns, strict=True)]

    def labels(self, split: str) -> np.ndarray:
        """Return (N,) float64 labels."""
        return label_matrix(self.splits[split])[:, 0]

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures has to know."""
        return shared_texts({split: [tuple(text.values()) for text in self.texts(split)] for split in SPLITS})

    def __str__(self) -> str:
        rows = ", ".join(f"{split} {len(self.splits[split])}" for split in SPLITS)
        low, high = self.label_range
        return f"{self.name}: rows: {rows}; labels from {low:g} to {high:g}; prompt: {self.template!r}"

    @cached_property
    def digest(self) -> str:
        """Digest every text and label, so that a table that was changed is another data set to what is resumed."""
        found = hashlib.sha256()
        for split in SPLITS:
            rows = [[*text.values(), label] for text, label in zip(self.texts(split), self.labels(split), strict=True)]
            found.update(json.dumps([split, self.fields, rows]).encode())
        return found.hexdigest()[:12]


def load_task(
    data: Source,
    *,
    name: str | None = None,
    text: Sequence[str] | None = None,
    label: str = "score",
    template: str | None = None,
    label_min: float | None = None,
    label_max: float | None = None,
    validation: Source | None = None,
    test: Source | None = None,
    train_rows: int | None = None,
    seed: int = 0,
) -> Task:
    """Read a table, a folder with train/validation/test, or a hub id.

    Args:
        data: As in [`load_splits`]; what it lacks is split off the training rows.
        name: Default: the name of the folder or file.
        text: Text columns; default: the template's fields, else every text column.
        label: The label's column.
        template: The prompt; default: the text columns by name, then `Score:`.
        label_min: Lower end of the label's scale; default: the lowest label of all rows, rounded down.
        label_max: Upper end; the same, rounded up.
        validation: A table of its own.
        test: The same.
        train_rows: Use a sample of this many training rows, drawn by `seed`: one sample for all methods and seeds.
        seed: Of splits and sample.

    Raises:
        CompareError: for a scale with one end, more rows than there are, too few, or labels outside the scale.
        TemplateError: for a prompt that cannot be read.
        TableError: for a bad table.
    """
    if (label_min is None) != (label_max is None):
        raise CompareError("label_min and label_max belong together: give both or neither.")
    columns = tuple(text or (PromptTemplate(template).fields if template else guess_text_columns(data, [label])))
    splits = load_splits(data, Columns(text=columns, label=(label,)), validation=validation, test=test, seed=seed)
    if train_rows is not None:
        rows = len(splits["train"])
        if not 1 < train_rows <= rows:
            raise CompareError(f"train_rows must lie between 2 and the {rows} training rows, got {train_rows}.")
        drawn = np.random.default_rng(seed).permutation(rows)[:train_rows]
        splits["train"] = splits["train"].select(sorted(drawn.tolist()))
    scale = None if label_min is None or label_max is None else (float(label_min), float(label_max))
    if scale is None:
        labels = np.concatenate([label_matrix(split) for split in splits.values()])
        scale = _round_scale(float(labels.min()), float(labels.max()))
    return Task(name or _name_of(data), splits, template or default_template(columns), scale)


def _round_scale(low: float, high: float) -> tuple[float, float]:
    """Move the ends of what the labels cover outwards to numbers as people would write them: number grids begin there."""
    if not low < high:
        return low, high
    step = decimal_step(low, high)
    ends = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return round(ends[0], decimals_of(step)), round(ends[1], decimals_of(step))


def _name_of(data: Any) -> str:
    if isinstance(data, (str, Path)):
        path = Path(str(data).rstrip("/"))
        path = path.resolve() if path.is_dir() else path  # "." has no name of its own
        return path.stem if path.suffix in (".csv", ".tsv", ".jsonl", ".json", ".parquet") else path.name
    return "data"
