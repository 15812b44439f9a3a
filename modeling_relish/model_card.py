"""The model card, README.md of a checkpoint: what it reads, what its number means, what was measured, and what it is not for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from yaml import YAMLError

from .base_model_relish import EMBEDDED_PREFIX, is_local_name
from .configuration_relish import RelishConfig
from .embedded_packages import PACKAGES
from .hub_relish import sign_card
from .metrics import METRIC_NAMES
from .text_relish import PromptTemplate

TEMPLATE = Path(__file__).with_name("model_card_template.md")
# metric -> (the Hub's identifier, name in the table)
_METRICS = {
    "pearson": ("pearsonr", "Pearson"),
    "spearman": ("spearmanr", "Spearman"),
    "nrmse": ("nrmse", "NRMSE"),
    "rmse": ("rmse", "RMSE"),
    "mae": ("mae", "MAE"),
}
_HEADS = {
    "relish": "RELISH: a learned latent reads all tokens by cross-attention, {config.num_refinement_steps} times",
    "linear": "linear, on the {config.pooling} token state",
    "mlp": "two-layer perceptron, on the {config.pooling} token state",
    "number_grid": "the expected number under the language model, over a grid of numbers (RAIL; trained: RAFT)",
    "special_token": "one token's logit",
    "final_logits_mlp": "two-layer perceptron with a sigmoid, on the last token's logits",
}


class ModelCardError(ValueError):
    """A model card that the Hub would refuse, or that would say what nobody measured."""


def model_card(
    config: RelishConfig,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    tags: Sequence[str] = (),
    base_model: str | None = None,
    data: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Write a model card from a checkpoint's configuration.

    Args:
        config: Of the checkpoint; its `evaluation` is quoted.
        repo_id: `"user/name"` on the Hub, for the example of use.
        license: Of the weights, as the Hub names it (`"apache-2.0"`). `None` says that it is not stated.
        language: ISO 639-1 codes.
        tags: Beside `relish` and `regression`.
        base_model: Hub id of the base model, where the config names another copy of it.
        data: What it was trained on, in a sentence; `None` says what the config knows.
        notes: Further limits.

    Returns:
        Markdown with the Hub's YAML block, signed: [`is_own_card`] knows it until somebody edits it.

    Raises:
        ModelCardError: for metadata that huggingface_hub cannot read.
        TemplateError: for a prompt template that cannot be used.
    """
    fields = PromptTemplate(config.prompt_template).fields
    evaluation = _checked_evaluation(config.evaluation)
    name = config.backbone_name_or_path or ""
    hub_base = base_model or (None if not name or is_local_name(name) or name.startswith(EMBEDDED_PREFIX) else name)
    dataset = evaluation.get("dataset")
    title = (repo_id or "a-relish-regressor").split("/")[-1]
    eval_results = _eval_results(evaluation)
    card_data = ModelCardData(
        license=license,
        language=language if language is None or isinstance(language, str) else list(language),
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["relish", "regression", *tags],
        base_model=hub_base,
        datasets=dataset if dataset and "/" in dataset else None,
        model_name=title if eval_results else None,
        eval_results=eval_results or None,
    )
    text = TEMPLATE.read_text(encoding="utf-8")
    longest = max((len(run) for run in re.findall("`+", config.prompt_template)), default=0)
    try:
        card = ModelCard.from_template(
            card_data,
            template_str=text,
            title=title,
            repo_id=repo_id or "user/name",
            reads=_reads(fields),
            answers="a number" if config.num_labels == 1 else f"{config.num_labels} numbers",
            example=_example(fields),
            base_phrase=_code(hub_base or name)
            if hub_base or (name and not is_local_name(name))
            else "a language model",
            base_model=_base_model(name, hub_base),
            licence=_licence(name, license),
            layer=_layer(config),
            head=_HEADS.get(config.head_type, config.head_type).format(config=config),
            weights=_weights(config),
            max_length=config.max_length,
            truncation="longer text is refused"
            if config.truncation == "error"
            else "longer text loses its end, with a warning",
            fence="`" * max(3, longest + 1),
            template=config.prompt_template,
            scale=_scale(config),
            data=data or _data(evaluation),
            results=_results(config, evaluation),
            limits=[*_limits(name, evaluation), *notes],
        )
    except (ValueError, YAMLError) as error:
        raise ModelCardError(f"the model card's metadata is not valid: {error}") from error
    return sign_card(str(card))


# ---------------------------------------------------------------------- metrics


def note_evaluation(
    evaluation: dict[str, Any] | None, split: str, metrics: dict[str, float], rows: int, **about: Any
) -> dict[str, Any]:
    """Return a checkpoint's `evaluation` with one more split.

    Args:
        evaluation: What is there already.
        split: `"validation"`, `"test"`, ...
        metrics: As [`regression_metrics`] returns them; values that are not finite are left out.
        rows: How many rows were measured.
        **about: `weights` (which weights these are), `dataset` (a Hub id or a name), `train_rows`.
    """
    kept = {k: float(v) for k, v in metrics.items() if re.sub(r"_\d+$", "", k) in METRIC_NAMES and math.isfinite(v)}
    results = {**(evaluation or {}).get("results", {}), split: {"rows": rows, **kept}}
    return {**(evaluation or {}), **{k: v for k, v in about.items() if v is not None}, "results": results}


