"""Weights: recognised by digests, read from a checkpoint, laid out as they were before saving."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .backbone_relish import BackboneError
from .base_model_relish import reading

_TABLE_ROWS = 16384


@torch.no_grad()
def weights_digest(backbone: nn.Module) -> str:
    """Digest every byte of a backbone's weights and their names; a second or so per GB."""
    return tensors_digest(backbone.state_dict().items())


@torch.no_grad()
def tensors_digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Digest every byte of named tensors, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest.update(values)
    return digest.hexdigest()


@torch.no_grad()
def backbone_fingerprint(backbone: nn.Module, *, fine: bool = False, embeddings: bool = False) -> str | None:
    """Digest a backbone's weights cheaply: name, shape and 16 spread values of every tensor; those of an adapter do not count.

    fp32 is rounded to bf16, so that a checkpoint digests alike in both. The text before the first colon names the dtypes:
    digests can be compared only where it is equal. `None` while the weights are on the meta device.

    Args:
        backbone: A bare model, or one with an adapter in it.
        fine: 256 values of every tensor, not rounded, and all of the embeddings: for a change within one process that may be
            small, or of a few tokens alone.
        embeddings: All of the embeddings, behind a second colon: a few tokens may have been trained or added alone.
    """
    digest = hashlib.sha256()
    dtypes = set()
    rows_sum = 0
    tables = {id(module.weight) for module in backbone.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in sorted(_base_parameters(backbone)):
        if parameter.is_meta:
            return None
        flat = parameter.detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, 256 if fine else 16, dtype=torch.float64).long().to(flat.device)
        values = flat[where]
        values = values.to(torch.bfloat16) if values.dtype == torch.float32 and not fine else values
        dtypes.add(str(values.dtype).removeprefix("torch."))
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        if (fine or embeddings) and id(parameter) in tables and flat.element_size() in (2, 4):
            rows_sum += _table_sum(parameter.detach(), exact=fine)
    if fine:
        digest.update(str(rows_sum).encode())
    found = f"{'+'.join(sorted(dtypes))}:{digest.hexdigest()[:32]}"
    return f"{found}:{rows_sum % 2**64:016x}" if embeddings else found


def _table_sum(table: torch.Tensor, *, exact: bool) -> int:
    """Sum the bits of an embedding table, a row times its place, so that rows that change places count too."""
    total = 0
    for start in range(0, len(table), _TABLE_ROWS):  # in parts, for a large one's copy would take gigabytes
        part = table[start : start + _TABLE_ROWS]
        part = part.to(torch.bfloat16) if part.dtype == torch.float32 and not exact else part
        bits = part.contiguous().view(torch.int16 if part.element_size() == 2 else torch.int32)
        rows = bits.reshape(len(bits), -1).sum(1, dtype=torch.int64)
        total += int((rows * torch.arange(start + 1, start + 1 + len(rows), device=rows.device)).sum())
    return total


def realign(head: torch.nn.Module) -> None:
    """Copy weights out of the mapped file: at odd addresses, products of one row round otherwise than before saving."""
    for parameter in head.parameters():
        if not parameter.is_meta and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()


def bring_back(head: nn.Module) -> None:
    """Bring back a head that `device_map` has offloaded to CPU or disk, to stay where it computes.

    It is small, and it reads weights of its parts without calling them, which is where accelerate would bring them.
    """
    if not any(parameter.is_meta for parameter in head.parameters()):
        return
    try:
        from accelerate.hooks import remove_hook_from_module
    except ImportError as error:
        raise BackboneError("an offloaded model needs the package accelerate: pip install accelerate.") from error
    for module in head.modules():
        outer = getattr(module, "_hf_hook", None)
        for hook in getattr(outer, "hooks", [outer]):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta and getattr(hook, "weights_map", None) is not None:
                    value = hook.weights_map[name].to(parameter.dtype)
                    module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
    remove_hook_from_module(head, recurse=True)


