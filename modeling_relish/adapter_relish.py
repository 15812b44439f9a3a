"""Adapters (PEFT): a folder with LoRA weights and head, found, put onto its base model, checked, and saved to stand alone.

Beside PEFT's own two files the folder holds the RelishConfig: the base model's name and fingerprint, the template and the
label's scale, without which an adapter would answer in another unit.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, cached_file, find_adapter_config_file, is_peft_available, logging

from .backbone_relish import BackboneError
from .configuration_relish import RelishConfig
from .weights_relish import quantization_of

logger = logging.get_logger(__name__)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "score"
PREFIX = "base_model.model."


class AdapterError(BackboneError):
    """An adapter that cannot be loaded or saved as it is; the message names it."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder or hub id, its name in the model, how to reach it, and what its configuration says."""

    source: str
    name: str
    hub: dict[str, Any]
    settings: dict[str, Any]

    def own_config(self) -> str | None:
        """Return `source` where a RelishConfig lies beside the adapter, else `None`."""
        return self.source if _is_relish(self.source, self.hub) else None

    def base(self, config: RelishConfig) -> str | None:
        """Return the saved RELISH model that the adapter stands on; `None` where it is the language model itself."""
        named = self.settings.get("base_model_name_or_path")
        if not config.backbone_in_checkpoint or named in (None, self.source, config.backbone_name_or_path):
            return None
        return named


def find_adapter(name: str, kwargs: dict[str, Any], hub: dict[str, Any]) -> Adapter | None:
    """Return the adapter that a folder or hub id holds, or that the Auto classes have found there.

    Args:
        name: Folder or hub id.
        kwargs: Of `from_pretrained`; what concerns adapters is taken out.
        hub: How to reach the hub: revision, token, ...

    Raises:
        AdapterError: if there is one and PEFT is not installed.
    """
    more = dict(kwargs.pop("adapter_kwargs", None) or {})
    adapter_name = kwargs.pop("adapter_name", None) or "default"
    source = more.pop("_adapter_model_path", None) or name
    hub = {**hub, **more} if source == name else more  # a revision belongs to the repository it was given for
    file = find_adapter_config_file(source, **hub)
    if file is None:
        return None
    if not is_peft_available():
        raise _needs_peft(f"the adapter {source!r}")
    return Adapter(source, adapter_name, hub, json.loads(Path(file).read_text(encoding="utf-8")))


def adapter_config(adapter: Adapter, **settings: Any) -> RelishConfig:
    """Read the RelishConfig beside the adapter, else that of the saved RELISH model it stands on; `settings` override it.

    Raises:
        AdapterError: if there is neither.
    """
    if own := adapter.own_config():
        return RelishConfig.from_pretrained(own, **adapter.hub, **settings)
    base = adapter.settings.get("base_model_name_or_path")
    if base and _is_relish(base, {}):
        return RelishConfig.from_pretrained(base, **settings)
    raise AdapterError(
        f"the adapter {adapter.source!r} has no {CONFIG_NAME} of a RELISH model, and its base model {base!r} is none: the "
        f"template and the label's scale are lost. Write it with model.config.save_pretrained({adapter.source!r}). "
        "RelishTrainer does, and save_pretrained of the model inside the PeftModel (get_base_model())."
    )


def _is_relish(name: str, hub: dict[str, Any]) -> bool:
    file = cached_file(
        name, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False, **hub
    )
    return (
        file is not None
        and json.loads(Path(file).read_text(encoding="utf-8")).get("model_type") == RelishConfig.model_type
    )


