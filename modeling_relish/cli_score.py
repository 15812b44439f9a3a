"""`relish predict` and `relish evaluate`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_numbers import Decoder, Method, load_scorer
from .cli_shared import (
    check_columns,
    check_lengths,
    chunks,
    load_model,
    rows_digest,
    say,
    score_rows,
    show_metrics,
    target_columns,
    write_json,
)
from .score_parts import Part, ScoreParts, model_digest, process_rank, tokenizer_digest

errors = Console(stderr=True)

CHUNK_ROWS = 1024


class Truncation(str, Enum):
    """What `relish predict` does with a text that is too long."""

    longest_first = "longest_first"
    error = "error"


def predict(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a trained model.")],
    data: Annotated[str, typer.Argument(help="csv, tsv, jsonl, parquet, a folder of splits or a hub id.")],
    output: Annotated[Path, typer.Option(help="Table to write; its ending chooses the format.")],
    split: Annotated[str | None, typer.Option(help="Split of a hub data set or a folder.")] = None,
    column: Annotated[str, typer.Option(help="Name of the new column.")] = "prediction",
    batch_size: Annotated[int, typer.Option(help="Rows per model call.")] = 32,
    truncation: Annotated[
        Truncation | None, typer.Option(help="longest_first or error, for too long texts; default: the model's.")
    ] = None,
    method: Annotated[
        Method, typer.Option(help="model, or of a language model: rail (expected number), decode, rail-sample.")
    ] = Method.model,
    template: Annotated[str | None, typer.Option(help="Prompt, where MODEL is a plain language model.")] = None,
    grid: Annotated[
        str | None, typer.Option(help="Numbers it may say, likewise: 0:5, 0:5:0.1, 1,2,4 or bad=1,good=2.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Numbers drawn for each text by rail-sample.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Score a table's rows and write it with a prediction column, in input order; a run that was killed goes on.

    Under `accelerate launch` or `torchrun` the processes share the rows, and the first writes the output.
    """
    from .data import RowWriter, read_rows

    rank, world = process_rank()
    scorer = load_scorer(load_model, model, method, template, grid, samples, seed)
    names = target_columns(scorer.config, column)
    cut = (truncation.value if truncation else None) or scorer.config.truncation
    writer = RowWriter(output)  # an output that cannot be written is told before anything is scored
    texts = check_rows(scorer, data, split, names, cut)
    how = [cut, str(CHUNK_ROWS), f"{method.value} {samples} {seed}"]
    parts = ScoreParts(writer.path, [model_digest(scorer), tokenizer_digest(scorer._own_tokenizer()), texts, *how])
    done = 0
    for number, chunk in enumerate(chunks(read_rows(data, split=split), CHUNK_ROWS)):
        fields = text_fields(scorer, chunk, data, done)
        if number % world == rank and parts.read(number, rows_digest(fields)) is None:
            scores = score_rows(scorer, fields, data, done, batch_size=batch_size, truncation=cut)
            counts = (scorer.not_numbers, scorer.answers) if isinstance(scorer, Decoder) else ()
            parts.write(number, rows_digest(fields), Part(scores.reshape(len(chunk), -1), *counts))
        done += len(chunk)
        if rank == 0:
            errors.print(f"{done} rows scored", end="\r", highlight=False)
    if rank != 0:
        return
    done = not_numbers = answers = 0
    with writer:
        for number, chunk in enumerate(chunks(read_rows(data, split=split), CHUNK_ROWS)):
            part = parts.wait(number, rows_digest(text_fields(scorer, chunk, data, done)))
            not_numbers, answers = not_numbers + part.not_numbers, answers + part.answers
            for row, score in zip(chunk, part.scores, strict=True):
                writer.write({**row, **{name: float(f"{value:.7g}") for name, value in zip(names, score, strict=True)}})
            done += len(chunk)
    parts.remove()
    if not_numbers:
        say(f"{not_numbers} of {answers} answers were no number and counted as 0.0")
    say(f"{done} rows written to {output}")


def check_rows(scorer: Any, data: str, split: str | None, names: list[str], truncation: str) -> str:
    """Read the whole table once, so that a bad row is told before the first one is scored; return its texts' digest."""
    from .data import read_rows
    from .text_relish import PromptTemplate

    fields = PromptTemplate(scorer.config.prompt_template).fields
    digest, done = "", 0
    for chunk in chunks(read_rows(data, split=split), CHUNK_ROWS):
        check_columns(chunk, fields, names, data, done)
        texts = text_fields(scorer, chunk, data, done)
        if truncation == Truncation.error.value:
            check_lengths(scorer, texts, data, done)
        digest = rows_digest([{"before": digest}, *texts])
        done += len(chunk)
    return digest


def text_fields(scorer: Any, rows: list[dict[str, Any]], data: str, done: int) -> list[dict[str, str]]:
    """Return the template's fields of rows, checked; `done` rows of the table came before them."""
    from .data import check_text
    from .text_relish import PromptTemplate

    fields = PromptTemplate(scorer.config.prompt_template).fields
    return [
        {f: check_text(row[f], where=data, column=f, row=done + i) for f in fields} for i, row in enumerate(rows, 1)
    ]


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a trained model.")],
    data: Annotated[str, typer.Argument(help="Table with text columns and labels.")],
    label: Annotated[
        list[str], typer.Option(help="Column with the true number; repeat for several targets, in any order.")
    ],
    split: Annotated[str | None, typer.Option(help="Split of a hub data set or a folder.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per model call.")] = 32,
    output: Annotated[Path | None, typer.Option(help="Also write the metrics as JSON.")] = None,
) -> None:
    """Compare predictions with labels: Pearson, Spearman, NRMSE, RMSE, MAE."""
    from .data import Columns, label_matrix, load_split
    from .metrics import regression_metrics
    from .text_relish import PromptTemplate
    from .training_data import order_targets

    scorer = load_model(model)
    fields = PromptTemplate(scorer.config.prompt_template).fields
    rows = load_split(data, Columns(text=fields, label=tuple(label)), split=split)
    texts = [{f: row[f] for f in fields} for row in rows]
    scores = score_rows(scorer, texts, data, batch_size=batch_size, show_progress_bar=True)
    labels = order_targets(label_matrix(rows), label, scorer.config)
    metrics = regression_metrics(scores, labels, label_range=scorer.config.label_range)
    show_metrics({Path(data).name: metrics})
    if output is not None:
        write_json(output, metrics)
