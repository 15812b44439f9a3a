"""From token ids to hidden states: build a backbone, cut it at a layer, run it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .configuration_relish import RelishConfig

# Where a transformer keeps its layers (owner, list) and the norm that follows them. The names are those of transformers'
# own models: Llama, Qwen, Gemma, Mistral, Phi ("norm"), GPT-2, Falcon ("ln_f"), OPT, GPT-NeoX, Phi-1 ("final_…"), Mamba-like
# ("norm_f"); BERT-like encoders have none.
_OWNERS = ("", "encoder", "decoder", "transformer")
_LAYER_LISTS = ("layers", "layer", "h", "blocks", "block")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
# Norms that run before the first layer and stay.
_FIRST_NORMS = ("word_embeddings_layernorm", "embedding_norm", "embeddings_layernorm", "input_layer_norm")

# Whose states of tokens move with the padding beside them, whatever the mask says.
_READS_PADDING = ("convbert",)
_READS_LEFT_PADDING = ("rwkv",)


class BackboneError(ValueError):
    """A backbone that cannot be built, cut, loaded or trusted; the message names it."""


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
    check_architecture(text_config, config.reads_language_model)
    if config.reads_language_model:
        return AutoModelForCausalLM.from_config(text_config)
    kwargs = model_kwargs(text_config)
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
    shell = shallow_copy(backbone)
    owner = shell
    if owner_name:
        owner = shallow_copy(getattr(backbone, owner_name))
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


def shallow_copy(module: nn.Module) -> Any:
    """Copy a module's shell: own attribute and child tables, the children and weights shared."""
    if isinstance(module, PreTrainedModel):
        # transformers hooks the layers when hidden states are first asked for, once per model. Two models over the same
        # layers would hook them twice, and both return every state twice; hooked before the copy, they share the hooks.
        maybe_install_capturing_hooks(module)
    shell = copy.copy(module)
    shell.__dict__ = module.__dict__.copy()
    shell._modules = module._modules.copy()
    return shell


def check_architecture(config: PreTrainedConfig, causal_lm: bool = False) -> None:
    """Refuse, by name, an architecture without one sequence of hidden states.

    Raises:
        BackboneError: for an encoder-decoder, and for what `AutoModel` does not know; with `causal_lm`, for what does not
            say a next token.
    """
    # BERT-like encoders have a causal class too, which is of use only to weights that were trained for it.
    if causal_lm and (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not _is_decoder(config)):
        raise BackboneError(
            f"{config.model_type} is no causal language model: it gives numbers no probabilities. Use head_type "
            "relish, linear or mlp."
        )
    if config.is_encoder_decoder:
        raise BackboneError(
            f"{config.model_type} is an encoder-decoder: it has no single sequence of hidden states. Use a decoder or an encoder."
        )
    if config.model_type in _READS_PADDING:
        raise BackboneError(
            f"{config.model_type} has convolutions over its tokens that read padding: a score would depend on the other texts of "
            "its batch. Use another encoder."
        )
    if type(config) not in MODEL_MAPPING:
        raise BackboneError(
            f"{config.model_type} has no bare model in transformers' AutoModel; it cannot be a backbone."
        )


def check_language_model(model: PreTrainedModel) -> None:
    """Refuse, by name, a loaded model that gives no probabilities of a next token; raises [`BackboneError`]."""
    check_architecture(model.config.get_text_config(), causal_lm=True)
    if model.get_output_embeddings() is None:
        raise BackboneError(
            f"{type(model).__name__} has no output layer, so it gives numbers no probabilities: load it with "
            "AutoModelForCausalLM."
        )


def _is_decoder(config: PreTrainedConfig) -> bool:
    has_switch = hasattr(config, "is_decoder") and type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return bool(config.is_decoder) if has_switch else True


def model_kwargs(config: PreTrainedConfig) -> dict[str, Any]:
    """Leave out BERT's pooler: its output is not read, and weights that get no gradient break distributed training."""
    model_class: Any = MODEL_MAPPING[type(config)]
    has_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
    return {"add_pooling_layer": False} if has_pooler else {}


# ---------------------------------------------------------------------- run


def layer_states(backbone: PreTrainedModel, layers: Sequence[int], **inputs: Any) -> torch.Tensor:
    """Run a backbone once and return the states of several of its layers, (B, T, len(layers) * D) in their order.

    Layer k's states are `hidden_states[k]`; the last layer's are the backbone's own output.
    """
    owner_name, list_name, _ = _find_layers(backbone)
    modules = getattr(getattr(backbone, owner_name) if owner_name else backbone, list_name)
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [modules[layer - 1].register_forward_hook(keep(layer)) for layer in layers]
    try:
        output = backbone(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    found[len(modules)] = output
    return torch.cat([found[layer] for layer in layers], dim=-1)


def position_ids_from_mask(mask: torch.Tensor, backbone: PreTrainedModel) -> torch.Tensor | None:
    """Count positions over real tokens, so that padding on the left moves nothing.

    Args:
        mask: (B, T), 1 = token.
        backbone: Looked at for whether it takes position ids, and where its positions start (RoBERTa: after the
            padding index).

    Returns:
        (B, T) int64, or `None` where the backbone has no absolute or rotary positions to set.

    Raises:
        BackboneError: for padding on the left of a recurrent model that takes no mask.
    """
    model_type = backbone.config.model_type
    if model_type in _READS_LEFT_PADDING and not torch.compiler.is_compiling() and not bool(mask[:, 0].all()):
        raise BackboneError(
            f"{model_type} carries what it reads from token to token, padding too: pad on the right (tokenizer.padding_side)."
        )
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return None
    positions = mask.long().cumsum(-1) - 1
    return positions.clamp(min=0) + first_position(backbone)


def first_position(backbone: nn.Module) -> int:
    """Return the position of a model's first token: 0, or the one behind RoBERTa's padding index."""
    bare = getattr(backbone, "base_model", backbone)
    embeddings = getattr(getattr(bare, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    return 0 if padding_idx is None else padding_idx + 1


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
