"""`relish train`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_numbers import grid_of_labels
from .cli_shared import (
    DEFAULT_BACKBONE,
    choose_layer,
    compute_dtype,
    default_template,
    find_layer,
    rows_digest,
    say,
    show_metrics,
    strip_prefix,
    write_json,
)
from .configuration_checks_relish import GRID_OBJECTIVES
from .configuration_relish import HEAD_SETTINGS

RUN_FILE = "run.json"  # in the folder of checkpoints: the data and the settings that the run began with
SETTINGS = (*HEAD_SETTINGS, "learn_values", "truncation")  # that --set changes; others have options, or are measured


class Head(str, Enum):
    """Heads that `relish train` knows."""

    relish = "relish"
    linear = "linear"
    mlp = "mlp"
    number_grid = "number_grid"
    special_token = "special_token"
    final_logits_mlp = "final_logits_mlp"


class Objective(str, Enum):
    """Objectives that `relish train` knows."""

    huber = "huber"
    mse = "mse"
    raft = "raft"
    mbr = "mbr"
    cross_entropy = "cross_entropy"


def train(
    data: Annotated[
        str, typer.Argument(help="csv, tsv, jsonl, parquet, a folder with train/validation/test, or a hub id.")
    ],
    label: Annotated[list[str], typer.Option(help="Column with the number to predict; repeat for several targets.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Text column; repeat for several. Default: every text column.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt, as 'Sentence 1: {text_a}\\nSentence 2: {text_b}\\nScore:'.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Table to choose the best epoch on; default: a tenth of the rows.")
    ] = None,
    test: Annotated[str | None, typer.Option(help="Table to report on; default: a tenth of the rows.")] = None,
    backbone: Annotated[str, typer.Option(help="Hub id, folder, or embedded:NAME.")] = DEFAULT_BACKBONE,
    revision: Annotated[str | None, typer.Option(help="Of the backbone on the hub.")] = None,
    backbone_layer: Annotated[
        str, typer.Option(help="A layer's number, 'middle', 'last', or 'auto' to search.")
    ] = "middle",
    head: Annotated[
        Head | None,
        typer.Option(
            help="relish (the default), linear, mlp; or on the language model's own words, number_grid and others."
        ),
    ] = None,
    pooling: Annotated[str, typer.Option(help="mean, last or first token (linear, mlp).")] = "mean",
    objective: Annotated[
        Objective, typer.Option(help="huber or mse; raft, mbr or cross_entropy train the language model's own numbers.")
    ] = Objective.huber,
    grid: Annotated[
        str | None, typer.Option(help="Numbers it may say: 0:5, 0:5:0.1, 1,2,4 or bad=1,good=2. Default: the scale's.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the training rows.")] = 8.0,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Default 3e-4 for relish, 1e-3 for other heads; 2e-4 with --lora, 2e-5 with --train-backbone."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 32,
    weight: Annotated[str | None, typer.Option(help="Column with a weight per row.")] = None,
    label_min: Annotated[float | None, typer.Option(help="Lower end of the label's scale (for NRMSE).")] = None,
    label_max: Annotated[float | None, typer.Option(help="Upper end of the label's scale.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest prompt in tokens.")] = 1024,
    train_backbone: Annotated[
        bool, typer.Option("--train-backbone", help="Train every weight, not the head alone.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train LoRA on the backbone's linear layers with the head.")
    ] = False,
    lora_rank: Annotated[int, typer.Option(help="Rank of LoRA; alpha is twice that.")] = 8,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting of RelishConfig, as num_refinement_steps=4; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For splits, head and order of rows.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the output folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in the output folder.")
    ] = False,
) -> None:
    """Train a regressor on a table, report it on held-out rows and save it."""
    from transformers import AutoTokenizer, set_seed

    from .adapter_training import lora_config
    from .base_model_relish import resolve_backbone
    from .data import Columns, guess_text_columns, load_splits
    from .modeling_relish import RelishForSequenceRegression
    from .text_relish import PromptTemplate
    from .trainer import RelishTrainer
    from .training_args import RelishTrainingArguments

    if (output / "config.json").exists() and not overwrite:
        raise ValueError(f"{output} holds a model already; choose another --output, or --overwrite.")
    if (label_min is None) != (label_max is None):
        raise ValueError("--label-min and --label-max belong together: give both or neither.")
    if lora and train_backbone:
        raise ValueError("--lora trains an adapter, --train-backbone every weight: choose one of them.")
    peft_config = lora_config(lora_rank) if lora else None
    head = head_for(head, objective)
    reads_end = head in (Head.number_grid, Head.special_token, Head.final_logits_mlp)
    if head is Head.number_grid and not (lora or train_backbone):
        raise ValueError("the language model's own numbers are trained with --lora or --train-backbone.")
    if grid is not None and head is not Head.number_grid:
        raise ValueError("--grid is for the language model's own numbers: --objective raft, mbr or cross_entropy.")
    work = output / "checkpoints"
    if not (resume or overwrite) and any(work.glob("checkpoint-*")):
        raise ValueError(f"{work} has checkpoints of a run that did not end; --resume it, or --overwrite them.")
    # Between single quotes, as in this option's help, a shell leaves \n as two characters.
    template = template.replace("\\n", "\n") if template else None
    text_columns = tuple(
        text or (PromptTemplate(template).fields if template else guess_text_columns(data, label, weight))
    )
    template = template or default_template(text_columns)
    columns = Columns(text=text_columns, label=tuple(label), weight=weight)
    splits = load_splits(data, columns, validation=validation, test=test, seed=seed)
    say(f"rows: {', '.join(f'{name} {len(split)}' for name, split in splits.items())}\nprompt: {template!r}")
    scale = {} if label_min is None else {"label_min": [label_min] * len(label), "label_max": [label_max] * len(label)}

    more_settings = read_settings(settings or ())
    if "backbone_layers" in more_settings and backbone_layer == "auto":
        raise ValueError("--set backbone_layers mixes layers, --backbone-layer auto looks for one: choose one of them.")
    began = {
        **{f"rows of {name}": rows_digest(split) for name, split in splits.items()},
        "template": template, "label": label, "weight": weight, "label_min": label_min, "label_max": label_max,
        "backbone": backbone, "revision": revision, "backbone_layer": backbone_layer, "head": head.value, "pooling": pooling,
        "objective": objective.value, "grid": grid, "set": dict(more_settings), "max_length": max_length,
        "train_backbone": train_backbone, "lora": lora and lora_rank, "epochs": epochs, "learning_rate": learning_rate,
        "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    if resume:
        check_same_run(work, began)
    if head is Head.number_grid:
        known = None if label_min is None or label_max is None else (label_min, label_max)
        found_grid = grid_of_labels(grid, [row[0] for row in splits["train"]["labels"]], known)
        more_settings |= {"number_grid": found_grid, "normalize_grid": objective is Objective.mbr}

    def start(layer: int | None, **more: Any) -> RelishForSequenceRegression:
        set_seed(seed)
        return RelishForSequenceRegression.from_backbone(
            backbone, revision=revision, backbone_layer=layer, head_type=head.value, pooling=pooling, num_labels=len(label),
            prompt_template=template, max_length=max_length, objective=objective.value,
            dtype="float32" if train_backbone else compute_dtype(), **scale, **more_settings, **more,
        )  # fmt: skip

    reads_top = reads_end or "backbone_layers" in more_settings
    layer = choose_layer(backbone, "last" if reads_top else backbone_layer, revision)
    tokenizer = AutoTokenizer.from_pretrained(
        resolve_backbone(backbone), **({"revision": revision} if revision else {})
    )
    if not resume:  # else a later --resume could go on from the other run's
        shutil.rmtree(work, ignore_errors=True)
    args = RelishTrainingArguments(
        output_dir=str(work), num_train_epochs=epochs, per_device_train_batch_size=batch_size,
        learning_rate=learning_rate or usual_rate(head, lora=lora, train_backbone=train_backbone),
        freeze_backbone=not train_backbone,
        label_columns=list(label), eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, logging_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="pearson", greater_is_better=True, warmup_steps=0.1,
        report_to="none", seed=seed, dataset_name=Path(data).name if Path(data).exists() else data,
    )  # fmt: skip
    if backbone_layer == "auto" and not reads_end:
        best, found = find_layer(start, splits, tokenizer, args, work, resume=resume)
        model = start(best, layer_search=found)
    else:
        model = start(layer)
    say(f"backbone: {backbone}, {model.config.layer_name}")
    trainer = RelishTrainer(
        model, args, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=tokenizer,
        peft_config=peft_config,
    )  # fmt: skip
    if not resume:
        write_json(work / RUN_FILE, began)
    trainer.train(resume_from_checkpoint=True if resume else None)
    report = {"validation": trainer.evaluate(metric_key_prefix="validation")}
    if "test" in splits:
        report["test"] = trainer.evaluate(splits["test"], metric_key_prefix="test")
    trainer.save_model(str(output))
    write_json(output / "metrics.json", {name: strip_prefix(metrics, name) for name, metrics in report.items()})
    shutil.rmtree(work)
    show_metrics({name: strip_prefix(metrics, name) for name, metrics in report.items()})
    say(f"saved to {output}; use it with: relish predict {output} table.csv --output scored.csv")


def head_for(head: Head | None, objective: Objective) -> Head:
    """Return the head that was chosen, or the one that the objective needs.

    Raises:
        ValueError: for a head that has no probabilities of numbers, where the objective is about them.
    """
    if objective.value not in GRID_OBJECTIVES:
        return head or Head.relish
    if head not in (None, Head.number_grid):
        raise ValueError(
            f"--objective {objective.value} trains the language model's own numbers, which a {head.value} head does not read: "
            "leave out --head, or choose --objective huber or mse."
        )
    return Head.number_grid


def usual_rate(head: Head, *, lora: bool, train_backbone: bool) -> float:
    """Return the learning rate where none is given; that of a whole language model is what it is fine-tuned by elsewhere."""
    if train_backbone or lora:
        return 2e-5 if train_backbone else 2e-4
    return 3e-4 if head is Head.relish else 1e-3


def check_same_run(work: Path, now: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoints of a run on other rows or with other settings.

    Args:
        work: The folder of checkpoints.
        now: What [`train`] wrote there when the run began, as it would write it now.

    Raises:
        ValueError: naming what differs; also where the folder does not say what its run began with.
    """
    again = "leave out --resume; --overwrite removes the checkpoints that are there."
    if not (work / RUN_FILE).exists():
        raise ValueError(
            f"--resume needs the checkpoints of a run and its {RUN_FILE}, which says what data and settings it began with; "
            f"{work / RUN_FILE} does not exist. To begin anew, {again}"
        )
    then = json.loads((work / RUN_FILE).read_text())
    now = json.loads(json.dumps(now))
    different = [
        name if name.startswith("rows of ") else f"{name} (then {then.get(name)!r}, now {now.get(name)!r})"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
    if different:
        raise ValueError(
            f"--resume goes on with the data and the settings that the run in {work} began with; different now: "
            f"{', '.join(different)}. Give the same as then; or, to begin anew, {again}"
        )


def read_settings(given: Sequence[str]) -> dict[str, Any]:
    """Read `NAME=VALUE` settings of RelishConfig; values as JSON has them, else as they stand.

    Raises:
        ValueError: for another form or name, or a name that is given twice.
    """
    found: dict[str, Any] = {}
    for setting in given:
        name, separator, value = setting.partition("=")
        if not separator or name not in SETTINGS or name in found:
            raise ValueError(f"--set takes NAME=VALUE, each name once, of {', '.join(SETTINGS)}; got {setting!r}.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
