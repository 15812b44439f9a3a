"""Hidden states on disk: one shard is a safetensors file with a note of its size and checksum, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from .base_model_relish import cache_root

Row = tuple[int, bytes, list[int]]  # tokens, key, token ids


def text_key(ids: Sequence[int]) -> bytes:
    """Digest token ids to 16 bytes, the name of a text in the cache."""
    return hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def split_rows(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Cut rows into shards of at most `tokens` each, in order; a longer row has a shard of its own."""
    parts: list[list[Row]] = [[]]
    filled = 0
    for row in rows:
        if parts[-1] and filled + row[0] > tokens:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += row[0]
    return parts


def batches_of(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Cut length-sorted rows into batches of at most `tokens`, padding included (the last row of a batch is its longest)."""
    batches: list[list[Row]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * row[0] > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


@dataclass(frozen=True)
class Shard:
    """A mapped shard: keys (N, 16), offsets (N + 1,), states (sum of T, D), and int8's scales (sum of T, 1)."""

    keys: np.ndarray
    offsets: np.ndarray
    states: np.ndarray
    scales: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Copy some tokens' states out of the map (torch warns about tensors over a read-only one)."""
        tensor = torch.from_numpy(self.states[start:stop].copy())
        if self.states.dtype == np.uint16:  # numpy has no bfloat16
            return tensor.view(torch.bfloat16)
        return tensor if self.scales is None else tensor.float() * torch.from_numpy(self.scales[start:stop].copy())


def map_shard(path: Path) -> Shard:
    """Map a safetensors file (an 8-byte header length, a JSON header, the tensors) without reading it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    types = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I64": np.int64, "U8": np.uint8, "I8": np.int8}

    def tensor(name: str) -> np.ndarray:
        entry = header[name]
        start = 8 + length + entry["data_offsets"][0]
        return np.memmap(path, types[entry["dtype"]], mode="r", offset=start, shape=tuple(entry["shape"]))

    scales = tensor("scales") if "scales" in header else None
    return Shard(np.array(tensor("keys")), np.array(tensor("offsets")), tensor("states"), scales)


def encode_states(states: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that keep (sum of T, D) states in a dtype; int8 takes a scale per token."""
    if dtype != torch.int8:
        return {"states": states.to(dtype)}
    scales = states.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return {"states": (states / scales).round().to(torch.int8), "scales": scales.float()}


def checksum(path: Path) -> str:
    """Digest a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_whole(path: Path) -> bool:
    """Whether a shard is there with the size and checksum that were noted when it was written."""
    note = read_json(path.with_suffix(".json"))
    return path.exists() and path.stat().st_size == note.get("size") and checksum(path) == note.get("checksum")


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a note; none where it is missing or damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON under a temporary name and rename it."""
    temporary = temporary_name(path)
    try:
        temporary.write_text(json.dumps(values, indent=1, sort_keys=True))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Name a file's temporary after its writer, so that it is known whether that one still runs."""
    return path.with_suffix(f".{platform.node()}.{os.getpid()}.tmp")


def remove_left_over(folder: Path) -> None:
    """Remove what processes of this machine left half written when they were killed."""
    for file in folder.rglob(f"*.{platform.node()}.*.tmp"):
        if not _runs(int(file.name.split(".")[-2])):
            file.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        if os.name == "posix":  # elsewhere signal 0 is no question
            os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def save_shard(path: Path, rows: Sequence[Row], tensors: dict[str, torch.Tensor]) -> None:
    """Write a shard under a temporary name, rename it, and note its size and checksum.

    Args:
        path: `NNNNN.safetensors`.
        rows: The texts in it, in order.
        tensors: `states` (sum of T, state size), and what decodes them.
    """
    offsets = np.concatenate([[0], np.cumsum([n for n, _, _ in rows])])
    keys = np.frombuffer(b"".join(key for _, key, _ in rows), dtype=np.uint8).reshape(len(rows), -1)
    whole = {**tensors, "offsets": torch.from_numpy(offsets), "keys": torch.from_numpy(keys.copy())}
    temporary = temporary_name(path)
    try:
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, temporary)
        digest = checksum(temporary)
        temporary.replace(path)
        write_json(path.with_suffix(".json"), {"checksum": digest, "size": path.stat().st_size})
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class CacheEntry:
    """One cache in a feature folder: what it holds, and its size in bytes."""

    folder: Path
    backbone: str
    layers: str
    dtype: str
    texts: int
    tokens: int
    size: int

    @property
    def name(self) -> str:
        """The fingerprint, which is the folder's name."""
        return self.folder.name


def list_caches(root: str | os.PathLike | None = None) -> list[CacheEntry]:
    """Return the caches in a feature folder (`None` = the library's), the largest first."""
    entries = []
    for manifest in Path(root or cache_root() / "features").glob("*/manifest.json"):
        values, folder = read_json(manifest), manifest.parent
        offsets = [map_shard(shard).offsets for shard in folder.glob("*/*.safetensors") if is_whole(shard)]
        entries.append(
            CacheEntry(
                folder=folder,
                backbone=str(values.get("backbone")),
                layers=", ".join(map(str, values.get("layers", []))),
                dtype=str(values.get("storage_dtype")).removeprefix("torch."),
                texts=sum(len(o) - 1 for o in offsets),
                tokens=sum(int(o[-1]) for o in offsets),
                size=sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
            )
        )
    return sorted(entries, key=lambda entry: -entry.size)
