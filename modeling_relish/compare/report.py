"""A folder of results -> a report: Markdown, CSV, and one HTML page with plots that needs no network."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from .plots import figures
from .results import METRICS, RunResult, read_results
from .significance import RESAMPLES, Difference
from .summary import Average, Row, Table, differences, gap_to_the_best_other, macro_averages, make_tables

HEADINGS = (
    "method", "regime", "seeds", "Pearson", "Spearman", "NRMSE", "trainable", "seconds", "peak GB",
    "Pearson against the reference",
)  # fmt: skip
NOTE = (
    "Test rows; mean ± standard deviation over seeds. Seconds: extraction + training + scoring. The reference is the row with "
    "the best validation Pearson, or the one that was asked for. Against it: the difference in Pearson and its interval over "
    "test rows and seeds together, 95 % for all comparisons of a table at once; only what does not hold zero is called better "
    "or worse, and with few seeds or rows even a large difference may not be shown."
)


def write_report(
    results: str | Path | Sequence[RunResult],
    output: str | Path,
    *,
    title: str = "Comparison",
    reference: str | None = None,
    resamples: int = RESAMPLES,
    notes: Sequence[str] = (),
) -> dict[str, Path]:
    """Read all results of a folder and write `report.md`, `report.csv` and `report.html`.

    Args:
        results: Folder with one JSON file per run, or the runs.
        output: Folder of the report; made where it is missing.
        title: Heading.
        reference: Name of the row that the others are compared with; `None` = the best by validation, table by table.
        resamples: Of the bootstrap.
        notes: Sentences to end with, as what was left out.

    Returns:
        "md", "csv" and "html" -> the file.

    Raises:
        ResultError: for a folder without results, results that contradict each other, a reference that is not there, or where
            matplotlib is missing.
    """
    runs = read_results(results) if isinstance(results, (str, Path)) else results
    tables = make_tables(runs)
    bodies = [_cells(table, reference, resamples) for table in tables]
    pages = {
        "md": _markdown(title, tables, bodies, notes),
        "csv": _csv(runs),
        "html": _html(title, tables, bodies, notes),
    }
    return {ending: _write(Path(output) / f"report.{ending}", text) for ending, text in pages.items()}


# ---------------------------------------------------------------------- cells


def _cells(table: Table, reference: str | None, resamples: int) -> list[list[str]]:
    chosen = table.reference(reference)
    found = differences(table, chosen, resamples=resamples)
    return [
        [
            row.name,
            row.regime,
            str(len(row.runs)),
            *(_measured(row, metric) for metric in METRICS),
            _count(row.average("trainable_parameters")),
            " + ".join(_number(row.average(f"{part}_seconds")) for part in ("extraction", "train", "predict")),
            _number(row.average("peak_memory_bytes") / 1e9, 2),
            _against(found[number]) if number in found else "reference",
        ]
        for number, row in enumerate(table.rows)
    ]


def _measured(row: Row, metric: str) -> str:
    mean, spread = row.mean(metric), row.spread(metric)
    if math.isnan(mean):
        return "–"
    return f"{mean:.3f}" if math.isnan(spread) else f"{mean:.3f} ± {spread:.3f}"


def _against(difference: Difference) -> str:
    if math.isnan(difference.value):
        return difference.verdict
    if math.isinf(difference.rows[0]):
        return f"{difference.value:+.3f} {difference.verdict}"
    low, high = difference.interval if math.isfinite(difference.interval[0]) else difference.rows
    which = "" if math.isfinite(difference.interval[0]) else " rows alone"
    return f"{difference.value:+.3f} [{low:+.3f}, {high:+.3f}{which}] {difference.verdict}"


def _number(value: float, digits: int = 1) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _count(value: float) -> str:
    return f"{round(value):,}"


def _macro(averages: Sequence[Average]) -> tuple[list[list[str]], str]:
    """Return the cells of a table of averages, and a sentence on the first row's gap to the best other."""
    cells = [
        [a.name, a.regime, *("–" if math.isnan(a.metrics[m]) else f"{a.metrics[m]:.3f}" for m in METRICS)]
        for a in averages
    ]
    if len(averages) < 2:
        return cells, ""
    gaps = gap_to_the_best_other(averages, averages[0])
    told = ", ".join(
        f"{metric.capitalize() if metric != 'nrmse' else 'NRMSE'} {gap:+.1%}"
        for metric, gap in gaps.items()
        if gap == gap
    )
    return cells, f"{averages[0].name} ({averages[0].regime}) relative to the best other in each metric: {told}."


_MACRO_HEADINGS = (*HEADINGS[:2], *HEADINGS[3:6])


def _settings(table: Table) -> list[list[str]]:
    return [
        [
            row.name,
            row.regime,
            json.dumps(dict(row.runs[0].settings), ensure_ascii=False),
            json.dumps(dict(row.runs[0].versions)),
        ]
        for row in table.rows
    ]


