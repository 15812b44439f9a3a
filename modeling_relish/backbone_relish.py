"""From token ids to hidden states: build a backbone, cut it at a layer, load its weights, run it."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import logging

from .configuration_relish import RelishConfig

# Where a transformer keeps its layers (owner, list) and the norm that follows them. The names are those of transformers'
# own models: Llama, Qwen, Gemma, Mistral, Phi ("norm"), GPT-2, Falcon ("ln_f"), OPT, GPT-NeoX, Phi-1 ("final_…"), Mamba-like
# ("norm_f"); BERT-like encoders have none.
_OWNERS = ("", "encoder", "decoder", "transformer")
_LAYER_LISTS = ("layers", "layer", "h", "blocks", "block")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
# Norms that run before the first layer and stay.
_FIRST_NORMS = ("word_embeddings_layernorm", "embedding_norm", "embeddings_layernorm", "input_layer_norm")

EMBEDDED_PREFIX = "embedded:"


class BackboneError(ValueError):
    """A backbone that cannot be built, cut, loaded or trusted; the message names it."""


class BackboneMismatchError(BackboneError):
    """The base model's weights are not those that the head was trained on."""


class NonFiniteStatesError(ValueError):
    """A hidden state is infinite or NaN; the message names the layer, the dtype and the remedy."""


class EmptyRowError(ValueError):
    """A row whose attention mask has no token."""


# ---------------------------------------------------------------------- build and cut


def cut_config(config: PreTrainedConfig, layer: int | None) -> PreTrainedConfig:
    """Return a copy of a backbone's configuration that has `layer` layers (all of them where `None`)."""
    cut = copy.deepcopy(config)
    total = config.num_hidden_layers
    if layer is None or layer == total:
        return cut
    # Some settings are lists with an entry per layer (layer_types, no_rope_layers ...).
    for name, value in list(cut.__dict__.items()):
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(cut, name, value[:layer])
    cut.num_hidden_layers = layer
    return cut


def build_backbone(config: RelishConfig) -> PreTrainedModel:
    """Build the (cut) backbone from its configuration alone, with random weights, on the current device context."""
    if config.backbone_config is None:
        raise BackboneError(
            "this RelishConfig has no backbone_config; start a model with from_backbone(name_or_path, ...)."
        )
    text_config = config.get_text_config()
    _check_architecture(text_config)
    kwargs = _model_kwargs(text_config)
    backbone = AutoModel.from_config(cut_config(text_config, config.cut_layer), **kwargs)
    if config.cut_layer != config.num_hidden_layers:
        remove_final_norm(backbone)
    return backbone


def cut_backbone(backbone: PreTrainedModel, layer: int | None) -> PreTrainedModel:
    """Cut a loaded backbone after `layer` without touching it: the result shares its weights.

    Args:
        backbone: A bare model, as `AutoModel` loads it.
        layer: 1 .. number of layers; `None` keeps all of them and returns `backbone` itself.

    Raises:
        BackboneError: for an architecture that cannot be cut, by name.
    """
    total = backbone.config.num_hidden_layers
    if layer is None or layer == total:
        return backbone
    owner_name, list_name, _ = _find_layers(backbone)
    shell = _shallow_copy(backbone)
    owner = shell
    if owner_name:
        owner = _shallow_copy(getattr(backbone, owner_name))
        setattr(shell, owner_name, owner)
    setattr(owner, list_name, nn.ModuleList(list(getattr(owner, list_name))[:layer]))
    shell.config = cut_config(backbone.config, layer)
    if hasattr(owner, "config"):
        owner.config = shell.config
    remove_final_norm(shell)
    return shell


def remove_final_norm(backbone: PreTrainedModel) -> None:
    """Replace the norm after the layers by the identity, so that the output is the last kept layer's own."""
    owner_name, _, norm = _find_layers(backbone)
    if norm is not None:
        setattr(getattr(backbone, owner_name) if owner_name else backbone, norm, nn.Identity())


