"""The report's pictures: accuracy against time and parameters, convergence, predicted against true, calibration."""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .results import ResultError
from .summary import Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 10
_COLUMNS = 5
_LONGEST_NAME = 60
_COLOURS = 20
_LINES = ("-", "--", ":", "-.")  # of rows whose colours repeat
_MARKERS = {"frozen": "o", "lora": "s", "full": "D", "none": "^"}


def figures(table: Table) -> dict[str, str]:
    """Draw a table's pictures; caption -> `data:` address, to stand in a page by itself.

    Raises:
        ResultError: where matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ResultError(f"plots need matplotlib: pip install modeling-relish[explain] ({error}).") from error
    # The same results give the same bytes; names are no formulas, whatever they hold.
    with mpl.rc_context({"svg.hashsalt": "relish", "text.parse_math": False, "font.size": 8, "axes.titlesize": 9}):
        untimed = [_name(row) for row in table.rows if math.isnan(row.average("total_seconds"))]
        missing = f"; its time is not known, for its states lay in the cache: {', '.join(untimed)}" if untimed else ""
        found = {
            f"Accuracy against time and trainable parameters (bars: spread over seeds){missing}": _svg(_accuracy(table))
        }
        if any(run.curve for row in table.rows for run in row.runs):
            found["Convergence: validation Pearson (thick: mean over seeds)"] = _svg(_convergence(table))
        found["Calibration: mean label of each tenth of the predictions, all seeds"] = _svg(_calibration(table))
        # Thousands of points: as pixels, a hundredth of the bytes.
        found["Predicted against true, test rows, first seed"] = _png(_predicted(table))
    return found


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _colours(table: Table) -> list[Any]:
    import matplotlib as mpl

    palette = mpl.colormaps["tab20"]
    return [palette(number % _COLOURS) for number in range(len(table.rows))]


def _line(number: int) -> str:
    return _LINES[number // _COLOURS % len(_LINES)]


def _name(row: Row) -> str:
    name = row.name if len(row.name) <= _LONGEST_NAME else f"{row.name[:_LONGEST_NAME]}…"
    return name if row.regime in ("frozen", "none") else f"{name}, {row.regime}"


def _limits(table: Table) -> tuple[float, float]:
    """Return the labels' scale and a quarter on either side: one answer of 100 on a scale of 5 must not press all others flat."""
    low, high = table.rows[0].runs[0].label_range
    return low - (high - low) / 4, high + (high - low) / 4


def _accuracy(table: Table) -> Figure:
    from matplotlib.ticker import EngFormatter

    figure = _figure(10, 4 + 0.1 * max(0, len(table.rows) - 12))
    panels = figure.subplots(1, 2, sharey=True)
    for (field, least, label), axes in zip(
        (
            ("total_seconds", 1.0, "seconds: extraction, training, scoring"),
            ("trainable_parameters", 1000.0, "trainable parameters"),
        ),
        panels, strict=True,
    ):  # fmt: skip
        for number, (row, colour) in enumerate(zip(table.rows, _colours(table), strict=True)):
            spread = row.spread("pearson")
            repeats = number >= _COLOURS
            axes.errorbar(
                [row.average(field)], [row.mean("pearson")], yerr=None if math.isnan(spread) else [spread],
                color=colour, marker=_MARKERS[row.regime], linestyle="", label=_name(row), capsize=2,
                markerfacecolor="white" if repeats else colour,
            )  # fmt: skip
        axes.set_xscale("symlog", linthresh=least)  # zero is there, too
        axes.set_xlim(-least / 4, 2 * np.nanmax([least, *(row.average(field) for row in table.rows)]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test Pearson")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure


def _convergence(table: Table) -> Figure:
    figure = _figure(10, 4)
    axes = figure.subplots()
    for number, (row, colour) in enumerate(zip(table.rows, _colours(table), strict=True)):
        curves = [np.asarray(run.curve, dtype=float) for run in row.runs if run.curve]
        for curve in curves:
            axes.plot(curve[:, 0], curve[:, 1], color=colour, alpha=0.35, linewidth=0.8)
        if curves:
            shared = sorted(set.intersection(*(set(curve[:, 0]) for curve in curves)))
            means = [np.mean([curve[curve[:, 0] == step, 1][0] for curve in curves]) for step in shared]
            axes.plot(shared, means, color=colour, linestyle=_line(number), linewidth=2, marker=".", label=_name(row))
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("validation Pearson")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return figure


def calibration(row: Row, bins: int = _BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean prediction and the mean label of equally many rows each, sorted by prediction, all seeds together.

    Rows with equal predictions stay together, so that bins may be fewer and of other sizes where a method says few numbers.
    """
    predictions = np.concatenate([run.test_predictions for run in row.runs])
    labels = np.concatenate([run.test_labels for run in row.runs])
    edges = np.unique(np.quantile(predictions, np.linspace(0, 1, bins + 1)[1:-1]))
    place = np.searchsorted(edges, predictions, side="left")
    kept = np.unique(place)
    return (
        np.array([predictions[place == b].mean() for b in kept]),
        np.array([labels[place == b].mean() for b in kept]),
    )


def _calibration(table: Table) -> Figure:
    figure = _figure(10, 4.5)
    axes = figure.subplots()
    axes.plot(table.rows[0].runs[0].label_range, table.rows[0].runs[0].label_range, color="grey", linestyle="--")
    for number, (row, colour) in enumerate(zip(table.rows, _colours(table), strict=True)):
        axes.plot(
            *calibration(row),
            color=colour,
            linestyle=_line(number),
            marker=_MARKERS[row.regime],
            markersize=4,
            label=_name(row),
        )
    axes.set_xlim(*_limits(table))
    axes.set_xlabel("mean prediction, as far as it is on the scale")
    axes.set_ylabel("mean label")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _predicted(table: Table) -> Figure:
    lines = math.ceil(len(table.rows) / _COLUMNS)
    figure = _figure(2.2 * _COLUMNS, 2.3 * lines)
    panels = figure.subplots(lines, _COLUMNS, squeeze=False, sharex=True, sharey=True).ravel()
    panels[0].set_ylim(*_limits(table))
    for axes in panels[len(table.rows) :]:
        axes.set_axis_off()
    for row, axes, colour in zip(table.rows, panels, _colours(table), strict=False):
        run = row.runs[0]
        axes.plot(run.label_range, run.label_range, color="grey", linewidth=0.8, linestyle="--")
        axes.scatter(run.test_labels, run.test_predictions, s=3, alpha=0.3, color=colour, linewidths=0)
        axes.set_title(_name(row), fontsize=7, wrap=True)
    figure.supxlabel("true")
    figure.supylabel("predicted, as far as it is on the scale")
    return figure


def _svg(figure: Figure) -> str:
    return _address(figure, "svg+xml", format="svg", metadata={"Date": None})


def _png(figure: Figure) -> str:
    return _address(figure, "png", format="png", dpi=110, metadata={"Software": None})


def _address(figure: Figure, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