def _checked_evaluation(evaluation: Any) -> dict[str, Any]:
    """Bring what a config holds, which may be another's, to names and numbers alone."""
    if not isinstance(evaluation, dict):
        return {}
    results: dict[str, dict[str, float]] = {}
    for split, metrics in sorted((evaluation.get("results") or {}).items()):
        if isinstance(metrics, dict) and re.fullmatch(r"[\w.-]+", str(split)):
            numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float)) and math.isfinite(v)}
            results[str(split)] = {
                k: v for k, v in numbers.items() if k == "rows" or re.sub(r"_\d+$", "", k) in _METRICS
            }
    dataset = evaluation.get("dataset")
    rows = evaluation.get("train_rows")
    return {
        "results": results,
        "dataset": " ".join(str(dataset).split()) if dataset else None,
        "train_rows": rows if isinstance(rows, int) else None,
    }


def _eval_results(evaluation: dict[str, Any]) -> list[EvalResult]:
    dataset = evaluation.get("dataset") or "custom"
    return [
        EvalResult(
            task_type="text-classification",
            task_name="Text regression",
            dataset_type=dataset
            if "/" in dataset
            else re.sub(r"[^\w.-]+", "-", dataset).strip("-").lower() or "custom",
            dataset_name=dataset,
            dataset_split=split,
            metric_type=_METRICS[name][0],
            metric_name=_METRICS[name][1],
            metric_value=round(metrics[name], 4),
        )
        for split, metrics in evaluation.get("results", {}).items()
        for name in _METRICS
        if name in metrics
    ]


def _results(config: RelishConfig, evaluation: dict[str, Any]) -> str:
    results = evaluation.get("results")
    if not results:
        return "None were measured with these weights by the trainer that wrote this card."
    lines = [
        "| rows | number | target | " + " | ".join(name for _, name in _METRICS.values()) + " |",
        "|" + "---|" * (3 + len(_METRICS)),
    ]
    for split, metrics in results.items():
        targets = config.target_names
        suffixes = [("", "all" if len(targets) > 1 else targets[0])]
        if len(targets) > 1:
            suffixes += [(f"_{k}", name) for k, name in enumerate(targets)]
        for suffix, target in suffixes:
            cells = [f"{metrics[n + suffix]:.4f}" if n + suffix in metrics else "-" for n in _METRICS]
            lines.append(f"| {split} | {metrics.get('rows', '-')} | {_cell(target)} | {' | '.join(cells)} |")
    scale = "the scale's width" if config.label_range else "the range of the measured labels"
    return "\n".join(lines) + f"\n\nRMSE and MAE are in the label's unit; NRMSE is RMSE divided by {scale}."


# ---------------------------------------------------------------------- sentences


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _reads(fields: Sequence[str]) -> str:
    return "a text" if len(fields) == 1 else " and ".join(_code(field) for field in fields)


def _example(fields: Sequence[str]) -> str:
    if len(fields) == 1:
        return '["What a day!"]'
    return json.dumps([dict.fromkeys(fields, "...")], ensure_ascii=False)


def _base_model(name: str, hub_base: str | None) -> str:
    if not name:
        return "not named; it is whole in this checkpoint"
    copy = name.startswith(EMBEDDED_PREFIX)
    said = _code(name) if not is_local_name(name) else "a folder of the machine it was trained on"
    if copy:
        said += ", a copy from the package registry"
    return f"{said} (of {_code(hub_base)})" if hub_base and hub_base != name else said


def _licence(name: str, license: str | None) -> str:
    package = PACKAGES.get(name.removeprefix(EMBEDDED_PREFIX)) if name.startswith(EMBEDDED_PREFIX) else None
    base = f"the base model's is {package.licence}" if package else "the base model has its own, which holds too"
    return f"{license or 'of these weights: not stated by who trained them'}; {base}"


def _layer(config: RelishConfig) -> str:
    if config.backbone_config is None:
        return config.layer_name
    return f"{config.layer_name} of {config.num_hidden_layers}" if config.backbone_layer else config.layer_name


def _weights(config: RelishConfig) -> str:
    if config.backbone_in_checkpoint:
        return "all: the head and the backbone"
    revision = f", revision {_code(config.backbone_revision)}" if config.backbone_revision else ""
    return f"the head alone; the base model is loaded by its name{revision} and recognised by its weights"


def _scale(config: RelishConfig) -> str:
    ranges = config.label_range
    lines = ["| target | scale | mean of the training labels | their deviation |", "|---|---|---|---|"]
    for k, target in enumerate(config.target_names):
        scale = ranges[k] if ranges else None
        cells = [
            f"{scale[0]:g} to {scale[1]:g}" if scale else "not stated",
            f"{config.label_mean[k]:.4g}" if config.label_mean else "not measured",
            f"{config.label_std[k]:.4g}" if config.label_std else "not measured",
        ]
        lines.append(f"| {_cell(target)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nThe answer is in the label's own unit. It is not clipped to the scale."


def _data(evaluation: dict[str, Any]) -> str:
    dataset, rows = evaluation.get("dataset"), evaluation.get("train_rows")
    if not dataset and not rows:
        return "Not stated by who trained it."
    return f"Trained on {f'{rows} rows of ' if rows else ''}{_code(dataset) if dataset else 'a table without a name'}."


def _limits(name: str, evaluation: dict[str, Any]) -> list[str]:
    limits = [
        "It was fitted to labels like those it saw: on other kinds of text, languages or scales its numbers mean nothing until "
        "they are compared with labels.",
        "It carries what its base model and its raters carry, bias included. Do not decide about people by it alone.",
        "It says nothing of how sure it is.",
    ]
    if not evaluation.get("results"):
        limits.insert(0, "No measurement comes with it: compare it with labels of your own before use.")
    if name.startswith(EMBEDDED_PREFIX):
        fetch = f"`python -m modeling_relish.embedded {name.removeprefix(EMBEDDED_PREFIX)}`"
        limits.insert(0, f"The base model has to be fetched first: {fetch}.")
    return limits
