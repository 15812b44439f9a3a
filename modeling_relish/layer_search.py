"""Which layer to read: several layers' states from one pass over a sample, a short fit on each, the best by validation.

The layer moves a frozen regressor's quality more than anything else, and a lower layer is a cheaper backbone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from .backbone_relish import cut_backbone
from .base_model_relish import bare_model
from .features import FeatureCache, fill_layers
from .modeling_relish import RelishForSequenceRegression
from .training_args import RelishTrainingArguments
from .training_data import token_ids

logger = logging.get_logger(__name__)

SAMPLE_ROWS = 1500
VALIDATION_ROWS = 750
CANDIDATES = 8
# What a short fit takes over from the run that it chooses a layer for.
_KEPT_ARGUMENTS = (
    "seed", "learning_rate", "per_device_train_batch_size", "objective", "huber_delta", "label_columns", "weight_column",
    "standardize_labels", "features_dir", "features_dtype", "disable_tqdm",
)  # fmt: skip
_KEPT_SETTINGS = (
    "head_type", "head_hidden_size", "head_num_attention_heads", "head_intermediate_size", "num_refinement_steps",
    "share_refinement_steps", "num_latents", "latent_combination", "latent_init", "regressor",
    "head_dropout", "input_norm", "pooling", "label_mean", "label_std", "label_min", "label_max", "objective", "huber_delta",
    "prompt_template", "max_length", "truncation", "id2label",
)  # fmt: skip


def candidate_layers(num_layers: int, count: int = CANDIDATES) -> list[int]:
    """Spread `count` layers over a backbone: from a fifth of its depth to the last."""
    return sorted({round(x) for x in np.linspace(max(1, num_layers / 5), num_layers, count)})


def search_layer(
    model: RelishForSequenceRegression,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    *,
    trainer_class: Callable[..., Any],
    layers: Sequence[int] | None = None,
    sample_rows: int = SAMPLE_ROWS,
    validation_rows: int = VALIDATION_ROWS,
    epochs: float = 4.0,
    args: RelishTrainingArguments | None = None,
) -> dict[int, float]:
    """Fit a head on every candidate layer of a sample, and measure it on validation rows.

    Args:
        model: Over the whole backbone (`backbone_layer=None`), frozen; it gives the settings and is not changed.
        train_dataset: `datasets.Dataset` or a list of dicts, as for [`RelishTrainer`].
        eval_dataset: The same; never the test rows.
        processing_class: The tokenizer.
        trainer_class: `RelishTrainer`; `RelishTrainer.search_layer` is this function with it.
        layers: Candidates; `None` = [`candidate_layers`].
        sample_rows: Training rows used, drawn by `args.seed`.
        validation_rows: Validation rows used.
        epochs: Of each short fit.
        args: Columns, learning rate, seed and feature folder are taken from here.

    Returns:
        Layer -> best validation Pearson (mean over targets), in the order of the layers.

    Raises:
        ValueError: for a model that is cut already or has an adapter on it, no candidate, or where no layer has a correlation.
    """
    if model.config.cut_layer != model.config.num_hidden_layers or model.config.backbone_layers is not None:
        raise ValueError(f"the layer search needs the whole backbone, this model reads {model.config.layer_name}.")
    if model.has_adapter:
        raise ValueError(
            "the layer search fits heads on a frozen backbone, and this one has an adapter on it, which it would freeze too. "
            'Choose the layer first: give the trainer the plain model with backbone_layer="auto" and peft_config=, or a layer.'
        )
    layers = sorted(set(layers if layers is not None else candidate_layers(model.config.num_hidden_layers)))
    if not layers:
        raise ValueError("the layer search needs at least one candidate layer.")
    with tempfile.TemporaryDirectory() as folder:
        fit_args = _fit_arguments(args, folder, epochs)
        train = _sample(train_dataset, sample_rows, fit_args.seed)
        validation = _sample(eval_dataset, validation_rows, fit_args.seed)
        _extract(model, layers, [train, validation], processing_class, fit_args)
        found = {
            layer: _fit(trainer_class, model, layer, train, validation, processing_class, fit_args) for layer in layers
        }
    if np.isnan(list(found.values())).all():
        raise ValueError(
            "the layer search came to no correlation on any layer: the validation rows need labels, and ones that differ."
        )
    return found


def best_layer(results: dict[int, float]) -> int:
    """Return the layer with the best Pearson; of equals, and where none is a number, the lowest."""
    return min(results, key=lambda layer: (-np.nan_to_num(results[layer], nan=-np.inf), layer))


def layer_table(results: dict[int, float]) -> str:
    """Return a search's results as a table with bars, the best layer marked."""
    best = best_layer(results)
    lines = ["layer  validation Pearson"]
    for layer, score in results.items():
        bar = "█" * round(40 * max(0.0, score)) if score == score else "not a number"
        lines.append(f"{layer:>5}{'◀' if layer == best else ' '} {score:.4f} {bar}")
    return "\n".join(lines)


