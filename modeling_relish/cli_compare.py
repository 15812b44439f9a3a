"""`relish compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_shared import DEFAULT_BACKBONE, say


def compare(
    data: Annotated[
        str, typer.Argument(help="csv, tsv, jsonl, parquet, a folder with train/validation/test, or a hub id.")
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for results and report; a comparison in it that was interrupted goes on.")
    ],
    label: Annotated[
        str | None, typer.Option(help="Column with the number to predict; default: the one column of numbers.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="all, or names with commas between; an unknown name lists them.")
    ] = "all",
    text: Annotated[
        list[str] | None, typer.Option(help="Text column; repeat for several. Default: every text column.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt, as 'Sentence 1: {text_a}\\nSentence 2: {text_b}\\nScore:'.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Table to choose settings on; default: a tenth of the rows.")
    ] = None,
    test: Annotated[str | None, typer.Option(help="Table to report on; default: a tenth of the rows.")] = None,
    label_min: Annotated[
        float | None, typer.Option(help="Lower end of the label's scale; default: the lowest label.")
    ] = None,
    label_max: Annotated[float | None, typer.Option(help="Upper end of the label's scale.")] = None,
    backbone: Annotated[list[str] | None, typer.Option(help="Hub id, folder, or embedded:NAME; repeatable.")] = None,
    encoder: Annotated[str, typer.Option(help="Backbone of the encoder baselines.")] = "embedded:all-MiniLM-L6-v2",
    regimes: Annotated[
        str, typer.Option(help="frozen, lora and full (encoders alone), with commas between.")
    ] = "frozen,lora,full",
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0.")] = 3,
    budget: Annotated[str | None, typer.Option(help="30m, 2h, ...: what does not fit is left out and named.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="settings.json of another comparison: nothing in it is searched again.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, max=3, help="Settings tried for each method.")] = 3,
    epochs: Annotated[float, typer.Option(help="Passes over the training rows, backbone frozen.")] = 8.0,
    backbone_epochs: Annotated[float, typer.Option(help="The same where it is trained.")] = 3.0,
    train_rows: Annotated[int | None, typer.Option(help="Train on a sample of this many rows.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest prompt in tokens.")] = 1024,
) -> None:
    """Run every method on a table, and write a report on what they give and what they cost."""
    from .compare import Options
    from .compare import compare as run
    from .data import guess_label_column

    if label is None:
        label = guess_label_column(data)
        say(f"label: {label}")
    found = run(
        data, output, methods=methods, backbones=backbone or [DEFAULT_BACKBONE], encoder=encoder, regimes=regimes,
        seeds=seeds, budget=budget, settings=settings, max_length=max_length, log=say, text=text, label=label,
        template=template.replace("\\n", "\n") if template else None, validation=validation, test=test,
        label_min=label_min, label_max=label_max, train_rows=train_rows,
        options=Options(epochs=epochs, backbone_epochs=backbone_epochs, candidates=candidates),
    )  # fmt: skip
    for name, reason in found.left_out.items():
        say(f"left out: {name}: {reason}")
    say(f"{len(found.runs)} runs; the report is {found.report['html']}")
