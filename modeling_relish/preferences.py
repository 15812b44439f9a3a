"""Preference pairs: rows in TRL's formats -> token ids, batches of pairs, and what is reported of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers.utils import logging

from .data import TableError, check_label
from .data_collator import RelishCollator
from .text_relish import PromptTemplate, TextTooLongError, is_conversation, prompt_row, tokenize

logger = logging.get_logger(__name__)

SIDES = ("chosen", "rejected")


class PairDataset(Dataset):
    """Pairs of rows: `chosen` and `rejected`, each as a row of tokens or of states, and `margin`, 0 where there is none.

    Args:
        sides: Every chosen row, then every rejected row, in the same order.
        lengths: Tokens of each pair.
        margins: (N,).
    """

    def __init__(self, sides: Any, lengths: list[int], margins: np.ndarray) -> None:
        self.sides, self.lengths, self.margins = sides, lengths, margins

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        return {
            "chosen": self.sides[index],
            "rejected": self.sides[index + len(self)],
            "margin": self.margins[index],
        }


class PairCollator(RelishCollator):
    """Pad pairs to one batch of 2 B rows, the chosen ones first, as TRL does; `margin` (B,) fp32."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return what [`RelishCollator`] returns for the 2 B texts, and the margins."""
        batch = super().__call__([row[side] for side in SIDES for row in rows])
        # The margin comes first: Trainer takes the length of the first entry for the number of rows.
        return {"margin": torch.tensor([float(row["margin"]) for row in rows]), **batch}


def preference_metrics(prediction: Any) -> dict[str, float]:
    """Return `accuracy`, `margin` and `mean_reward` of (N, 2) rewards of chosen and rejected texts."""
    rewards = np.asarray(prediction.predictions, dtype=np.float64)
    chosen, rejected = rewards.T
    return {
        "accuracy": float((chosen > rejected).mean()),
        "margin": float((chosen - rejected).mean()),
        "mean_reward": float(rewards.mean()),
    }


def preference_ids(
    rows: Sequence[Mapping[str, Any]], name: str, config: Any, tokenizer: Any
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Return the token ids of the chosen and of the rejected texts, and the margins, of preference rows.

    A pair with a text longer than `max_length` is left out, with a warning: what the two differ in is their end.

    Args:
        rows: In the formats of [`RelishRewardTrainer`].
        name: Of the data set, for messages.
        config: The model's: prompt template and `max_length`.
        tokenizer: The backbone's.

    Raises:
        TableError: for a row that is no pair, with column and row.
        TextTooLongError: if no pair is left.
    """
    template = PromptTemplate(config.prompt_template)
    limit = config.max_length if tokenizer is None else min(config.max_length, tokenizer.model_max_length)
    kept: list[tuple[list[int], list[int]]] = []
    margins = []
    for index, row in enumerate(rows):
        pair = _pair_ids(row, template, tokenizer, f"{name} data", index)
        if max(map(len, pair)) <= limit:
            kept.append(pair)
            margin = row.get("margin", 0.0)
            margins.append(check_label(margin, where=f"{name} data", column="margin", row=index + 1))
    if len(kept) < len(rows):
        if not kept:
            raise TextTooLongError(f"every pair of the {name} data has a text of more than max_length={limit} tokens.")
        logger.warning(
            f"{len(rows) - len(kept)} of {len(rows)} pairs of the {name} data have a text of more than max_length={limit} "
            "tokens and are left out."
        )
    return [chosen for chosen, _ in kept], [rejected for _, rejected in kept], np.array(margins, dtype=np.float32)


def _pair_ids(
    row: Mapping[str, Any], template: PromptTemplate, tokenizer: Any, where: str, index: int
) -> tuple[list[int], list[int]]:
    ids = []
    for side in SIDES:
        if f"{side}_ids" in row:
            ids.append([int(token) for token in row[f"{side}_ids"]])
        else:
            if tokenizer is None:
                raise ValueError("preference texts need processing_class=tokenizer.")
            fields, special = prompt_row(_example(row, side, where, index), template, tokenizer, index)
            ids.append(tokenize(template.render(fields), tokenizer, special))
        if not ids[-1]:
            raise TableError(f"{where}, column {side!r}, row {index + 1}: the text has no token.")
    return ids[0], ids[1]


def _example(row: Mapping[str, Any], side: str, where: str, index: int) -> dict[str, Any]:
    """Return the row with prompt and completion of one side: together as `text`, apart under their names."""
    completion, prompt = row.get(side), row.get("prompt")
    for column, value in ((side, completion), ("prompt", prompt)):
        if not (isinstance(value, str) or is_conversation(value)) and not (column == "prompt" and value is None):
            raise TableError(
                f"{where}, column {column!r}, row {index + 1}: expected a string or a conversation (a list of messages with "
                f"role and content), found {type(value).__name__}; the columns are {sorted(row)}."
            )
    if prompt is None:
        return {**row, "text": completion, "completion": completion}
    if isinstance(prompt, str) != isinstance(completion, str):
        raise TableError(
            f"{where}, row {index + 1}: the prompt is {'a string' if isinstance(prompt, str) else 'a conversation'} and "
            f"{side!r} is not; give both in one form."
        )
    return {**row, "text": joined(prompt, completion), "completion": completion}


def joined(prompt: Any, completion: Any) -> Any:
    """Put a completion behind its prompt: two strings, or two lists of messages, as TRL does."""
    return prompt + completion if isinstance(prompt, str) else [*prompt, *completion]
