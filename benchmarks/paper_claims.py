"""What the two papers found, and whether it is so in the tables measured here: each claim with both figures side by side."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeling_relish.compare.summary import Row, Table
from modeling_relish.number_grid_relish import NumberGrid

Tables = Mapping[str, Sequence[Table]]  # name of a folder of results -> its tables
RELISH, SEARCHED = "RELISH", "RELISH, layer search"
STATIC = ("linear, mean", "MLP, mean")


@dataclass(frozen=True)
class Pair:
    """Two rows that a claim puts side by side, the one that should come first before the other.

    Args:
        where: Data set and backbone.
        first: Row that the paper has higher.
        second: The other.
    """

    where: str
    first: Row
    second: Row

    @property
    def lead(self) -> float:
        """By how much test Pearson of the first is above that of the second; NaN where one is not defined."""
        return self.first.mean("pearson") - self.second.mean("pearson")

    @property
    def spread(self) -> float:
        """The larger standard deviation over seeds of the two; 0 where neither has several seeds."""
        return float(np.nanmax([0.0, self.first.spread("pearson"), self.second.spread("pearson")]))


@dataclass(frozen=True)
class Claim:
    """A finding of a paper.

    Args:
        text: As the paper has it.
        source: Paper and section.
        pairs: Finds the pairs of rows that it speaks of.
        close: Whether it says that the two are about equal; else that the first is ahead.
    """

    text: str
    source: str
    pairs: Callable[[Tables], Iterable[Pair]]
    close: bool = False


def rows_of(
    tables: Tables, folder: str, method: str, dataset: str | None = None, **settings: Any
) -> dict[tuple[str, str], Row]:
    """Find a method's row on every data set and backbone; (data set without its number of rows, backbone) -> row.

    Of several rows of one method, unless settings tell them apart, that with the most seeds is taken, and of such the one
    with the best validation Pearson.
    """
    found: dict[tuple[str, str], Row] = {}
    for table in tables.get(folder, ()):
        rows = [row for row in table.rows if row.runs[0].method == method and _has(row, settings)]
        if rows and dataset in (None, table.dataset):
            found[table.dataset.removesuffix("-1000"), table.backbone] = max(rows, key=_seeds_and_validation)
    return found


def _seeds_and_validation(row: Row) -> tuple[int, float]:
    return len(row.runs), float(np.nan_to_num(row.mean("pearson", "validation"), nan=-np.inf))


def _has(row: Row, settings: Mapping[str, Any]) -> bool:
    return all(row.runs[0].settings.get(name) == value for name, value in settings.items())


def _side_by_side(first: Mapping[tuple[str, str], Row], second: Mapping[tuple[str, str], Row]) -> Iterator[Pair]:
    for key in first:
        if key in second:
            yield Pair(", ".join(filter(None, key)), first[key], second[key])


def _before(first: tuple[str, str], *others: tuple[str, str]) -> Callable[[Tables], Iterator[Pair]]:
    """(folder, method) of the one that should be ahead, and of those that should be behind it."""

    def pairs(tables: Tables) -> Iterator[Pair]:
        for other in others:
            yield from _side_by_side(rows_of(tables, *first), rows_of(tables, *other))

    return pairs


def _ablation(one: Mapping[str, Any], other: Mapping[str, Any]) -> Callable[[Tables], Iterator[Pair]]:
    """RELISH on STS-B with two settings; a setting that is None is at the paper's value."""

    def pairs(tables: Tables) -> Iterator[Pair]:
        rows = [rows_of(tables, "ablations", RELISH, "stsb", **_ablated(changed)) for changed in (one, other)]
        yield from _side_by_side(*rows)

    return pairs


ABLATED = (
    "num_refinement_steps", "share_refinement_steps", "objective", "head_hidden_size", "head_num_attention_heads", "num_latents",
    "latent_init", "regressor", "input_norm", "backbone_layers",
)  # fmt: skip


def _ablated(changed: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(ABLATED), **changed}


def _over_static(tables: Tables) -> Iterator[Pair]:
    single = rows_of(tables, "ablations", RELISH, "stsb", **_ablated({"num_refinement_steps": 1}))
    yield from _side_by_side(single, rows_of(tables, "frozen", "MLP, mean, layer search", "stsb"))


