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

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .backbone_relish import cache_root, check_finite, weights_digest
from .modeling_relish import RelishForSequenceRegression
from .text_relish import pad_batch

logger = logging.get_logger(__name__)

STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BATCH_TOKENS = 2048
SHARD_TOKENS = 65536


class FeatureCacheError(ValueError):
    """The feature cache cannot be written or used; the message says why and what to do."""


class FeatureCache:
    """Hidden states of texts, kept on disk and mapped into memory.

    Args:
        model: The model whose backbone computes them; must be frozen.
        root: Folder that holds caches of any number of models; `None` = `features` in the library's cache folder.
        dtype: On disk: `"bfloat16"`, `"float16"` (refused where a state exceeds its range) or `"float32"`.
        batch_tokens: Tokens per backbone call.
        shard_tokens: Tokens per shard, the unit that a kill loses at most.

    Raises:
        FeatureCacheError: if the backbone is trained, or the folder holds something else.
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
        if not (self.folder / "manifest.json").exists():
            _write_json(self.folder / "manifest.json", manifest)
        self._where: dict[bytes, tuple[np.ndarray, int, int]] = {}
        for done in sorted(self.folder.glob("*/done.json")):
            self._open_request(done.parent)

    def _manifest(self) -> dict[str, Any]:
        config, backbone = self.model.config, self.model.backbone
        return {
            "backbone": config.backbone_name_or_path,
            "revision": config.backbone_revision,
            "weights": weights_digest(backbone),
            "layer": config.backbone_layer,
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
        distinct = {text_key(t): list(t) for t in ids}
        new = sorted((len(t), key, t) for key, t in distinct.items() if key not in self._where)
        if not new:
            return
        request = self.folder / hashlib.sha256(b"".join(key for _, key, _ in new)).hexdigest()[:16]
        request.mkdir(exist_ok=True)
        shards = _split(new, self.shard_tokens)
        total = sum(n for n, _, _ in new)
        with logging.tqdm(
            total=total, desc="features", unit="token", unit_scale=True, disable=not show_progress
        ) as bar:
            for number, rows in enumerate(shards):
                path = request / f"{number:05d}.safetensors"
                if number % world == rank and not _is_whole(path):
                    self._write_shard(path, rows)
                bar.update(sum(n for n, _, _ in rows))
        if world == 1:
            self._finish(request, len(shards))

    def refresh(self, ids: Sequence[Sequence[int]], *, is_main: bool = True) -> None:
        """After all processes have written their shards: complete the request (main process) or read it (others)."""
        missing = sorted((len(t), key) for key, t in {text_key(t): t for t in ids}.items() if key not in self._where)
        if missing:
            request = self.folder / hashlib.sha256(b"".join(key for _, key in missing)).hexdigest()[:16]
            if is_main:
                self._finish(request, len(list(request.glob("*.safetensors"))))
            else:
                self._open_request(request)

    def _finish(self, request: Path, num_shards: int) -> None:
        _write_json(request / "done.json", {"shards": num_shards})
        self._open_request(request)

    @torch.no_grad()
    def _write_shard(self, path: Path, rows: list[tuple[int, bytes, list[int]]]) -> None:
        D = self.model.config.hidden_size
        offsets = np.concatenate([[0], np.cumsum([n for n, _, _ in rows])])
        states = torch.empty((int(offsets[-1]), D), dtype=self.dtype)
        row = 0
        for batch in _batches(rows, self.batch_tokens):
            hidden, mask = self._run([t for _, _, t in batch])
            for i, (n, _, _) in enumerate(batch):
                states[offsets[row] : offsets[row + 1]] = hidden[i, :n]
                row += 1
            del mask
        keys = np.frombuffer(b"".join(key for _, key, _ in rows), dtype=np.uint8).reshape(len(rows), -1)
        tensors = {"states": states, "offsets": torch.from_numpy(offsets), "keys": torch.from_numpy(keys.copy())}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, temporary)
            checksum = _checksum(temporary)
            os.replace(temporary, path)
            _write_json(path.with_suffix(".json"), {"checksum": checksum, "size": path.stat().st_size})
        except OSError as error:
            temporary.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free
            raise FeatureCacheError(
                f"the feature cache could not write {path} ({error}; {free / 1e6:.0f} MB free). Whole shards stay; free some "
                "space or choose another folder (features_dir, RELISH_HOME) and start again."
            ) from error
        except Exception as error:  # safetensors reports a full disk with an exception of its own
            temporary.unlink(missing_ok=True)
            if "No space left" not in str(error):
                raise
            raise FeatureCacheError(f"the disk of the feature cache {path.parent} is full ({error}).") from error

    def _run(self, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = pad_batch(texts, self.model.config.pad_token_id)
        device = self.model.device
        mask_tensor = torch.tensor(mask, device=device)
        states, _ = self.model.token_states(torch.tensor(ids, device=device), mask_tensor)
        stored = states.to(self.dtype)
        check_finite(stored, mask_tensor, "in the feature cache")
        return stored.cpu(), mask_tensor

    # ------------------------------------------------------------------ read

    def _open_request(self, request: Path) -> None:
        """Map a finished request's shards; one that is damaged is dropped, and computed anew when it is asked for."""
        shards = sorted(request.glob("*.safetensors"))
        expected = json.loads((request / "done.json").read_text())["shards"] if (request / "done.json").exists() else -1
        damaged = [s for s in shards if not _is_whole(s)]
        if damaged or (expected >= 0 and len(shards) != expected):
            logger.warning(
                f"feature cache {request}: {len(damaged) or 'some'} shard(s) damaged or missing; computed anew."
            )
            for shard in damaged:
                shard.unlink()
            (request / "done.json").unlink(missing_ok=True)
            return
        for shard in shards:
            keys, offsets, states = _map_shard(shard)
            for i in range(len(keys)):
                self._where[keys[i].tobytes()] = (states, int(offsets[i]), int(offsets[i + 1]))

    def __contains__(self, ids: Sequence[int]) -> bool:
        return text_key(ids) in self._where

    def states(self, key: bytes) -> torch.Tensor:
        """Return a text's (T, D) states, a view of the mapped file, by its [`text_key`].

        Raises:
            FeatureCacheError: for a text that was never added.
        """
        if key not in self._where:
            raise FeatureCacheError("the text is not in the feature cache; add it first.")
        states, start, stop = self._where[key]
        dtype = torch.bfloat16 if states.dtype == np.uint16 else None
        # A copy of this row alone: torch would warn about a tensor over a read-only map.
        tensor = torch.from_numpy(states[start:stop].copy())
        return tensor.view(dtype) if dtype else tensor