def set_layer(model: RelishForSequenceRegression, layer: int) -> None:
    """Cut a model over the whole backbone at a layer, in place; its head stays as it is, and reads that layer."""
    model.config.backbone_layer = None if layer == model.config.num_hidden_layers else layer
    was_named = model.base_is_named()
    model.config.backbone_fingerprint = None  # of the whole backbone; now that of the layers that are left
    model.backbone = cut_backbone(model.backbone, layer)
    model._adopt_base(model.backbone)
    if not was_named:  # trained before: its name would bring other weights
        model._base_fingerprint = None
    model.score.reader.input_norm = model.config.uses_input_norm


def _fit_arguments(args: RelishTrainingArguments | None, folder: str, epochs: float) -> RelishTrainingArguments:
    kept = {name: getattr(args, name) for name in _KEPT_ARGUMENTS} if args is not None else {}
    return RelishTrainingArguments(
        output_dir=folder, num_train_epochs=epochs, eval_strategy="epoch", save_strategy="no", logging_strategy="no",
        warmup_steps=0.1, report_to="none", **kept,
    )  # fmt: skip


def _sample(dataset: Any, rows: int, seed: int) -> Any:
    if len(dataset) <= rows:
        return dataset
    return [dataset[i] for i in sorted(np.random.default_rng(seed).permutation(len(dataset))[:rows].tolist())]


def at_layer(
    model: RelishForSequenceRegression, layer: int | None = None, layers: list[int] | None = None
) -> RelishForSequenceRegression:
    """Build a model on other layers of the same backbone, sharing its weights, with a fresh head."""
    config = model.config
    settings = {name: getattr(config, name) for name in _KEPT_SETTINGS}
    made = RelishForSequenceRegression.from_backbone(
        bare_model(model.backbone), backbone_layer=layer, backbone_layers=layers, **settings
    )
    # The base model's name belongs to a cache's fingerprint, which the training that follows shall find again.
    made.config.backbone_name_or_path = config.backbone_name_or_path
    made.config.backbone_revision = config.backbone_revision
    return made


def _extract(
    model: RelishForSequenceRegression,
    layers: list[int],
    parts: list[Any],
    tokenizer: Any,
    args: RelishTrainingArguments,
) -> None:
    """Keep all candidates' states of all parts, each text run once through the backbone."""
    caches = [FeatureCache(at_layer(model, layer), args.features_dir, args.features_dtype) for layer in layers]
    reader = at_layer(model, layers=layers)
    for part in parts:
        ids = token_ids(part, "layer search", model.config, tokenizer)
        fill_layers(caches, reader, ids, show_progress=not args.disable_tqdm)


def _fit(
    trainer_class: Callable[..., Any],
    model: RelishForSequenceRegression,
    layer: int,
    train: Any,
    validation: Any,
    tokenizer: Any,
    args: RelishTrainingArguments,
) -> float:
    set_seed(args.seed)  # every layer's head starts alike
    candidate = at_layer(model, layer)
    trainer = trainer_class(candidate, args, train_dataset=train, eval_dataset=validation, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)  # the table at the end says it
    trainer.train()
    scores = [entry["eval_pearson"] for entry in trainer.state.log_history if "eval_pearson" in entry]
    return float(np.nanmax(scores)) if not np.isnan(scores).all() else float("nan")
