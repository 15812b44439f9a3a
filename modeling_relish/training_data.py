"""What training reads from a data set: columns, labels, weights and the prompts' token ids, each checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import DatasetDict
from torch.utils.data import Dataset
from transformers.utils import logging

from .configuration_relish import RelishConfig
from .data import TableError, check_label
from .number_grid_relish import NumberGrid
from .text_relish import CHAT_OPTIONS, PromptTemplate, TextTooLongError, encode_rows

logger = logging.get_logger(__name__)

LABEL_NAMES = ("labels", "label", "score")


class TokenDataset(Dataset):
    """Rows of token ids with their labels: `input_ids` (T,), `labels` (K,), `sample_weight`."""

    def __init__(self, ids: Sequence[Sequence[int]], columns: dict[str, Any]) -> None:
        self.ids = ids
        self.columns = columns

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], **{name: values[index] for name, values in self.columns.items()}}


def find_label_columns(
    dataset: Any, name: str, wanted: list[str] | None, *, required: bool, optional: bool = False
) -> list[str]:
    """Return the columns that hold the targets: those named, else the first of the usual names.

    `load_split` puts the named columns' values into lists under `labels`, and these are found in their place. `optional` rows,
    which are to be predicted, may have none of the named.
    """
    present = column_names(dataset)
    if wanted is not None:
        if missing := [c for c in wanted if c not in present]:
            if "labels" in present and _holds_lists(dataset, "labels", len(wanted)):
                return ["labels"]
            if optional and len(missing) == len(wanted):
                return []
            raise TableError(
                f"the {name} data has no label column {missing}; its columns are {present}. Name one of them in label_columns."
            )
        return list(wanted)
    found = [c for c in LABEL_NAMES if c in present]
    if len(found) > 1 and found[0] != "labels":  # which Trainer reads, whatever else there is
        raise TableError(
            f"the {name} data has the columns {found}, and either may be the label: name it with label_columns=[...]."
        )
    found = found[:1]
    if required and not found:
        raise TableError(
            f"the {name} data has no label: none of {list(LABEL_NAMES)} is among its columns {present}. Name it with "
            "label_columns=[...]."
        )
    return found


def _holds_lists(dataset: Any, column: str, length: int) -> bool:
    first: Any = dataset[0][column] if len(dataset) else None
    is_list = isinstance(first, (list, tuple)) or getattr(first, "ndim", 0) == 1
    return is_list and len(first) == length


def label_values(
    dataset: Any, columns: list[str], name: str, config: RelishConfig, named: Sequence[str] | None
) -> np.ndarray:
    """Return (N, K) checked float64 labels in the order of the model's targets; `named` is `label_columns`."""
    num_labels = config.num_labels or 1
    values = [column_values(dataset, c) for c in columns]
    rows = [_flat(row) for row in zip(*values, strict=True)]
    for number, row in enumerate(rows):
        if len(row) != num_labels:
            raise TableError(
                f"{name} data, row {number + 1}: {len(row)} target(s) in column(s) {columns}, the model has "
                f"num_labels={num_labels}."
            )
    where = columns if len(columns) == num_labels else [", ".join(columns)] * num_labels
    labels = np.array([
        [check_label(v, where=f"{name} data", column=c, row=i + 1) for v, c in zip(r, where, strict=True)]
        for i, r in enumerate(rows)
    ])  # fmt: skip
    return order_targets(labels.reshape(len(rows), num_labels), named, config)


def order_targets(labels: np.ndarray, columns: Sequence[str] | None, config: RelishConfig) -> np.ndarray:
    """Bring labels into the order of the model's targets.

    Args:
        labels: (N, K), in the order of `columns`.
        columns: Names of the K columns. Where they are the names of the model's targets, each goes to its target; others are
            taken in their own order, with a warning where the model's targets have names.
        config: The model's.
    """
    targets = config.target_names
    if columns is None or len(columns) < 2 or len(columns) != len(targets) or list(columns) == targets:
        return labels
    if set(columns) == set(targets):
        return labels[:, [columns.index(target) for target in targets]]
    if targets != [f"LABEL_{i}" for i in range(len(targets))]:  # which transformers calls targets without a name
        pairs = ", ".join(f"{column!r} for {target!r}" for column, target in zip(columns, targets, strict=True))
        logger.warning(
            f"the label columns {list(columns)} are not the model's targets {targets}; they are taken in this order: {pairs}. "
            "Rename the columns if that is not what they hold."
        )
    return labels


def find_weight_column(dataset: Any, name: str, wanted: str | None, *, required: bool) -> str | None:
    """Return the column with the rows' weights, if there is one: the one named, else `sample_weight`."""
    present = column_names(dataset)
    if required and wanted is not None and wanted not in present:
        raise TableError(
            f"the {name} data has no weight column {wanted!r}; its columns are {present}. Name one of them in weight_column."
        )
    column = "sample_weight" if wanted is None else wanted
    return column if column in present else None