def _rows_and_scale(table: Table) -> str:
    """Say what a table's numbers were measured on."""
    runs = [run for row in table.rows for run in row.runs]
    low, high = runs[0].label_range
    trained = sorted({run.settings["train_rows"] for run in runs if "train_rows" in run.settings})
    prompts = list(dict.fromkeys(run.settings["prompt_template"] for run in runs if "prompt_template" in run.settings))
    parts = [f"{len(runs[0].test_labels):,} test rows"]
    parts += [f"{' or '.join(f'{rows:,}' for rows in trained)} training rows"] if trained else []
    parts += [f"labels from {low:g} to {high:g}"]
    return f"{', '.join(parts)}.{f' Prompts: {prompts}.' if prompts else ''}"


def _notes(table: Table) -> list[str]:
    told = dict.fromkeys(f"{row.name}: {note}" for row in table.rows for run in row.runs for note in run.notes)
    return list(told)


# ---------------------------------------------------------------------- files


def _markdown(title: str, tables: Sequence[Table], bodies: Sequence[list[list[str]]], notes: Sequence[str] = ()) -> str:
    parts = [f"# {_md(title)}", NOTE]
    for backbone, averages in macro_averages(tables).items():
        cells, gap = _macro(averages)
        parts += [f"## Mean over data sets, {_md(backbone)}", _md_table(_MACRO_HEADINGS, cells), _md(gap)]
    for table, body in zip(tables, bodies, strict=True):
        parts += [
            f"## {_md(table.title)}",
            _md(_rows_and_scale(table)),
            _md_table(HEADINGS, body),
            *(f"- {_md(note)}" for note in _notes(table)),
        ]
    parts += [f"- {_md(note)}" for note in notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def _md_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([_md(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md(text: str) -> str:
    """Let a name be a name: no cell, line or tag of its own."""
    flat = " ".join(text.split()).replace("\\", "\\\\")
    for mark in "|`*_[]":
        flat = flat.replace(mark, f"\\{mark}")
    return flat.replace("<", "&lt;")


def _csv(runs: Sequence[RunResult]) -> str:
    """One line per run, everything but the predictions and the curve."""
    plain = ("dataset", "backbone", "method", "regime", "seed")
    measured = ("trainable_parameters", "train_seconds", "extraction_seconds", "predict_seconds", "peak_memory_bytes")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    metrics = [f"{part}_{metric}" for part in ("test", "validation") for metric in METRICS]
    writer.writerow([*plain, *metrics, *measured, "settings", "versions", "notes"])
    for run in runs:
        values = [run.test[m] for m in METRICS] + [run.validation[m] for m in METRICS]
        writer.writerow(
            [
                *(getattr(run, name) for name in plain),
                *("" if math.isnan(value) else f"{value:.6g}" for value in values),
                *(getattr(run, name) for name in measured),
                json.dumps(dict(run.settings), sort_keys=True),
                json.dumps(dict(run.versions), sort_keys=True),
                "; ".join(run.notes),
            ]
        )
    return buffer.getvalue()


# Nothing is loaded and nothing is run: pictures are in the page.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-size: 13px; margin: .5rem 0 }}
td, th {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }}
figure {{ margin: 1.5rem 0 }} img {{ max-width: 100% }} figcaption, .note {{ color: #555; font-size: 13px }}
.runs td:not(:first-child, :last-child) {{ white-space: nowrap }} .settings td {{ overflow-wrap: anywhere }}
</style></head><body>
<h1>{title}</h1>
<p class="note">{note}</p>
{body}
</body></html>
"""


def _html(title: str, tables: Sequence[Table], bodies: Sequence[list[list[str]]], notes: Sequence[str] = ()) -> str:
    parts = []
    for backbone, averages in macro_averages(tables).items():
        cells, gap = _macro(averages)
        parts += [
            f"<h2>Mean over data sets, {html.escape(backbone)}</h2>", _html_table(_MACRO_HEADINGS, cells, "runs"),
            f"<p>{html.escape(gap)}</p>",
        ]  # fmt: skip
    for table, body in zip(tables, bodies, strict=True):
        parts += [f"<h2>{html.escape(table.title)}</h2>", f"<p>{html.escape(_rows_and_scale(table))}</p>"]
        parts += [_html_table(HEADINGS, body, "runs")]
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in _notes(table)]
        parts += [
            f'<figure><img src="{address}" alt="{html.escape(caption)}"><figcaption>{html.escape(caption)}</figcaption></figure>'
            for caption, address in figures(table).items()
        ]
        settings = _html_table(("method", "regime", "settings", "versions"), _settings(table), "settings")
        parts.append(f"<details><summary>settings and versions</summary>{settings}</details>")
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in notes]
    return _PAGE.format(title=html.escape(title), note=html.escape(NOTE), body="\n".join(parts))


def _html_table(headings: Sequence[str], cells: Sequence[Sequence[str]], kind: str) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table class={kind}><tr>{head}</tr>\n{rows}</table>"


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
