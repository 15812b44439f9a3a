"""A base model that comes as an object: is it still what lies under its name?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .backbone_relish import BackboneError
from .base_model_relish import bare_model, base_path, whole_config

_ROWS = 4  # of every tensor: training moves them all


def name_of(model: PreTrainedModel) -> str | None:
    """Return the name that a loaded model came from.

    `None` where it has none, and where it is no longer what lies under the name, for it would be lost if only the name were
    saved: tokens were added, or weights were trained.
    """
    name = model.config._name_or_path or None
    if name is None:
        return None
    if Path(name).is_dir():  # a relative folder would mean another one from another place
        name = str(Path(name).resolve())
    try:
        there = whole_config(name, {})
        files = _weight_files(base_path(name), getattr(model.config, "_commit_hash", None))
    except (BackboneError, OSError):  # gone or out of reach: told where it is needed
        return name
    same = there.vocab_size == model.config.get_text_config().vocab_size and not _differs(model, files)
    return name if same else None


def _weight_files(path: str, commit: str | None) -> list[Path]:
    """Return a checkpoint's files of weights that are on this machine, of the commit that was loaded; nothing is fetched."""
    if Path(path).is_dir():
        return sorted(Path(path).glob("*.safetensors"))
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        found = cached_file(
            path, name, revision=commit, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            return sorted(Path(found).parent.glob("*.safetensors"))
    return []


@torch.no_grad()
def _differs(model: PreTrainedModel, files: list[Path]) -> bool:
    """Whether some rows of a weight are not those of the file; what has another name, shape or kind there is passed over."""
    owners = {f"{prefix}{name}": p for name, p in bare_model(model).named_parameters() for prefix in _prefixes(model)}
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                parameter = owners.get(key)
                if parameter is None or parameter.is_meta or not parameter.is_floating_point():
                    continue
                part = opened.get_slice(key)
                if tuple(part.get_shape()) != tuple(parameter.shape) or not parameter.dim():
                    continue
                for row in _spread(len(parameter)):
                    if not _equal(parameter[row : row + 1].cpu(), part[row : row + 1]):
                        return True
    return False


def _prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    return "", f"{model.base_model_prefix}."


def _spread(length: int) -> Iterator[int]:
    return (round(i * (length - 1) / (_ROWS - 1)) for i in range(_ROWS))


def _equal(loaded: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a row is the stored one, perhaps rounded on its way."""
    if not stored.is_floating_point():
        return True
    roundings = (loaded.dtype, torch.bfloat16, torch.float16)
    return any(torch.equal(loaded.float(), stored.to(dtype).to(loaded.dtype).float()) for dtype in roundings)