def token_ids(
    dataset: Any, name: str, config: Any, tokenizer: Any, cut_rows: list[int] | None = None
) -> list[list[int]]:
    """Return the token ids of every row's prompt: from `input_ids`, without padding, or from the template's text columns.

    `cut_rows` gets the numbers, from 0, of rows whose text was cut.
    """
    present = column_names(dataset)
    if "input_ids" in present:
        ids = column_values(dataset, "input_ids") or []
        masks = column_values(dataset, "attention_mask" if "attention_mask" in present else None)
        masks = masks or [[1] * len(row) for row in ids]
        kept = [[int(t) for t, m in zip(row, mask, strict=True) if m] for row, mask in zip(ids, masks, strict=True)]
        if [] in kept:
            raise TableError(
                f"{name} data, row {kept.index([]) + 1}: it has no token, or its attention_mask is all zero."
            )
        if max(map(len, kept), default=0) > config.max_length:
            row = next(i for i, ids in enumerate(kept) if len(ids) > config.max_length)
            raise TextTooLongError(
                f"{name} data, row {row + 1} has {len(kept[row])} tokens, the model's max_length is {config.max_length}, at "
                "which texts are cut in predict. Cut input_ids there too, or set a larger max_length."
            )
        return kept
    template = PromptTemplate(config.prompt_template)
    if missing := [f for f in template.fields if f not in present]:
        raise TableError(
            f"the {name} data has no column {missing}, which the prompt template {template.template!r} names; its columns "
            f"are {present}."
        )
    if tokenizer is None:
        raise ValueError("text columns need processing_class=tokenizer.")
    if config.number_grid is not None:
        NumberGrid.from_setting(config.number_grid).check_resolved(tokenizer, config.prompt_template)
    rows = ({c: row[c] for c in (*template.fields, *CHAT_OPTIONS) if c in row} for row in dataset)
    return list(encode_rows(rows, template, tokenizer, config.max_length, config.truncation, cut_rows))


def column_names(dataset: Any) -> list[str]:
    """Return the columns of a `datasets.Dataset` or of any sequence of dicts."""
    if hasattr(dataset, "iloc") or isinstance(dataset, Mapping):
        todo = "datasets.Dataset.from_pandas(...)" if hasattr(dataset, "iloc") else "datasets.Dataset.from_dict(...)"
        todo = "one of its splits" if isinstance(dataset, DatasetDict) else todo
        raise TableError(f"a {type(dataset).__name__} is no sequence of rows: give {todo}.")
    names = getattr(dataset, "column_names", None)
    return list(names) if names is not None else list(dataset[0]) if len(dataset) else []


def column_values(dataset: Any, name: str | None) -> list[Any] | None:
    """Return a column of a `datasets.Dataset` or of any sequence of dicts."""
    if name is None:
        return None
    if name not in column_names(dataset):
        raise TableError(f"the data has no column {name!r}; its columns are {column_names(dataset)}.")
    if hasattr(dataset, "column_names"):
        return list(dataset[name])
    for i in range(len(dataset)):
        if name not in dataset[i]:
            raise TableError(f"row {i + 1} of the data has no {name!r}; it has {list(dataset[i])}.")
    return [dataset[i][name] for i in range(len(dataset))]


def _flat(row: tuple[Any, ...]) -> list[Any]:
    out: list[Any] = []
    for value in row:
        value = value.tolist() if hasattr(value, "tolist") else value
        out.extend(value if isinstance(value, (list, tuple)) else [value])
    return out


def check_pad_token(tokenizer: Any, vocab_size: int) -> None:
    """Refuse a padding token without an embedding: Trainer would write it into the model's config, which then fails to load."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is not None and pad >= vocab_size:
        raise TableError(
            f"the tokenizer's padding token {tokenizer.pad_token!r} has the id {pad}, and the backbone's vocabulary ends at "
            f"{vocab_size - 1}. Padding is never read: set tokenizer.pad_token = tokenizer.eos_token."
        )


def check_resolution(labels: np.ndarray) -> None:
    """Refuse (N, K) labels whose differences are lost in fp32, in which they are trained and predicted."""
    lost = np.abs(labels).max(axis=0) * np.finfo(np.float32).eps > 0.01 * labels.std(axis=0)
    if (lost & (labels.std(axis=0) > 0)).any():
        target = int(np.argmax(lost))
        raise TableError(
            f"the labels lie around {labels[:, target].mean():.9g} and differ by {labels[:, target].std():.3g} (standard "
            "deviation): fp32 has too few digits for that. Subtract a constant from them."
        )


def warn_of_other_scale(labels: np.ndarray, config: RelishConfig) -> None:
    """Warn where (N, K) labels lie far from those that the model's scale was measured on, which training further keeps.

    Far is three deviations of the model's away, or three times as wide, or as narrow: 1 to 5 is not 0 to 1, nor 0 to 100.
    """
    if config.label_mean is None or config.label_std is None:
        return
    mean, std = np.array(config.label_mean), np.array(config.label_std)
    width = labels.std(axis=0)
    far = (np.abs(labels.mean(axis=0) - mean) > 3 * std) | (width > 3 * std) | ((width < std / 3) & (width > 0))
    if far.any():
        target = int(np.argmax(far))
        logger.warning(
            f"the training labels (mean {labels[:, target].mean():.4g}, deviation {width[target]:.4g}) seem to be on "
            f"another scale than the model's (mean {mean[target]:.4g}, deviation {std[target]:.4g}), which is kept, as is its "
            "range. For a new scale set the config's label_mean, label_std, label_min and label_max to None before training."
        )


def checked_weights(values: Sequence[Any], column: str | None, name: str, minimum: float) -> np.ndarray:
    """Return the weights as float64; one that is no number, or below the minimum, is told with its column and row."""
    checked = np.array(
        [check_label(v, where=f"{name} data", column=str(column), row=i + 1) for i, v in enumerate(values)]
    )
    if (checked < minimum).any():
        row = int(np.argmax(checked < minimum))
        raise TableError(
            f"{name} data, column {column!r}, row {row + 1}: a weight must be at least {minimum}, got {checked[row]}."
        )
    return checked
