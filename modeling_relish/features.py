"""Hidden states on disk: a frozen backbone runs once per text, the head trains on what it said.

Layout: `<root>/<fingerprint>/manifest.json` and one folder per request (the distinct texts of one data set that no earlier
request holds), with shards `00000.safetensors` ... and, once all are there, `done.json`. The fingerprint covers every byte of
the backbone's weights, its configuration, the layer and both dtypes. Texts are found by their token ids, which tokenizer,
template and max_length determine: another one of these gives other ids, and never another text's states.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .backbone_relish import check_finite
from .base_model_relish import cache_root
from .feature_files import (
    Row,
    Shard,
    batches_of,
    encode_states,
    is_whole,
    map_shard,
    read_json,
    remove_left_over,
    save_shard,
    split_rows,
    text_key,
    write_json,
)
from .modeling_relish import RelishForSequenceRegression
from .text_relish import pad_batch
from .weights_relish import weights_digest

logger = logging.get_logger(__name__)

STORAGE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}
BATCH_TOKENS = 2048
SHARD_TOKENS = 65536


class FeatureCacheError(ValueError):
    """The feature cache cannot be written or used; the message says why and what to do."""


class FeatureCache:
    """Hidden states of texts, kept on disk and mapped into memory.

    Args:
        model: The model whose backbone computes them; must be frozen.
        root: Folder that holds caches of any number of models; `None` = `features` in the library's cache folder.
        dtype: On disk: `"bfloat16"`, `"float16"` (refused where a state exceeds its range), `"float32"`, or `"int8"` with a
            scale per token.
        batch_tokens: Tokens per backbone call.
        shard_tokens: Tokens per shard, the unit that a kill loses at most.

    Raises:
        FeatureCacheError: if the backbone is trained, or the dtype is not one of these.
    """

    def __init__(
        self,
        model: RelishForSequenceRegression,
        root: str | os.PathLike | None = None,
        dtype: str = "bfloat16",
        batch_tokens: int = BATCH_TOKENS,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        if not model.backbone_is_frozen:
            raise FeatureCacheError("the backbone is trained, so its states change: a cache needs a frozen one.")
        if dtype not in STORAGE_DTYPES:
            raise FeatureCacheError(f"features are stored as one of {list(STORAGE_DTYPES)}, got {dtype!r}.")
        self.model = model
        self.dtype = STORAGE_DTYPES[dtype]
        self.batch_tokens, self.shard_tokens = batch_tokens, shard_tokens
        manifest = self._manifest()
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(root or cache_root() / "features") / digest
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_left_over(self.folder)
        if not (self.folder / "manifest.json").exists():
            write_json(self.folder / "manifest.json", manifest)
        self._where: dict[bytes, tuple[Shard, int, int]] = {}
        for done in sorted(self.folder.glob("*/done.json")):
            self._open_request(done.parent)

    def _manifest(self) -> dict[str, Any]:
        config, backbone = self.model.config, self.model.backbone
        return {
            "backbone": config.backbone_name_or_path,
            "revision": config.backbone_revision,
            "weights": weights_digest(backbone),
            # The backbone's own, not the model's copy, in which Trainer and TRL may set a pad token.
            "config": json.loads(backbone.config.to_json_string(use_diff=False)) | {"_name_or_path": ""},
            "layers": config.read_layers,
            "compute_dtype": str(backbone.dtype),
            "storage_dtype": str(self.dtype),
            "attention": backbone.config._attn_implementation,
            "transformers": transformers_version,
        }

    # ------------------------------------------------------------------ write

    def add(self, ids: Sequence[Sequence[int]], *, show_progress: bool = True, rank: int = 0, world: int = 1) -> None:
        """Compute and keep the states of all texts that are not there yet.

        Interrupted at any moment, the next call goes on from the last whole shard and ends with the same bytes: which text
        stands in which shard, and which texts run in one batch, follows from the request alone.

        Args:
            ids: Token ids of every text; equal ones are computed once.
            show_progress: A bar over tokens.
            rank: Of this process; shards are dealt out by number.
            world: How many processes; the caller waits for all, then calls `refresh`.

        Raises:
            FeatureCacheError: if the disk is full; whole shards stay.
            NonFiniteStatesError: if a state is not finite in the storage dtype; nothing infinite is ever stored.
        """
        request, shards = self._plan(ids)
        if not shards:
            return
        request.mkdir(exist_ok=True)
        with _progress(shards, show_progress) as bar:
            for number, rows in enumerate(shards):
                path = request / f"{number:05d}.safetensors"
                if number % world == rank and not is_whole(path):
                    self._write_shard(path, rows, bar)
                else:
                    bar.update(sum(n for n, _, _ in rows))
        if world == 1:
            self._finish(request, len(shards))

    def refresh(self, ids: Sequence[Sequence[int]], *, is_main: bool = True) -> None:
        """After all processes have written their shards: complete the request (main process) or read it (others).

        Raises:
            FeatureCacheError: if a shard is missing, for then a process has failed.
        """
        request, shards = self._plan(ids)
        missing = [n for n in range(len(shards)) if not (request / f"{n:05d}.json").exists()]
        if missing:
            raise FeatureCacheError(
                f"{request} lacks {len(missing)} of {len(shards)} shards, the first is {missing[0]}: the process that writes "
                "them has failed. Start again; whole shards stay."
            )
        if shards and is_main:
            self._finish(request, len(shards))
        elif shards:
            self._open_request(request)

    def _plan(self, ids: Sequence[Sequence[int]]) -> tuple[Path, list[list[Row]]]:
        """Return the folder and the shards of what is not there yet, the same for every process that asks."""
        distinct = {text_key(t): list(t) for t in ids}
        new = sorted((len(t), key, t) for key, t in distinct.items() if key not in self._where)
        digest = hashlib.sha256(f"{self.batch_tokens} {self.shard_tokens} ".encode())  # they decide what stands where
        digest.update(b"".join(key for _, key, _ in new))
        return self.folder / digest.hexdigest()[:16], split_rows(new, self.shard_tokens) if new else []

    def _finish(self, request: Path, num_shards: int) -> None:
        try:
            write_json(request / "done.json", {"shards": num_shards})
        except OSError as error:
            raise self._unwritable(request, error) from error
        self._open_request(request)

    def _write_shard(self, path: Path, rows: list[Row], bar: Any) -> None:
        self._save_shard(path, rows, run_rows(self.model, rows, self.dtype, self.batch_tokens, bar))

    def _save_shard(self, path: Path, rows: list[Row], states: torch.Tensor) -> None:
        try:
            save_shard(path, rows, encode_states(states, self.dtype))
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk with an exception of its own
            raise self._unwritable(path, error) from error

    def _unwritable(self, path: Path, error: Exception) -> FeatureCacheError:
        free = shutil.disk_usage(self.folder).free
        return FeatureCacheError(
            f"the feature cache could not write {path} ({error}; {free / 1e6:.0f} MB free). Whole shards stay; free some "
            "space or choose another folder (features_dir, RELISH_HOME) and start again."
        )

    # ------------------------------------------------------------------ read

    def _open_request(self, request: Path) -> None:
        """Map a finished request's shards; one that is damaged is dropped, and computed anew when it is asked for."""
        shards = sorted(request.glob("*.safetensors"))
        expected = read_json(request / "done.json").get("shards")
        damaged = [s for s in shards if not is_whole(s)]
        if damaged or len(shards) != expected:
            logger.warning(
                f"feature cache {request}: {len(damaged) or 'some'} shard(s) damaged or missing; computed anew."
            )
            for shard in damaged:
                shard.unlink(missing_ok=True)
            (request / "done.json").unlink(missing_ok=True)
            return
        for shard in shards:
            mapped = map_shard(shard)
            for i, key in enumerate(mapped.keys):
                self._where[key.tobytes()] = (mapped, int(mapped.offsets[i]), int(mapped.offsets[i + 1]))

    def __contains__(self, ids: Sequence[int]) -> bool:
        return text_key(ids) in self._where

    def states(self, key: bytes) -> torch.Tensor:
        """Return a text's (T, D) states by its [`text_key`], in the storage dtype (fp32 of int8).

        Raises:
            FeatureCacheError: for a text that was never added.
        """
        if key not in self._where:
            raise FeatureCacheError("the text is not in the feature cache; add it first.")
        shard, start, stop = self._where[key]
        return shard.rows(start, stop)