def _find_layers(backbone: PreTrainedModel) -> tuple[str, str, str | None]:
    """Return (owner, layer list, final norm or None) as attribute names; refuse what is not surely understood."""
    name = type(backbone).__name__
    for owner_name in _OWNERS:
        owner = getattr(backbone, owner_name, None) if owner_name else backbone
        if owner is None:
            continue
        for list_name in _LAYER_LISTS:
            layers = getattr(owner, list_name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == backbone.config.num_hidden_layers:
                norms = [
                    n for n, m in owner.named_children() if "norm" in type(m).__name__.lower() or n in _FINAL_NORMS
                ]
                final = [n for n in norms if n in _FINAL_NORMS]
                odd = set(norms) - set(_FINAL_NORMS) - set(_FIRST_NORMS)
                if len(final) > 1 or odd:
                    raise BackboneError(
                        f"{name} cannot be cut at a layer: it is not clear which norm follows its layers ({sorted(norms)}). "
                        "Leave backbone_layer=None."
                    )
                return owner_name, list_name, final[0] if final else None
    raise BackboneError(f"{name} cannot be cut at a layer: no list of its layers was found. Leave backbone_layer=None.")


def _shallow_copy(module: nn.Module) -> Any:
    """Copy a module's shell: own attribute and child tables, the children and weights shared."""
    shell = copy.copy(module)
    shell.__dict__ = module.__dict__.copy()
    shell._modules = module._modules.copy()
    return shell


def _check_architecture(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise BackboneError(
            f"{config.model_type} is an encoder-decoder: it has no single sequence of hidden states. Use a decoder or an encoder."
        )
    if type(config) not in MODEL_MAPPING:
        raise BackboneError(
            f"{config.model_type} has no bare model in transformers' AutoModel; it cannot be a backbone."
        )


def _model_kwargs(config: PreTrainedConfig) -> dict[str, Any]:
    """Leave out BERT's pooler: its output is not read, and weights that get no gradient break distributed training."""
    model_class: Any = MODEL_MAPPING[type(config)]
    has_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
    return {"add_pooling_layer": False} if has_pooler else {}


# ---------------------------------------------------------------------- load


def cache_root() -> Path:
    """Return the folder of everything the library keeps on this machine: `RELISH_HOME`, or one in the user's cache."""
    return Path(os.environ.get("RELISH_HOME") or "~/.cache/modeling_relish").expanduser().absolute()


def resolve_backbone(name_or_path: str) -> str:
    """Turn `embedded:NAME` into the folder of a backbone fetched from the package registry; others stay as they are."""
    if not name_or_path.startswith(EMBEDDED_PREFIX):
        return name_or_path
    name = name_or_path.removeprefix(EMBEDDED_PREFIX)
    folder = cache_root() / "backbones" / name
    if not (folder / "config.json").is_file():
        raise BackboneError(
            f"the embedded backbone {name!r} is not on this machine ({folder} is missing). Fetch it with "
            f"`python -m modeling_relish.embedded {name}`, or set RELISH_HOME to the folder that has it."
        )
    return str(folder)


def whole_config(name: str, hub: dict[str, Any]) -> PreTrainedConfig:
    """Read the text configuration of a whole backbone, by its name."""
    try:
        return AutoConfig.from_pretrained(resolve_backbone(name), **hub).get_text_config()
    except (OSError, ValueError) as error:
        raise BackboneError(f"the base model {name!r} cannot be loaded: {error}") from error


def load_backbone(name_or_path: str, layer: int | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load a backbone's weights, only those of the first `layer` layers.

    Args:
        name_or_path: Hub id, folder, or `embedded:NAME`.
        layer: Where to cut; `None` keeps every layer.
        **kwargs: For `AutoModel.from_pretrained`: revision, dtype, device_map, quantization_config, token, ...

    Raises:
        BackboneError: if it is not found, is an encoder-decoder, cannot be cut, or lacks weights.
    """
    path = resolve_backbone(name_or_path)
    hub = {
        k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only", "force_download") if k in kwargs
    }
    try:
        whole = AutoConfig.from_pretrained(path, **hub)
    except (OSError, ValueError) as error:
        raise BackboneError(f"the base model {name_or_path!r}{_at(hub)} cannot be loaded: {error}") from error
    text_config = whole.get_text_config()
    _check_architecture(text_config)
    if text_config is not whole:  # a multimodal model: its language part has the weights under a prefix of its own
        config, model_kwargs = whole, {}
    else:
        config, model_kwargs = cut_config(whole, layer), _model_kwargs(whole)
    backbone = _from_pretrained(path, name_or_path, config, {**model_kwargs, **kwargs})
    if text_config is not whole:
        return cut_backbone(bare_model(backbone), layer)
    if layer is not None and layer != whole.num_hidden_layers:
        remove_final_norm(backbone)
    return backbone


def _from_pretrained(path: str, name: str, config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedModel:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the layers above the cut are reported as unexpected; what is missing is checked below
    try:
        backbone, info = AutoModel.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    except OSError as error:
        raise BackboneError(f"the base model {name!r}{_at(kwargs)} cannot be loaded: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise BackboneError(
            f"the base model {name!r} lacks {len(missing)} weights, as {missing[:3]}; it would be partly random."
        )
    return backbone


def _at(kwargs: Mapping[Any, Any]) -> str:
    return f" at revision {kwargs['revision']!r}" if kwargs.get("revision") else ""


def bare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the bare text model inside a loaded one: without language-model head, without vision tower."""
    model = getattr(model, "base_model", model)
    return getattr(model, "language_model", model)


def without_pooler(backbone: PreTrainedModel) -> PreTrainedModel:
    """Return a loaded BERT-like encoder without its pooler, the given object left as it is."""
    if getattr(backbone, "pooler", None) is None:
        return backbone
    shell = _shallow_copy(backbone)
    shell._modules["pooler"] = None
    return shell


@torch.no_grad()
def weights_digest(backbone: nn.Module) -> str:
    """Digest every byte of a backbone's weights and their names; a second or so per GB."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(backbone.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


@torch.no_grad()
def backbone_fingerprint(backbone: nn.Module) -> str | None:
    """Digest a backbone's weights cheaply: name, shape and 16 spread values of every tensor.

    fp32 is rounded to bf16, so that a checkpoint digests alike in both. The text before the colon names the dtypes: digests
    can be compared only where it is equal. `None` while the weights are on the meta device.
    """
    digest = hashlib.sha256()
    dtypes = set()
    for name, parameter in sorted(backbone.named_parameters()):
        if parameter.is_meta:
            return None
        flat = parameter.detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, 16, dtype=torch.float64).long().to(flat.device)
        values = flat[where]
        values = values.to(torch.bfloat16) if values.dtype == torch.float32 else values
        dtypes.add(str(values.dtype).removeprefix("torch."))
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return f"{'+'.join(sorted(dtypes))}:{digest.hexdigest()[:32]}"


def fingerprints_differ(one: str | None, other: str | None) -> bool:
    """Whether two digests are comparable and say that the weights are not the same."""
    if not one or not other:
        return False
    return one.split(":")[0] == other.split(":")[0] and one != other


# ---------------------------------------------------------------------- run


def position_ids_from_mask(mask: torch.Tensor, backbone: nn.Module) -> torch.Tensor | None:
    """Count positions over real tokens, so that padding on the left moves nothing.

    Args:
        mask: (B, T), 1 = token.
        backbone: Looked at for whether it takes position ids, and where its positions start (RoBERTa: after the
            padding index).

    Returns:
        (B, T) int64, or `None` where the backbone has no absolute or rotary positions to set.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return None
    embeddings = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    offset = 0 if padding_idx is None else padding_idx + 1
    positions = mask.long().cumsum(-1) - 1
    return positions.clamp(min=0) + offset


def check_rows(mask: torch.Tensor) -> None:
    """Raise [`EmptyRowError`] for the first row of a (B, T) mask that has no token."""
    if torch.compiler.is_compiling() or mask.is_meta:
        return
    empty = ~mask.bool().any(-1)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise EmptyRowError(
            f"row {row} of the batch has no token: its attention_mask is all zero. Drop the row or give it text."
        )


def check_finite(states: torch.Tensor, mask: torch.Tensor, where: str) -> None:
    """Raise [`NonFiniteStatesError`] if a token's state (B, T, D) is infinite or NaN; padding is not looked at.

    A sum is finite only if its terms are, and reads the states once. fp32 accumulation keeps a large but finite bf16 row
    finite.
    """
    if torch.compiler.is_compiling() or states.is_meta:
        return
    sums = states.detach().sum(-1, dtype=torch.float32)
    bad = ~torch.isfinite(sums) & mask.bool()
    if bool(bad.any()):
        row, token = (int(i) for i in bad.nonzero()[0])
        raise NonFiniteStatesError(
            f"the hidden state of row {row}, token {token} ({where}, {states.dtype}) is not finite. "
            "float16 ends at 65504, which middle layers of some models exceed (Gemma 3 from layer 8): load the backbone "
            "and keep the features in bfloat16 or float32."
        )
