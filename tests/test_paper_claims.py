"""What the papers find beside what is measured here: who is ahead, by how much, and that it is said where nobody measured."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from comparing import MeasuredRow

ROOT = Path(__file__).parents[1]


@pytest.fixture
def paper_claims(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import paper_claims

    return paper_claims


def table(dataset, *rows, backbone="b"):
    return SimpleNamespace(dataset=dataset, backbone=backbone, title=f"{dataset}, {backbone}", rows=rows)


def judged(paper_claims, text, **folders):
    (claim,) = [c for c in paper_claims.CLAIMS if c.text == text]
    return paper_claims.judge(claim, folders)


@pytest.mark.parametrize(
    ("relish", "raft", "verdict"),
    [
        ([0.80, 0.81, 0.82], [0.7], "yes"),
        ([0.80, 0.81, 0.82], [0.805], "**no**"),  # ahead by less than the spread
        ([0.80, 0.81, 0.82], [0.9], "**no**"),
        ([0.8], [0.7], "yes"),
        ([math.nan], [0.7], "not measured"),
    ],
)
def test_a_lead_is_one_beyond_the_seeds_spread(paper_claims, relish, raft, verdict):
    frozen = [table("stsb", MeasuredRow("RELISH", *relish), MeasuredRow("RELISH, layer search", 0.99))]
    whole = [table("stsb", MeasuredRow("RAFT", *raft))]
    found = judged(paper_claims, "RELISH, last layer, before RAFT", frozen=frozen, whole=whole)
    assert found[0] == verdict


def test_each_data_set_and_backbone_counts_and_the_worst_is_shown(paper_claims):
    frozen = [
        table("stsb", MeasuredRow("RELISH", 0.8), MeasuredRow("linear, mean", 0.7), MeasuredRow("MLP, mean", 0.75)),
        table("sickr", MeasuredRow("RELISH", 0.8), MeasuredRow("linear, mean", 0.9), backbone="other"),
    ]
    verdict, figures = judged(paper_claims, "RELISH before static heads, frozen", frozen=frozen)
    assert verdict == "**in part**"
    assert figures == "2 of 3; least so: 0.800 against 0.900 (linear, mean; sickr, other; spread 0.000)"


def test_the_same_rows_of_training_are_compared(paper_claims):
    thousand = [
        table("stsb-1000", MeasuredRow("RELISH", 0.8), MeasuredRow("linear, mean", 0.7), MeasuredRow("MLP, mean", 0.7))
    ]
    assert judged(paper_claims, "RELISH before static heads, LoRA", thousand=thousand)[0] == "yes"
    assert judged(paper_claims, "RELISH before static heads, frozen", thousand=thousand) == ("not measured", "–")


def test_about_equal_is_within_the_spread_or_a_hundredth(paper_claims):
    text = "Huber about as good as MSE"
    for huber, mse, verdict in (([0.8], [0.809], "yes"), ([0.8], [0.82], "**no**"), ([0.77, 0.83], [0.82], "yes")):
        rows = [
            MeasuredRow("RELISH", *huber, learning_rate=1),
            MeasuredRow("RELISH", *mse, learning_rate=1, objective="mse"),
        ]
        # Another change at once is another row, whatever it reaches.
        rows.append(MeasuredRow("RELISH", 0.1, learning_rate=1, objective="mse", num_latents=4))
        assert judged(paper_claims, text, ablations=[table("stsb", *rows)])[0] == verdict


def test_grids_are_told_apart_by_their_tokens(paper_claims):
    months = dict(zip(paper_claims.MONTHS.split(), range(6), strict=True))
    rows = [
        MeasuredRow("RAFT", 0.5, number_grid=months, name="months"),
        MeasuredRow("RAFT", 0.6, number_grid={letter: i for i, letter in enumerate("ABCDEF")}),
    ]
    grids = [table("stsb-1000", *rows)]
    assert judged(paper_claims, "letters before months", grids=grids)[0] == "yes"
    assert judged(paper_claims, "digits before letters", grids=grids) == ("not measured", "–")


def test_a_choice_that_was_abandoned_after_one_seed_does_not_stand_for_the_method(paper_claims):
    chosen, abandoned = (
        MeasuredRow("RELISH", 0.7, 0.7, 0.7, learning_rate=1),
        MeasuredRow("RELISH", 0.9, learning_rate=2),
    )
    frozen, whole = [table("stsb", abandoned, chosen)], [table("stsb", MeasuredRow("RAFT", 0.8))]
    assert judged(paper_claims, "RELISH, last layer, before RAFT", frozen=frozen, whole=whole)[0] == "**no**"


def test_a_claim_is_a_line_measured_or_not(paper_claims):
    title, text = paper_claims.claims({})
    lines = text.splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [claim.text for claim in paper_claims.CLAIMS]
    assert all(line.split(" | ")[2] == "not measured" for line in lines)
    assert title.startswith("## ")