def _grids(first: str, second: str) -> Callable[[Tables], Iterator[Pair]]:
    def pairs(tables: Tables) -> Iterator[Pair]:
        for table in tables.get("grids", ()):
            by_grid = {" ".join(_strings(row)): row for row in table.rows}
            if first in by_grid and second in by_grid:
                yield Pair(f"{table.title}, {{{first}}} | {{{second}}}", by_grid[first], by_grid[second])

    return pairs


def _strings(row: Row) -> tuple[str, ...]:
    return tuple(NumberGrid.from_setting(row.runs[0].settings["number_grid"]).strings)


# SmolLM2's vocabulary has them for parts of code repositories: no word of a prompt is one of them.
UNTRAINED = "<reponame> <gh_stars> <issue_start> <jupyter_start> <empty_output>"
DIGITS, LETTERS = "1 2 3 4 5", "A B C D E F"
MONTHS = "January February March April May June"
CLAIMS = (
    Claim("RELISH, last layer, before RAFT", "RELISH, table 2", _before(("frozen", RELISH), ("whole", "RAFT"))),
    Claim(
        "RELISH, layer search, before RAFT", "RELISH, table 2, with our layer", _before(("frozen", SEARCHED), ("whole", "RAFT"))
    ),
    Claim(
        "RELISH before static heads, frozen", "RELISH, table 2",
        _before(("frozen", RELISH), *(("frozen", name) for name in STATIC)),
    ),
    Claim(
        "RELISH before static heads, LoRA", "RELISH, table 2",
        _before(("thousand", RELISH), *(("thousand", name) for name in STATIC)),
    ),
    Claim(
        "zero-shot decoding before static heads", "RELISH, table 2",
        _before(("frozen", "zero-shot decoding"), *(("frozen", name) for name in STATIC)),
    ),
    Claim(
        "RAFT before cross-entropy, however it is read", "RAFT, table 2",
        _before(("thousand", "RAFT"), *(("thousand", f"cross-entropy, {read}") for read in ("RAIL", "decoding"))),
    ),
    Claim(
        "RAFT before a head on the model's states", "RAFT, predictor variants",
        _before(("thousand", "RAFT"), *(("thousand", name) for name in STATIC)),
    ),
    Claim("one step before static pooling", "RELISH, ablations", _over_static),
    Claim("three steps before one", "RELISH, ablations", _ablation({}, {"num_refinement_steps": 1})),
    Claim("Huber about as good as MSE", "RELISH, ablations", _ablation({}, {"objective": "mse"}), close=True),
    Claim("grid of one digit as good as five", "RAFT, grids", _grids("5", DIGITS), close=True),
    Claim("adding 0 changes nothing", "RAFT, grids", _grids(f"0 {DIGITS}", DIGITS), close=True),
    Claim("digits before letters", "RAFT, grids", _grids(DIGITS, LETTERS)),
    Claim("digits before untrained tokens", "RAFT, grids", _grids(DIGITS, UNTRAINED)),
    Claim("letters before months", "RAFT, grids", _grids(LETTERS, MONTHS)),
)  # fmt: skip


def judge(claim: Claim, tables: Tables) -> tuple[str, str]:
    """Return (verdict, figures) of a claim: whether it is so here, in how many cases, and the worst of them.

    A lead, or a distance where two should be about equal, is set against the larger standard deviation over seeds.
    """
    pairs = [pair for pair in claim.pairs(tables) if not np.isnan(pair.lead)]
    if not pairs:
        return "not measured", "–"
    if claim.close:
        held = [abs(pair.lead) <= max(0.01, pair.spread) for pair in pairs]
        worst = max(pairs, key=lambda pair: abs(pair.lead))
    else:
        held = [pair.lead > pair.spread for pair in pairs]
        worst = min(pairs, key=lambda pair: pair.lead - pair.spread)
    verdict = "yes" if all(held) else "**no**" if not any(held) else "**in part**"
    first, second = (f"{row.mean('pearson'):.3f}" for row in (worst.first, worst.second))
    where = f"{first} against {second} ({worst.second.name}; {worst.where}; spread {worst.spread:.3f})"
    return verdict, f"{sum(held)} of {len(pairs)}; least so: {where}"


def claims(tables: Tables) -> list[str]:
    """Lines of Markdown: every claim, and whether it is so here; by how much is that of the test Pearson."""
    lines = ["| the papers find | source | so here | test Pearson |", "|---|---|---|---|"]
    for claim in CLAIMS:
        lines.append("| " + " | ".join((claim.text, claim.source, *judge(claim, tables))) + " |")
    return ["## What the papers find, and what is so here", "\n".join(lines)]
