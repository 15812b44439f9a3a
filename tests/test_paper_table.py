"""The paper's table on small tables: every stage, the gaps beside the paper's, nothing done twice."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from comparing import MeasuredRow, save_language_model, save_table

from modeling_relish.compare.results import read_results

ROOT = Path(__file__).parents[1]
STAGES = "frozen,numbers,thousand,whole,matched,grids,ablations"
SCALES = {"stsb": (0, 5), "sickr": (1, 5)}


def save_sets(folder):
    for name, (low, high) in SCALES.items():
        save_table(folder / name)
        for path in (folder / name).glob("*.csv"):
            with path.open(encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            with path.open("w", newline="", encoding="utf-8") as file:
                scaled = [(a, b, low + (high - low) * float(score) / 5) for a, b, score in rows]
                csv.writer(file).writerows([header, *scaled])


def run(folder, stages):
    command = [
        sys.executable, ROOT / "benchmarks" / "paper_table.py", folder / "data", "--output", folder / "paper", "--rows", "24",
        "--backbone", folder / "tiny-qwen", "--methods", "tfidf_ridge,linear,relish_layer_search", "--epochs", "1",
        "--backbone-epochs", "1", "--candidates", "1", "--samples", "2",
        "--shots", "4", "--seeds", "1", "--sets", ",".join(SCALES), "--stages", stages,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RELISH_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "RELISH_DEBUG": "1",
    }  # fmt: skip
    return subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    save_sets(folder / "data")
    save_language_model(folder / "tiny-qwen")
    return folder, run(folder, STAGES)


def test_every_stage_leaves_its_results(paper):
    folder, _ = paper
    assert len(read_results(folder / "paper" / "frozen" / "results")) == 2 * 3
    tuned = {"RAFT", "RELISH", "RELISH, layer search", "linear, mean", "MLP, mean"}
    written = {"cross-entropy, decoding", "cross-entropy, RAIL"}
    whole = read_results(folder / "paper" / "whole" / "results")
    assert {(r.method, r.dataset, r.seed) for r in whole} == {(m, "stsb", 0) for m in tuned | written}
    thousand = read_results(folder / "paper" / "thousand" / "results")
    assert {r.method for r in thousand if r.dataset == "sickr-1000"} == tuned
    said = {"zero-shot decoding", "many-shot decoding", "RAIL, grid", "RAIL, sampling"}
    assert {r.method for r in thousand if r.dataset == "stsb-1000"} == tuned | written | said
    grids = [r.settings["number_grid"] for r in read_results(folder / "paper" / "grids" / "results")]
    assert len(grids) == 2
    assert all(grid in grids for grid in ([1, 2, 3, 4, 5], {"5": 5}))
    changed = {json.dumps(r.settings, sort_keys=True) for r in read_results(folder / "paper" / "ablations" / "results")}
    assert len(changed) == 3
    matched = [r for r in read_results(folder / "paper" / "matched" / "results") if r.dataset == "stsb-1000"]
    relish = next(r for r in matched if r.method == "RELISH, layer search")
    raft = {(r.settings["lora_rank"], r.settings["epochs"]): r for r in matched if r.method == "RAFT"}
    in_its_time = max(0.1, round(relish.train_seconds / raft[8, 1].train_seconds, 1))  # 1 where both took as long
    assert {epochs for rank, epochs in raft if rank == 8} == {1, in_its_time}
    assert len(matched) == 4 + len(raft)
    ranks = {r.settings["lora_rank"]: r.trainable_parameters for r in matched if r.method == "RAFT"}
    assert len(ranks) == 2
    # The head over a tiny backbone is all of its parameters: one rank more or less is 1/2 of RAFT's.
    assert abs(ranks[max(ranks)] - relish.trainable_parameters) <= ranks[8] / 8


def test_the_table_has_our_gaps_beside_the_papers(paper):
    folder, _ = paper
    text = (folder / "paper" / "table.md").read_text(encoding="utf-8")
    block = text.split("## frozen: means over data sets")[1].split("## Test Pearson")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    assert f"### tiny-qwen: {', '.join(sorted(SCALES))}\n" in block
    gaps = {row[0]: row[1:] for row in rows}
    assert gaps["RELISH, the paper"] == ["+6.7%", "+7.2%", "-19.9%"]
    results = read_results(folder / "paper" / "frozen" / "results")

    def mean(method):
        sets = [[r.test["pearson"] for r in results if (r.method, r.dataset) == (method, name)] for name in SCALES]
        return np.mean([np.mean(values) for values in sets])

    best = max(mean("linear, mean"), mean("TF-IDF, ridge"))
    assert gaps["RELISH, layer search, here"][0] == f"{mean('RELISH, layer search') / best - 1:+.1%}"
    wins, against = text.split("## Test Pearson")[1].split("## RELISH on frozen states against RAFT")
    against, claims = against.strip().split("\n\n## What the papers find")
    judged = {line.split(" | ")[0].strip("| "): line.split(" | ")[2] for line in claims.splitlines()[4:]}
    # Rows of every folder are found: what was measured has a verdict.
    measured = {claim for claim, verdict in judged.items() if verdict != "not measured"}
    assert {
        "RELISH, layer search, before RAFT",
        "RELISH before static heads, LoRA",
        "three steps before one",
    } <= measured
    assert {"RAFT before cross-entropy, however it is read", "grid of one digit as good as five"} <= measured
    assert judged["letters before months"] == judged["Huber about as good as MSE"] == "not measured"
    assert len(re.findall(r"^\| (?:stsb|sickr|wmt20)", wins, re.M)) == 2
    own = [r.test for r in results if (r.method, r.dataset) == ("RELISH, layer search", "stsb")]
    raft = [r.test for r in read_results(folder / "paper" / "whole" / "results") if r.method == "RAFT"]
    own, raft = (
        [np.mean([test[m] for test in tests]) for m in ("pearson", "spearman", "nrmse")] for tests in (own, raft)
    )
    shown = [[f"{value:.3f}" for value in values] for values in (own, raft)]
    shown += [
        [f"{a / b - 1:+.1%}" if b > 0 else "–" for a, b in zip(own, raft, strict=True)],
        ["+6.7%", "+7.2%", "-19.9%"],
    ]
    assert [line.strip(" |").split(" | ")[-3:] for line in against.splitlines() if "---" not in line][-4:] == shown


@pytest.mark.parametrize(
    ("own", "others", "verdict"),
    [
        ([0.83, 0.84, 0.85], [MeasuredRow("MLP", 0.80, 0.81, 0.82), MeasuredRow("linear", 0.7, 0.7, 0.7)], "yes"),
        ([0.83, 0.84, 0.85], [MeasuredRow("MLP", 0.83, 0.83, 0.84), MeasuredRow("linear", math.nan)], "**no**: MLP"),
        # Further below than the best of them, and by less than its spread.
        (
            [0.83, 0.84, 0.85],
            [MeasuredRow("MLP", 0.81, 0.81, 0.81), MeasuredRow("linear", 0.7, 0.8, 0.9)],
            "**no**: linear",
        ),
        ([0.83, 0.84, 0.85], [MeasuredRow("RELISH", 0.86, 0.86, 0.86)], "**no**: RELISH"),
        (
            [0.83, 0.84, 0.85],
            [MeasuredRow("RELISH", 0.83, 0.84, 0.85, layer=1), MeasuredRow("MLP", 0.7, 0.7, 0.7)],
            "yes",
        ),
        ([0.83, 0.84, 0.85], [MeasuredRow("MLP", 0.7)], "one seed"),
        ([0.83], [MeasuredRow("MLP", 0.7, 0.7, 0.7)], "one seed"),
    ],
)
def test_relish_beats_the_other_heads_by_more_than_the_spread_or_the_table_says_no(own, others, verdict, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import paper_report

    rows = [MeasuredRow("RELISH, layer search", *own, layer=1), *others]
    table = SimpleNamespace(dataset="stsb", backbone="b", rows=rows)
    _, lines = paper_report.wins([table])
    assert lines.splitlines()[-1].split(" | ")[-1].strip(" |") == verdict


def test_nothing_is_done_twice(paper):
    folder, first = paper
    matched = len(read_results(folder / "paper" / "matched" / "results")) - 5  # the others are those of `thousand`
    jobs = {"frozen": 2 * 3, "thousand": 4 + 2 * 5 + 1, "whole": 5 + 1, "matched": matched, "grids": 2, "ablations": 3}
    assert first.count("validation Pearson") == sum(jobs.values())
    again = run(folder, "frozen,thousand,matched,ablations")
    assert "validation Pearson" not in again