def put_on(model: Any, adapter: Adapter) -> None:
    """Put an adapter's weights and its head onto a model, for inference.

    Args:
        model: A RELISH model on the adapter's base; changed in place.
        adapter: From [`find_adapter`].

    Raises:
        AdapterError: if it lacks the head or any weight, has another shape, or is not in safetensors.
    """
    try:  # not transformers' own load_adapter: with PEFT 0.21 it loses the magnitudes of DoRA
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise _needs_peft(f"the adapter {adapter.source!r}") from error
    file = cached_file(adapter.source, ADAPTER_WEIGHTS, _raise_exceptions_for_missing_entries=False, **adapter.hub)
    if file is None:
        raise AdapterError(f"the adapter {adapter.source!r} has no {ADAPTER_WEIGHTS}; pickled weights are never read.")
    if (
        "disk" in (getattr(model, "hf_device_map", None) or {}).values()
    ):  # the adapter's own weights would be lost there
        raise AdapterError(
            f"the adapter {adapter.source!r} cannot be put on layers that are offloaded to the disk. Merge it where there is "
            "memory (PeftModel.merge_and_unload), save that model, and load it with the device_map."
        )
    with safe_open(file, framework="pt") as stored:
        found = set(stored.keys())
    problem = "it holds no head, or a part of it is missing"
    if any(key.startswith(f"{PREFIX}{HEAD}.") for key in found):
        try:
            PeftModel.from_pretrained(model, adapter.source, adapter.name, **adapter.hub)
            wanted = {
                f"{PREFIX}{k}"
                for k in get_peft_model_state_dict(model, None, adapter.name, save_embedding_layers=False)
            }
            problem = f"differs in {wrong[:4]} ({len(wrong)} in all)" if (wrong := sorted(wanted ^ found)) else ""
        except (KeyError, RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    if problem:
        raise AdapterError(
            f"the adapter {adapter.source!r} does not fit the model that its config describes: {problem}. An adapter for RELISH "
            f"is trained with task_type='SEQ_CLS', which keeps the head {HEAD!r} with it."
        )
    model.requires_grad_(False)
    model.eval()
    model.name_or_path = os.fspath(adapter.source)


def _needs_peft(what: str) -> AdapterError:
    return AdapterError(f"{what} needs the package peft: pip install peft.")


def save_adapter(model: Any, folder: str | os.PathLike, adapter_name: str = "default", state_dict: Any = None) -> None:
    """Write an adapter, the head and the RelishConfig; PEFT, the Auto classes and `from_pretrained` read them.

    Args:
        model: A RELISH model with an adapter on it.
        folder: Created if missing.
        adapter_name: Which one.
        state_dict: The model's weights, where they were gathered before.
    """
    try:
        from peft import get_peft_model_state_dict
    except ImportError as error:
        raise _needs_peft("saving an adapter") from error
    settings = model.peft_config[adapter_name]
    if not (model.config.backbone_name_or_path or settings.base_model_name_or_path):
        logger.warning_once(
            "the adapter's base model has no name, or is not what lies under it: its weights are not saved with the adapter. To "
            "have them again, save the model with save_pretrained first, load it from there, and put the adapter on that."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model, state_dict, adapter_name, save_embedding_layers=False)
    tensors = {f"{PREFIX}{k.removeprefix(PREFIX)}": v.detach().contiguous() for k, v in weights.items()}
    temporary = folder / f".{ADAPTER_WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / ADAPTER_WEIGHTS)
    was, settings.inference_mode = settings.inference_mode, True
    settings.save_pretrained(folder)
    settings.inference_mode = was
    complete_adapter(model, folder)


def complete_adapter(model: Any, folder: str | os.PathLike) -> None:
    """Make the adapter that PEFT wrote into a folder stand alone: write the RelishConfig there and name the base model.

    The targets are written by their full names: on a language model without RELISH around it they match nothing, so that an
    adapter put there by mistake is an error and not a random head's score.
    """
    file = Path(folder) / ADAPTER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("base_model_name_or_path") is None:
        settings["base_model_name_or_path"] = model.config.backbone_name_or_path
        settings["revision"] = model.config.backbone_revision
    if adapted := adapted_modules(model.backbone):
        settings["target_modules"] = [f"backbone.{name}" for name in adapted]
    temporary = file.with_name(f".{ADAPTER_CONFIG}.tmp")
    temporary.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(file)
    config: PreTrainedConfig = model.config
    config.architectures = [type(model).__name__]
    config.dtype = str(model.backbone.dtype).removeprefix("torch.")
    config.backbone_in_checkpoint = not model.base_is_named()
    if (quantization := quantization_of(model.backbone)) is not None:
        config.quantization_config = quantization
    model._forget_old_figures()
    config.save_pretrained(folder)


def remove_adapter(folder: str | os.PathLike) -> None:
    """Remove an adapter that an earlier save left beside a model: it would be loaded in that model's place."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (Path(folder) / name).unlink(missing_ok=True)


def active_head(score: Any) -> Any:
    """Return the head itself, also where PEFT has wrapped it (`ModulesToSaveWrapper`) to train it with an adapter."""
    trained = getattr(score, "modules_to_save", None)
    if trained is None:
        return score
    active = [name for name in score.active_adapters if name in trained]
    return trained[active[0]] if active and not score.disable_adapters else score.original_module


def adapted_modules(backbone: nn.Module) -> list[str]:
    """Return the names of the modules that an adapter wraps."""
    return [name for name, module in backbone.named_modules() if hasattr(module, "base_layer")]