def remove_stale_weights(folder: str | os.PathLike) -> None:
    """Of one file of weights and an index of several, remove the one that an earlier save left: it would be read first."""
    both = [Path(folder) / name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if all(path.exists() for path in both):
        min(both, key=lambda path: path.stat().st_mtime_ns).unlink()


def keep_4_bit_weights(backbone: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first evaluation on a CPU with AVX512-BF16.

    No gradient passes packed weights, and what undoes the packing, which taking a state dict does, brings other weights back
    (bitsandbytes 0.50).
    """
    for module in backbone.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def stand_beside(model: Any, base: PreTrainedModel) -> None:
    """Put a model's head where its base model is, and give the model what the base says of its devices and quantisation."""
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # by these PEFT and Trainer know that it is quantised
        if getattr(base, name, False):
            setattr(model, name, True)
    device = next((p.device for p in base.parameters() if not p.is_meta), torch.device("cpu"))
    model.score.to(device)
    if device_map := getattr(base, "hf_device_map", None):
        prefixed = {f"backbone.{name}" if name else "backbone": where for name, where in device_map.items()}
        model.hf_device_map = {**prefixed, "score": device}


def quantization_of(backbone: PreTrainedModel) -> dict[str, Any] | None:
    """Return how a backbone was quantised as it was loaded, for its configuration."""
    found: Any = getattr(backbone.config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


def _base_parameters(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that they have without an adapter, which PEFT puts around a layer."""
    wrapped = {name for name, module in backbone.named_modules() if hasattr(module, "base_layer")}
    for name, parameter in backbone.named_parameters():
        parts = name.split(".")
        owner = next((".".join(parts[:i]) for i in range(len(parts)) if ".".join(parts[:i]) in wrapped), None)
        if owner is None:
            yield name, parameter
        elif name.startswith(f"{owner}.base_layer."):
            yield f"{owner}.{name.removeprefix(f'{owner}.base_layer.')}", parameter


def adapter_parameters(backbone: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an adapter has put into a backbone, by their names there."""
    base = {id(parameter) for _, parameter in _base_parameters(backbone)}
    return {name: parameter for name, parameter in backbone.named_parameters() if id(parameter) not in base}


def check_no_others_adapter(model: Any) -> None:
    """Refuse, as [`BackboneError`], a model whose backbone carries an adapter that was put there for another one.

    Heads can share a backbone. One that is trained with an adapter puts it into the layers of all, whose scores move.
    """
    if not getattr(model, "peft_config", None) and (added := list(adapter_parameters(model.backbone))):
        raise BackboneError(
            f"the backbone has another model's adapter on it ({added[0]} and {len(added) - 1} more weights): scores would be "
            "wrong, and it would be lost. Take it off (merge_and_unload() or unload()), or load the backbone again for this head."
        )


def fingerprints_differ(one: str | None, other: str | None) -> bool:
    """Whether two digests are comparable and say that the weights are not the same."""
    if not one or not other:
        return False
    (kind, digest, *table), (other_kind, other_digest, *other_table) = one.split(":"), other.split(":")
    tables_differ = bool(table and other_table) and table != other_table  # older checkpoints have none
    return kind == other_kind and (digest != other_digest or tables_differ)


def load_head(score: nn.Module, name: str, hub: dict[str, Any]) -> None:
    """Load the head's weights from a checkpoint; raises [`BackboneError`] where it holds another head."""
    with reading(f"the checkpoint {name!r}"):
        file: Any = cached_file(name, SAFE_WEIGHTS_NAME, **hub)
    state = {k.removeprefix("score."): v for k, v in load_file(file).items() if k.startswith("score.")}
    expected = score.state_dict()
    wrong = sorted(k for k in expected if k not in state or state[k].shape != expected[k].shape)
    wrong += sorted(set(state) - set(expected))
    if wrong:
        raise BackboneError(
            f"the checkpoint {name!r} does not hold the head that its config describes; it differs in {wrong[:4]} "
            f"({len(wrong)} in all)."
        )
    score.load_state_dict(state)