class FeatureDataset(torch.utils.data.Dataset):
    """Rows of cached states with their labels, for any trainer: `hidden_states` (T, D), `labels` (K,), `sample_weight`."""

    def __init__(self, cache: FeatureCache, ids: Sequence[Sequence[int]], columns: dict[str, Any]) -> None:
        self.cache = cache
        self.keys = [text_key(t) for t in ids]
        self.lengths = [len(t) for t in ids]
        self.columns = columns

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        states = self.cache.states(self.keys[index])
        return {"hidden_states": states, **{name: values[index] for name, values in self.columns.items()}}


def fill_layers(
    caches: Sequence[FeatureCache],
    reader: RelishForSequenceRegression,
    ids: Sequence[Sequence[int]],
    *,
    show_progress: bool = True,
) -> None:
    """Fill the caches of several layers of one backbone in one pass.

    Args:
        caches: One per layer, in the order of `reader.config.backbone_layers`, alike in dtype and sizes.
        reader: A model that reads all of these layers.
        ids: Token ids of every text.
        show_progress: A bar over tokens.
    """
    plans = [cache._plan(ids) for cache in caches]
    if len({request.name for request, _ in plans}) > 1:  # some hold texts that others do not
        for cache in caches:
            cache.add(ids, show_progress=show_progress)
        return
    shards = plans[0][1]
    with _progress(shards, show_progress) as bar:
        for number, rows in enumerate(shards):
            paths = [request / f"{number:05d}.safetensors" for request, _ in plans]
            if all(is_whole(path) for path in paths):
                bar.update(sum(n for n, _, _ in rows))
                continue
            states = run_rows(reader, rows, caches[0].dtype, caches[0].batch_tokens, bar)
            for cache, path, part in zip(caches, paths, states.chunk(len(caches), dim=-1), strict=True):
                path.parent.mkdir(exist_ok=True)
                cache._save_shard(path, rows, part)
    for cache, (request, _) in zip(caches, plans, strict=True):
        if shards:
            cache._finish(request, len(shards))


