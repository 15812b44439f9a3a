"""What a RELISH configuration may say: the names it knows, and the checks of its values."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

HEAD_TYPES = ("relish", "linear", "mlp", "special_token", "number_grid", "final_logits_mlp")
# Heads that read the language model's distribution over tokens, not its states: their backbone keeps its output layer.
LM_HEADS = ("number_grid", "final_logits_mlp")
POOLINGS = ("mean", "last", "first")
LATENT_INITS = ("learned", "first", "last", "mean", "max")
LATENT_COMBINATIONS = ("mean", "concat")
REGRESSORS = ("linear", "mlp")
GRID_OBJECTIVES = ("raft", "mbr", "cross_entropy")
OBJECTIVES = ("huber", "mse", *GRID_OBJECTIVES)
# A layer that RelishTrainer is to choose.
AUTO_LAYER = "auto"
TRUNCATIONS = ("longest_first", "error")
# Of every transformers configuration, beside the fields of ours.
LABEL_SETTINGS = {"num_labels", "id2label", "label2id"}


class RelishConfigError(ValueError):
    """A setting of [`RelishConfig`] that cannot be meant; the message says what came and what was expected."""


def per_target(config: PreTrainedConfig, name: str) -> list[float] | None:
    """Return a setting with one finite float per target, or `None`."""
    value = getattr(config, name)
    if value is None:
        return None
    values = [float(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    if len(values) != config.num_labels:
        raise RelishConfigError(
            f"{name} has {len(values)} value(s), but num_labels is {config.num_labels}: give one value per target."
        )
    if not all(math.isfinite(v) for v in values):
        raise RelishConfigError(f"{name} must be finite, got {values}.")
    return values


def check_num_labels(num_labels: int | None, id2label: dict[Any, str] | None) -> None:
    """Refuse another number of targets than those that have names.

    TRL asks for one label when it loads a reward model by its path. transformers would warn and keep the K targets, and the
    first of them would pass for the reward.
    """
    if num_labels is not None and id2label is not None and len(id2label) != num_labels:
        raise RelishConfigError(
            f"num_labels={num_labels} was asked for, but the targets are {list(id2label.values())}. One reward from several "
            "targets: save modeling_relish.as_reward_model(model, weights), and load that."
        )


def check_head(config: PreTrainedConfig) -> None:
    """Check what the head is made of."""
    _one_of("head_type", config.head_type, HEAD_TYPES)
    _one_of("pooling", config.pooling, POOLINGS)
    _one_of("objective", config.objective, OBJECTIVES)
    _one_of("latent_init", config.latent_init, LATENT_INITS)
    _one_of("latent_combination", config.latent_combination, LATENT_COMBINATIONS)
    _one_of("regressor", config.regressor, REGRESSORS)
    for name in ("head_hidden_size", "head_num_attention_heads", "head_intermediate_size", "num_refinement_steps"):
        _positive_int(name, getattr(config, name))
    _positive_int("num_latents", config.num_latents)
    if not isinstance(config.share_refinement_steps, bool):
        raise RelishConfigError(f"share_refinement_steps must be true or false, got {config.share_refinement_steps!r}.")
    if config.head_hidden_size % config.head_num_attention_heads:
        raise RelishConfigError(
            f"head_hidden_size ({config.head_hidden_size}) must be a multiple of head_num_attention_heads "
            f"({config.head_num_attention_heads})."
        )
    if not 0 <= config.head_dropout < 1:
        raise RelishConfigError(f"head_dropout must lie in [0, 1), got {config.head_dropout}.")
    _check_language_model_head(config)


def _check_language_model_head(config: PreTrainedConfig) -> None:
    if config.objective in GRID_OBJECTIVES and config.head_type != "number_grid":
        raise RelishConfigError(
            f'objective {config.objective!r} is about the probabilities of numbers: it needs head_type="number_grid", got '
            f"{config.head_type!r}."
        )
    if config.objective == "mbr" and not config.normalize_grid:
        raise RelishConfigError(
            'objective "mbr" needs normalize_grid=True: its least loss is else no probability on any number at all.'
        )
    if config.head_type in (*LM_HEADS, "special_token") and (config.backbone_layer or config.backbone_layers):
        raise RelishConfigError(
            f"a {config.head_type} head reads what the language model says at its end: leave backbone_layer=None."
        )
    if config.head_type == "number_grid" and config.num_labels != 1:
        raise RelishConfigError(f"a number_grid head answers with one number, got num_labels={config.num_labels}.")
    if config.number_grid is not None and config.head_type != "number_grid":
        raise RelishConfigError(f'number_grid is a setting of head_type="number_grid", got {config.head_type!r}.')


def check_labels(config: PreTrainedConfig) -> None:
    """Check the labels' scale and the loss."""
    if config.problem_type != "regression":
        raise RelishConfigError(f'problem_type must be "regression", got {config.problem_type!r}.')
    if not (config.huber_delta > 0 and math.isfinite(config.huber_delta)):
        raise RelishConfigError(f"huber_delta must be a positive number, got {config.huber_delta}.")
    if config.label_std is not None and min(config.label_std) <= 0:
        raise RelishConfigError(f"label_std must be positive for every target, got {config.label_std}.")
    if (config.label_mean is None) != (config.label_std is None):
        raise RelishConfigError("label_mean and label_std belong together: give both or neither.")
    if (config.label_min is None) != (config.label_max is None):
        raise RelishConfigError("label_min and label_max belong together: give both or neither.")
    if (
        config.label_min is not None
        and config.label_max is not None
        and any(a >= b for a, b in zip(config.label_min, config.label_max, strict=True))
    ):
        raise RelishConfigError(f"label_min {config.label_min} must lie below label_max {config.label_max}.")


def check_text(config: PreTrainedConfig) -> None:
    """Check how prompts are cut."""
    _one_of("truncation", config.truncation, TRUNCATIONS)
    _positive_int("max_length", config.max_length)


def check_backbone_layers(config: PreTrainedConfig) -> None:
    """Check which layers are read, of a backbone that is known."""
    total = config.num_hidden_layers
    layers = config.backbone_layers
    if layers is None:
        layers = [total if config.backbone_layer in (None, AUTO_LAYER) else config.backbone_layer]
    for layer in layers:
        _positive_int("backbone_layer", layer)
        if layer > total:
            raise RelishConfigError(
                f"backbone_layer must lie in 1..{total} (the {config.backbone_config.model_type} backbone has {total} "
                f"layers), got {layer}."
            )
    if not layers or len(set(layers)) != len(layers):
        raise RelishConfigError(f"backbone_layers must be different layers, at least one, got {layers}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RelishConfigError(f"{name} must be one of {list(allowed)}, got {value!r}.")


def _positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RelishConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
