"""The command line: `relish train`, `relish predict`, `relish evaluate`."""

from __future__ import annotations

import os
import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .cli_shared import (
    DEFAULT_BACKBONE,
    check_columns,
    choose_layer,
    chunks,
    compute_dtype,
    console,
    default_template,
    find_layer,
    load_model,
    say,
    score_rows,
    show_metrics,
    strip_prefix,
    target_columns,
    write_json,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Fine-tune a small head on a frozen language model to answer with a number.",
)
errors = Console(stderr=True)

CHUNK_ROWS = 1024


class Head(str, Enum):
    """Heads that `relish train` knows."""

    relish = "relish"
    linear = "linear"
    mlp = "mlp"


class Objective(str, Enum):
    """Objectives that `relish train` knows."""

    huber = "huber"
    mse = "mse"


class Truncation(str, Enum):
    """What `relish predict` does with a text that is too long."""

    longest_first = "longest_first"
    error = "error"


def main() -> None:
    """Run the command line; what the user can mend is told in one line, without a traceback."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RELISH_DEBUG"):
            raise
        errors.print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        line = " ".join(part.strip() for part in str(error).splitlines())  # transformers' own messages have several
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


@app.command()
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
    head: Annotated[Head, typer.Option(help="relish, linear or mlp.")] = Head.relish,
    pooling: Annotated[str, typer.Option(help="mean, last or first token (linear, mlp).")] = "mean",
    objective: Annotated[Objective, typer.Option(help="huber or mse.")] = Objective.huber,
    epochs: Annotated[float, typer.Option(help="Passes over the training rows.")] = 8.0,
    learning_rate: Annotated[
        float | None, typer.Option(help="Default 3e-4 for relish, 1e-3 for linear and mlp.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 32,
    weight: Annotated[str | None, typer.Option(help="Column with a weight per row.")] = None,
    label_min: Annotated[float | None, typer.Option(help="Lower end of the label's scale (for NRMSE).")] = None,
    label_max: Annotated[float | None, typer.Option(help="Upper end of the label's scale.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest prompt in tokens.")] = 1024,
    train_backbone: Annotated[
        bool, typer.Option("--train-backbone", help="Train every weight, not the head alone.")
    ] = False,
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

    def start(layer: int | None, **more: Any) -> RelishForSequenceRegression:
        set_seed(seed)
        return RelishForSequenceRegression.from_backbone(
            backbone, revision=revision, backbone_layer=layer, head_type=head.value, pooling=pooling, num_labels=len(label),
            prompt_template=template, max_length=max_length, objective=objective.value,
            dtype="float32" if train_backbone else compute_dtype(), **scale, **more,
        )  # fmt: skip

    layer = choose_layer(backbone, backbone_layer, revision)
    tokenizer = AutoTokenizer.from_pretrained(
        resolve_backbone(backbone), **({"revision": revision} if revision else {})
    )
    if not resume:  # else a later --resume could go on from the other run's
        shutil.rmtree(work, ignore_errors=True)
    args = RelishTrainingArguments(
        output_dir=str(work), num_train_epochs=epochs, per_device_train_batch_size=batch_size,
        learning_rate=learning_rate or (3e-4 if head is Head.relish else 1e-3), freeze_backbone=not train_backbone,
        label_columns=list(label), eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, logging_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="pearson", greater_is_better=True, warmup_steps=0.1,
        report_to="none", seed=seed,
    )  # fmt: skip
    if backbone_layer == "auto":
        best, found = find_layer(start, splits, tokenizer, args, work, resume=resume)
        model = start(best, layer_search=found)
    else:
        model = start(layer)
    say(f"backbone: {backbone}, {model.config.layer_name}")
    trainer = RelishTrainer(
        model, args, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    report = {"validation": trainer.evaluate(metric_key_prefix="validation")}
    if "test" in splits:
        report["test"] = trainer.evaluate(splits["test"], metric_key_prefix="test")
    trainer.save_model(str(output))
    write_json(output / "metrics.json", {name: strip_prefix(metrics, name) for name, metrics in report.items()})
    shutil.rmtree(work)
    show_metrics({name: strip_prefix(metrics, name) for name, metrics in report.items()})
    say(f"saved to {output}; use it with: relish predict {output} table.csv --output scored.csv")


cache = typer.Typer(no_args_is_help=True, help="The feature cache: what a frozen backbone said, kept on disk.")
app.add_typer(cache, name="cache")


@cache.command("ls")
def cache_ls(
    folder: Annotated[Path | None, typer.Option(help="Feature folder; default: the library's.")] = None,
) -> None:
    """List the caches with their backbone, layers, texts and sizes."""
    from .feature_files import list_caches

    table = Table(
        Column("cache", no_wrap=True), Column("backbone", overflow="fold"), "layers", "dtype", "texts", "tokens", "MB"
    )
    for entry in list_caches(folder):
        table.add_row(
            entry.name, escape(entry.backbone), entry.layers, entry.dtype, f"{entry.texts}", f"{entry.tokens}",
            f"{entry.size / 1e6:.1f}",
        )  # fmt: skip
    console.print(table)


@cache.command("clear")
def cache_clear(
    names: Annotated[list[str] | None, typer.Argument(help="Caches to remove, by name; none = all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Feature folder; default: the library's.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove caches; they are computed anew when they are needed."""
    from .feature_files import list_caches

    entries = [e for e in list_caches(folder) if not names or e.name in names]
    if unknown := set(names or []) - {e.name for e in entries}:
        raise ValueError(f"no cache named {sorted(unknown)}; see `relish cache ls`.")
    size = sum(e.size for e in entries)
    if not yes:
        typer.confirm(f"Remove {len(entries)} cache(s), {size / 1e6:.1f} MB?", abort=True)
    for entry in entries:
        shutil.rmtree(entry.folder)
    say(f"{len(entries)} cache(s) removed, {size / 1e6:.1f} MB")


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a trained model.")],
    data: Annotated[str, typer.Argument(help="csv, tsv, jsonl, parquet or a hub id.")],
    output: Annotated[Path, typer.Option(help="Table to write; its ending chooses the format.")],
    column: Annotated[str, typer.Option(help="Name of the new column.")] = "prediction",
    batch_size: Annotated[int, typer.Option(help="Rows per model call.")] = 32,
    truncation: Annotated[
        Truncation | None, typer.Option(help="longest_first or error, for too long texts; default: the model's.")
    ] = None,
) -> None:
    """Score a table's rows and write it with a prediction column, in input order."""
    from .data import RowWriter, check_text, read_rows
    from .text_relish import PromptTemplate

    scorer = load_model(model)
    fields = PromptTemplate(scorer.config.prompt_template).fields
    names = target_columns(scorer.config, column)
    cut = None if truncation is None else truncation.value
    rows = read_rows(data)
    done = 0
    with RowWriter(output) as writer:
        for chunk in chunks(rows, CHUNK_ROWS):
            check_columns(chunk, fields, names, data, done)
            texts = [
                {f: check_text(row[f], where=data, column=f, row=done + i) for f in fields}
                for i, row in enumerate(chunk, 1)
            ]
            scores = score_rows(scorer, texts, data, done, batch_size=batch_size, truncation=cut)
            for row, score in zip(chunk, scores.reshape(len(chunk), -1), strict=True):
                writer.write({**row, **{name: float(f"{value:.7g}") for name, value in zip(names, score, strict=True)}})
            done += len(chunk)
            errors.print(f"{done} rows scored", end="\r", highlight=False)
    say(f"{done} rows written to {output}")


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a trained model.")],
    data: Annotated[str, typer.Argument(help="Table with text columns and labels.")],
    label: Annotated[list[str], typer.Option(help="Column with the true number; repeat for several targets.")],
    split: Annotated[str | None, typer.Option(help="Split of a hub data set or a folder.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per model call.")] = 32,
    output: Annotated[Path | None, typer.Option(help="Also write the metrics as JSON.")] = None,
) -> None:
    """Compare predictions with labels: Pearson, Spearman, NRMSE, RMSE, MAE."""
    from .data import Columns, label_matrix, load_split
    from .metrics import regression_metrics
    from .text_relish import PromptTemplate

    scorer = load_model(model)
    fields = PromptTemplate(scorer.config.prompt_template).fields
    rows = load_split(data, Columns(text=fields, label=tuple(label)), split=split)
    texts = [{f: row[f] for f in fields} for row in rows]
    scores = score_rows(scorer, texts, data, batch_size=batch_size, show_progress_bar=True)
    metrics = regression_metrics(scores, label_matrix(rows), label_range=scorer.config.label_range)
    show_metrics({Path(data).name: metrics})
    if output is not None:
        write_json(output, metrics)
