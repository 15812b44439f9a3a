"""`relish predict` and `relish evaluate`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cli_shared import (
    check_columns,
    chunks,
    load_model,
    say,
    score_rows,
    show_metrics,
    target_columns,
    write_json,
)

errors = Console(stderr=True)

CHUNK_ROWS = 1024


class Truncation(str, Enum):
    """What `relish predict` does with a text that is too long."""

    longest_first = "longest_first"
    error = "error"


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