@torch.no_grad()
def run_rows(
    model: RelishForSequenceRegression, rows: list[Row], dtype: torch.dtype, batch_tokens: int, bar: Any
) -> torch.Tensor:
    """Run the backbone over rows in batches of a token budget; return (sum of T, state size).

    The result has the storage dtype; fp32 for int8, which is made of whole rows.

    Raises:
        NonFiniteStatesError: if a state is not finite in that dtype.
    """
    dtype = torch.float32 if dtype == torch.int8 else dtype
    states = torch.empty((sum(n for n, _, _ in rows), model.config.state_size), dtype=dtype)
    start = 0
    for batch in batches_of(rows, batch_tokens):
        ids, mask = (torch.tensor(x, device=model.device) for x in pad_batch([t for _, _, t in batch], None))
        stored = model.token_states(ids, mask)[0].to(dtype)
        check_finite(stored, mask, f"{model.config.layer_name}, in the feature cache")
        for i, (n, _, _) in enumerate(batch):
            states[start : start + n] = stored[i, :n]
            start += n
        bar.update(sum(n for n, _, _ in batch))
    return states


def _progress(shards: list[list[Row]], show: bool) -> Any:
    total = sum(n for rows in shards for n, _, _ in rows)
    return logging.tqdm(total=total, desc="features", unit="token", unit_scale=True, disable=not show)
