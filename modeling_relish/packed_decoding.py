"""Greedy decoding of many rows behind one shared prefix, all in one sequence, so that its keys and values are never copied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .language_model_relish import layer_masks, run_masked

_PREFIX = -1


class SharedPrefix:
    """Examples that were read once, and rows that are written behind them.

    In a batch, every row would attend to a copy of the prefix, many times as long as itself. Here the rows of a batch follow
    the prefix in one sequence: each token's position is the one it has behind the prefix alone, and it sees the prefix and its
    own row's earlier tokens, whatever lies between.

    Args:
        model: A causal language model that takes such a mask ([`no_tree_mask`] says).
        ids: Of the prefix, at least one.
    """

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self.model = model
        # Without a config, layers with a sliding window keep everything: the window is in the mask.
        self.cache = DynamicCache()
        self.owners = self.places = torch.empty(0, dtype=torch.long, device=model.device)
        self._read(ids, [_PREFIX] * len(ids), range(len(ids)), keep=1)
        self.length = len(ids)

    def write(self, rows: Sequence[Sequence[int]], max_new_tokens: int, ends: Collection[int]) -> list[list[int]]:
        """Return the tokens that follow each row, the most probable one each time, up to one of `ends` or to the limit."""
        written: list[list[int]] = [[] for _ in rows]
        unfinished = list(range(len(rows)))
        # The order is free, for mask and positions are given: last tokens come last, the only ones whose logits are needed.
        body = [(token, row, place) for row, ids in enumerate(rows) for place, token in enumerate(ids[:-1])]
        news = [*body, *((ids[-1], row, len(ids) - 1) for row, ids in enumerate(rows))]
        for _ in range(max_new_tokens):
            ids, owners, places = zip(*news, strict=True)
            logits = self._read(ids, owners, [self.length + place for place in places], keep=len(unfinished))
            for row, token in zip(unfinished, logits.argmax(-1).tolist(), strict=True):
                written[row].append(token)
            unfinished = [row for row in unfinished if written[row][-1] not in ends]
            news = [(written[row][-1], row, len(rows[row]) + len(written[row]) - 1) for row in unfinished]
            if not news:
                break
        self._forget_rows()
        return written

    def _read(self, ids: Sequence[int], owners: Sequence[int], places: Sequence[int], keep: int) -> torch.Tensor:
        """Run tokens behind what was read so far; return the last `keep` ones' (keep, V) logits."""
        device = self.model.device
        owner, place = (torch.tensor(list(values), device=device) for values in (owners, places))
        self.owners, self.places = torch.cat([self.owners, owner]), torch.cat([self.places, place])
        allowed = (self.owners == _PREFIX) | (self.owners == owner[:, None])
        allowed &= self.places <= place[:, None]
        masks = layer_masks(self.model, allowed[None], place[None], self.places[None])
        tokens = torch.tensor([list(ids)], device=device)
        return run_masked(self.model, tokens, masks, place[None], keep, self.cache)[0]

    def _forget_rows(self) -> None:
        self.cache.crop(self.length - len(self.owners))
        self.owners, self.places = self.owners[: self.length], self.places[: self.length]