class FeatureDataset(torch.utils.data.Dataset):
    """Rows of cached states with their labels, for any trainer: `hidden_states` (T, D), `labels` (K,), `sample_weight`."""

    def __init__(self, cache: FeatureCache, ids: Sequence[Sequence[int]], columns: dict[str, Any]) -> None:
        self.cache = cache
        self.keys = [text_key(t) for t in ids]
        self.columns = columns

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        states = self.cache.states(self.keys[index])
        return {"hidden_states": states, **{name: values[index] for name, values in self.columns.items()}}


def text_key(ids: Sequence[int]) -> bytes:
    """Digest token ids to 16 bytes, the name of a text in the cache."""
    return hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def _split(rows: list[tuple[int, bytes, list[int]]], tokens: int) -> list[list[tuple[int, bytes, list[int]]]]:
    parts: list[list[tuple[int, bytes, list[int]]]] = [[]]
    filled = 0
    for row in rows:
        if parts[-1] and filled + row[0] > tokens:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += row[0]
    return parts


def _batches(rows: list[tuple[int, bytes, list[int]]], tokens: int) -> list[list[tuple[int, bytes, list[int]]]]:
    """Cut length-sorted rows into batches of at most `tokens`, padding included (the last row of a batch is its longest)."""
    batches: list[list[tuple[int, bytes, list[int]]]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * row[0] > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _map_shard(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Map a safetensors file (an 8-byte header length, a JSON header, the tensors) without reading it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    numpy_types = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I64": np.int64, "U8": np.uint8}

    def tensor(name: str) -> np.ndarray:
        entry = header[name]
        start = 8 + length + entry["data_offsets"][0]
        return np.memmap(path, numpy_types[entry["dtype"]], mode="r", offset=start, shape=tuple(entry["shape"]))

    return np.array(tensor("keys")), np.array(tensor("offsets")), tensor("states")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _is_whole(path: Path) -> bool:
    note = path.with_suffix(".json")
    if not path.exists() or not note.exists():
        return False
    expected = json.loads(note.read_text())
    return path.stat().st_size == expected["size"] and _checksum(path) == expected["checksum"]


def _write_json(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values, indent=1, sort_keys=True))
    os.replace(temporary, path)
