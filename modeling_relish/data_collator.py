"""From rows to a padded batch: token ids, or hidden states that were computed before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .text_relish import pad_batch


class RelishCollator:
    """Pad rows to their longest and stack labels and weights as fp32.

    Args:
        pad_token_id: Written at padding; the mask alone says what is padding, so 0 serves where there is none.
    """

    def __init__(self, pad_token_id: int | None = None) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids` (B, T), or `hidden_states` or `inputs_embeds` (B, T, D), the mask (B, T), labels and weights."""
        for name in ("hidden_states", "inputs_embeds"):
            if name in rows[0]:
                padded, tokens = _pad_states([torch.as_tensor(row[name]) for row in rows])
                batch = {name: padded, "attention_mask": tokens}
                break
        else:
            ids, mask = pad_batch([row["input_ids"] for row in rows], self.pad_token_id)
            batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        for name in ("labels", "sample_weight"):
            if name in rows[0]:
                batch[name] = torch.from_numpy(np.asarray([row[name] for row in rows], dtype=np.float32))
        return batch


def _pad_states(states: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(s) for s in states)
    padded = states[0].new_zeros(len(states), longest, states[0].shape[-1])
    mask = torch.zeros(len(states), longest, dtype=torch.long)
    for i, s in enumerate(states):
        padded[i, : len(s)] = s
        mask[i, : len(s)] = 1
    return padded, mask
