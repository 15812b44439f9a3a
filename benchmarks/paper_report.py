"""Sections of the paper's table: averages and gaps beside the paper's, who wins on each data set, RELISH against RAFT."""

import numpy as np
from paper_claims import RELISH, SEARCHED

from modeling_relish.compare.results import METRICS
from modeling_relish.compare.summary import Average, gap_to_the_best_other, macro_averages

# RELISH relative to the second best, means over the paper's data sets and backbones (RELISH, abstract and table 2).
PAPER = {"pearson": 0.067, "spearman": 0.072, "nrmse": -0.199}


def gaps(tables, folder, regime):
    """Averages over data sets, and RELISH's gap to the best of the others, beside the paper's."""
    parts = [f"## {folder}: means over data sets"]
    for backbone, averages in macro_averages(tables).items():
        of = [table for table in tables if table.backbone == backbone]
        kept = {(a.name, a.regime) for a in averages}
        missing = sorted({row.name for table in of for row in table.rows if (row.name, row.regime) not in kept})
        own = [a for a in averages if a.regime in (regime, "none") or (regime == "frozen" and a.regime == "full")]
        lines = [f"### {backbone}: {', '.join(table.dataset for table in of)}"]
        lines += [f"Not on all of them, so left out: {', '.join(missing)}."] if missing else []
        lines += ["| method | regime | Pearson | Spearman | NRMSE |\n|---|---|---|---|---|"]
        lines[-1] += "".join(f"\n| {a.name} | {a.regime} | {numbers(a)} |" for a in own)
        others = [a for a in own if a.name not in (RELISH, SEARCHED)]
        lines.append("| relative to the best other | Pearson | Spearman | NRMSE |\n|---|---|---|---|")
        for a in own:
            if a.name in (RELISH, SEARCHED):
                found = gap_to_the_best_other([a, *others], a)
                lines[-1] += f"\n| {a.name}, here | {' | '.join(relative(found[m]) for m in METRICS)} |"
        lines[-1] += f"\n| RELISH, the paper | {' | '.join(f'{PAPER[m]:+.1%}' for m in METRICS)} |"
        parts += lines
    return parts if len(parts) > 1 else [*parts, "No backbone has two data sets yet."]


def relative(gap):
    return "–" if np.isnan(gap) else f"{gap:+.1%}"


def numbers(average):
    return " | ".join(f"{average.metrics[m]:.3f}" for m in METRICS)


def against_raft(frozen, whole):
    """RELISH on frozen states beside RAFT, the paper's second, where both have learned from all training rows."""
    lines = ["| data set | backbone | method | Pearson | Spearman | NRMSE |", "|---|---|---|---|---|---|"]
    own = {
        (t.dataset, t.backbone): row for t in frozen for row in t.rows if (row.name, row.regime) == (SEARCHED, "frozen")
    }
    for table in whole:
        raft = [row for row in table.rows if row.name == "RAFT"]
        relish = own.get((table.dataset, table.backbone))
        if not raft or relish is None:
            continue
        rows = {f"{SEARCHED}, frozen": relish, "RAFT, lora": raft[0]}
        averages = [Average(name, row.regime, {m: row.mean(m) for m in METRICS}) for name, row in rows.items()]
        gap = gap_to_the_best_other(averages, averages[0])
        where = f"| {table.dataset} | {table.backbone}"
        lines += [f"{where} | {a.name} | {numbers(a)} |" for a in averages]
        lines.append(f"{where} | relative | {' | '.join(relative(gap[m]) for m in METRICS)} |")
    if len(lines) == 2:
        return []
    lines.append(
        f"| five | four of 8B to 32B | relative, the paper | {' | '.join(f'{PAPER[m]:+.1%}' for m in METRICS)} |"
    )
    return ["## RELISH on frozen states against RAFT with LoRA, all training rows", "\n".join(lines)]


def wins(tables):
    """On every data set: does RELISH with layer search beat every other frozen head by more than the seeds' spread?

    RELISH on the last layer is one of the others, unless that is the layer that was searched.
    """
    lines = [
        "| data set | backbone | RELISH, layer search | best other frozen head | difference | spread over seeds | more |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for table in tables:
        heads = {
            row.name: row
            for row in table.rows
            if row.regime == "frozen" and row.runs[0].trainable_parameters > 0 and not np.isnan(row.mean("pearson"))
        }
        own = heads.pop(SEARCHED, None)
        others = [row for row in heads.values() if own and row.runs[0].settings != own.runs[0].settings]
        if not others:
            continue
        # The nearest of the others need not be the one that spreads most: each is compared.
        spreads = {row.name: np.max([own.spread("pearson"), row.spread("pearson")]) for row in others}
        lead = {row.name: own.mean("pearson") - row.mean("pearson") for row in others}
        unbeaten = [name for name in lead if not lead[name] > spreads[name]]
        best = min(lead, key=lead.__getitem__)
        verdict = f"**no**: {', '.join(unbeaten)}" if unbeaten else "yes"
        cells = [
            table.dataset, table.backbone, f"{own.mean('pearson'):.3f}", f"{best} {heads[best].mean('pearson'):.3f}",
            f"{lead[best]:+.3f}", f"{spreads[best]:.3f}", "one seed" if np.isnan(list(spreads.values())).any() else verdict,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return ["## Test Pearson of RELISH with layer search against every other frozen head", "\n".join(lines)]
