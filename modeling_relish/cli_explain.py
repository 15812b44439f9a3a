"""`relish explain`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .cli_shared import check_columns, console, load_model, say


def explain(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a trained model with a relish head.")],
    text: Annotated[
        list[str] | None, typer.Option(help="The text; repeat it for a template with several fields, in their order.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Take the text from a table: csv, tsv, jsonl, parquet, folder of splits, hub id.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set or a folder.")] = None,
    row: Annotated[int | None, typer.Option(min=1, help="Which row of the table, from 1; default: the first.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write explain.html (opens without network) or explain.png; default: the screen only."),
    ] = None,
) -> None:
    """Show which tokens each refinement step reads, and the prediction after each step."""
    from .explain import FORMATS, ExplainError, explain, label, save
    from .text_relish import PromptTemplate

    if (text is None) == (data is None) or (text is not None and (row, split) != (None, None)):
        raise ExplainError("give the text with --text, or a table with --data and its --row: one of the two.")
    if text is not None and not all(map(str.strip, text)):
        raise ExplainError("--text is empty.")
    if output is not None and output.suffix.lower() not in FORMATS:  # before the model is loaded
        raise ExplainError(f"--output ends in {' or '.join(FORMATS)}, got {str(output)!r}.")
    scorer = load_model(model)
    fields = PromptTemplate(scorer.config.prompt_template).fields
    example: Any = tuple(text) if text is not None else _row(str(data), split, row or 1, fields)
    (explanation,) = explain(scorer, [example])
    table = Table("after step", "prediction", "most read")
    for step in range(len(explanation.predictions)):
        most = ", ".join(f"{label(token)} {share:.0%}" for token, share in explanation.top_tokens(step))
        table.add_row(f"{step + 1}", escape(explanation.prediction_text(step)), escape(most))
    console.print(table)
    if output is not None:
        say(f"written to {save(explanation, output)}")


def _row(data: str, split: str | None, number: int, fields: tuple[str, ...]) -> dict[str, str]:
    """Return the text fields of a table's row, counted from 1."""
    from .data import TableError, check_text, read_rows

    found = next(islice(read_rows(data, split=split), number - 1, None), None)
    if found is None:
        raise TableError(f"{data} has no row {number}.")
    check_columns([found], fields, [], data, number - 1)
    return {f: check_text(found[f], where=data, column=f, row=number) for f in fields}
