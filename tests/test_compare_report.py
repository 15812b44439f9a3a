"""The report from the outside: its tables against numbers computed here, its page without network, in a real browser too."""

import base64
import csv
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from modeling_relish.compare import plots
from modeling_relish.compare.plots import calibration
from modeling_relish.compare.report import write_report
from modeling_relish.compare.results import ResultError, RunKey, RunResult, load_result, save_result
from modeling_relish.compare.summary import Row, gap_to_the_best_other, macro_averages, make_tables

LABELS = {name: np.round(np.random.default_rng(i).uniform(0, 5, 150), 1) for i, name in enumerate(["stsb", "sickr"])}
# method, regime -> error of the method, seeds, trainable parameters
METHODS = {
    ("RELISH", "frozen"): (0.5, 3, 2_517_505),
    ("MLP, mean", "frozen"): (1.5, 3, 591_000),
    ("RAFT", "lora"): (0.6, 1, 2_400_000),
    ("zero-shot", "frozen"): (2.5, 1, 0),
    ("TF-IDF, ridge", "none"): (3.0, 1, 0),
}


def make_run(dataset, method, regime, seed, noise, parameters, backbone="SmolLM2", settings=None, **rest):
    labels = LABELS[dataset]
    shared = np.random.default_rng([len(method), len(dataset)]).normal(size=len(labels))
    own = np.random.default_rng([seed, len(method)]).normal(size=len(labels))
    quality = 1 / (1 + noise)
    return RunResult.from_predictions(
        RunKey(method, regime, dataset, "" if regime == "none" else backbone, seed, settings or {"epochs": 3}),
        test_predictions=labels + noise * shared + 0.05 * own, test_labels=labels, label_range=(0, 5),
        validation={"pearson": quality, "spearman": quality, "nrmse": 0.2}, trainable_parameters=parameters,
        is_deterministic=parameters == 0,
        train_seconds=10.0 + seed, extraction_seconds=60.0, predict_seconds=2.0, peak_memory_bytes=1_500_000_000,
        curve=[(10, quality / 2), (20, quality)] if parameters else [], **rest,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    for dataset in LABELS:
        for (method, regime), (noise, seeds, parameters) in METHODS.items():
            for seed in range(seeds):
                save_result(folder / "runs", make_run(dataset, method, regime, seed, noise, parameters))
    return folder, write_report(folder / "runs", folder / "report", title="All methods", resamples=400)


def markdown_tables(text):
    """Heading -> rows as lists of cells."""
    found = {}
    for heading, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        lines = [line for line in body.splitlines() if line.startswith("|")]
        found[heading] = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return found


def test_tables_hold_what_the_runs_measured(report):
    tables = markdown_tables(report[1]["md"].read_text(encoding="utf-8"))
    assert list(tables) == ["Mean over data sets, SmolLM2", "sickr, SmolLM2", "stsb, SmolLM2"]
    rows = {(row[0], row[1]): row for row in tables["stsb, SmolLM2"]}
    assert rows.keys() == METHODS.keys()
    for (method, regime), (noise, seeds, parameters) in METHODS.items():
        runs = [make_run("stsb", method, regime, seed, noise, parameters) for seed in range(seeds)]
        pearson = [stats.pearsonr(r.test_predictions, LABELS["stsb"]).statistic for r in runs]
        spread = f" ± {np.std(pearson, ddof=1):.3f}" if seeds > 1 else ""
        row = rows[method, regime]
        assert row[2:4] == [str(seeds), f"{np.mean(pearson):.3f}{spread}"]
        assert row[6] == f"{parameters:,}"
        assert row[7] == f"60.0 + {10 + (seeds - 1) / 2:.1f} + 2.0"
        assert row[8] == "1.50"
    assert [row[3] for row in tables["stsb, SmolLM2"]] == sorted(
        (row[3] for row in tables["stsb, SmolLM2"]), reverse=True
    )


def test_differences_are_called_only_where_they_are(report):
    tables = markdown_tables(report[1]["md"].read_text(encoding="utf-8"))
    last = {row[0]: row[-1] for row in tables["stsb, SmolLM2"]}
    assert last["RELISH"] == "reference"
    assert last["MLP, mean"].endswith("worse")
    assert last["zero-shot"].endswith("worse")
    assert not last["RAFT"].endswith(("worse", "better"))
    assert re.search(r"-0\.\d+ \\?\[-0\.\d+, -0\.\d+\\?\] worse", last["zero-shot"])


def test_averages_over_data_sets_and_the_gap_to_the_best_other(report):
    runs = [
        make_run(d, m, r, s, n, p) for d in LABELS for (m, r), (n, seeds, p) in METHODS.items() for s in range(seeds)
    ]
    (averages,) = macro_averages(make_tables(runs)).values()
    for average in averages:
        own = [[r.test["nrmse"] for r in runs if (r.dataset, r.method) == (d, average.name)] for d in LABELS]
        assert average.metrics["nrmse"] == pytest.approx(np.mean([np.mean(values) for values in own]))
    gap = gap_to_the_best_other(averages, averages[0])
    assert averages[0].name == "RELISH"
    assert gap["pearson"] == pytest.approx(
        averages[0].metrics["pearson"] / max(a.metrics["pearson"] for a in averages[1:]) - 1
    )
    assert gap["nrmse"] == pytest.approx(
        averages[0].metrics["nrmse"] / min(a.metrics["nrmse"] for a in averages[1:]) - 1
    )
    assert gap["nrmse"] < 0 < gap["pearson"]
    assert f"Pearson {gap['pearson']:+.1%}" in report[1]["md"].read_text(encoding="utf-8")


def test_csv_has_a_line_for_every_run(report):
    with report[1]["csv"].open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * sum(seeds for _, seeds, _ in METHODS.values())
    for line in lines:
        noise, _, parameters = METHODS[line["method"], line["regime"]]
        run = make_run(line["dataset"], line["method"], line["regime"], int(line["seed"]), noise, parameters)
        assert float(line["test_pearson"]) == pytest.approx(run.test["pearson"], abs=1e-5)
        assert json.loads(line["settings"]) == {"epochs": 3}


class Addresses(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]


def test_page_holds_its_pictures_and_needs_nothing_else(report):
    raw = report[1]["html"].read_text(encoding="utf-8")
    page = Addresses(raw)
    assert page.tags.count("img") == 2 * 4
    assert all(re.match(r"data:image/(png|svg\+xml);base64,", address) for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in raw
    drawn = [
        base64.b64decode(address.partition(",")[2]).decode() for address in page.addresses if "svg" in address[:20]
    ]
    assert len(drawn) == 2 * 3
    for method, _ in METHODS:
        assert raw.count(f"<td>{method}</td>") >= 4
        assert sum(f"<!-- {method}" in picture for picture in drawn) >= 2 * 2, "every legend names it"
    assert not [picture for picture in drawn if "mathdefault" in picture], "a tick is written as a formula's source"
    assert sorted(path.name for path in report[1]["html"].parent.iterdir()) == [
        "report.csv",
        "report.html",
        "report.md",
    ]


def test_the_same_results_give_the_same_files(report, tmp_path):
    folder, files = report
    again = write_report(folder / "runs", tmp_path, title="All methods", resamples=400)
    for ending, path in files.items():
        assert again[ending].read_bytes() == path.read_bytes(), ending


def test_page_opens_in_a_browser(report, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    picture = tmp_path / "page.png"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,2600",
        f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={picture}",
        report[1]["html"].as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    # Pictures that had not loaded would leave text alone: the plots bring blue, orange and green.
    for colour in ((31, 119, 180), (255, 127, 14), (174, 199, 232)):
        assert (np.abs(pixels - colour).max(-1) <= 2).sum() > 30, colour


def test_names_are_names_whatever_they_hold(tmp_path):
    hostile = '<script>alert(1)</script> | $\\frac{ "x" _a_ {0}'
    for seed in range(2):
        save_result(tmp_path / "runs", make_run("stsb", hostile, "frozen", seed, 0.5, 5, notes=["<b>|\nnote"]))
        save_result(tmp_path / "runs", make_run("stsb", "plain", "lora", seed, 1.5, 5))
    files = write_report(tmp_path / "runs", tmp_path / "out", title=hostile, resamples=100)
    raw = files["html"].read_text(encoding="utf-8")
    assert "script" not in Addresses(raw).tags
    assert "b" not in Addresses(raw).tags
    tables = markdown_tables(files["md"].read_text(encoding="utf-8"))
    assert [len(row) for row in tables["stsb, SmolLM2"]] == [10, 10]
    assert "<script" not in files["md"].read_text(encoding="utf-8")


def test_settings_that_differ_make_rows_of_their_own_and_say_so(tmp_path):
    for steps in (1, 3):
        for seed in range(2):
            settings = {"epochs": 3, "num_refinement_steps": steps}
            save_result(tmp_path, make_run("stsb", "RELISH", "frozen", seed, 1 / steps, 9, settings=settings))
    (table,) = make_tables([r for p in tmp_path.glob("*.json") for r in [_read(p)]])
    assert [row.name for row in table.rows] == ["RELISH (num_refinement_steps=3)", "RELISH (num_refinement_steps=1)"]
    assert all(len(row.runs) == 2 for row in table.rows)
    assert table.reference().name == "RELISH (num_refinement_steps=3)"
    assert table.reference("RELISH (num_refinement_steps=1)") is table.rows[1]


def _read(path):
    values = json.loads(path.read_text())
    key = RunKey(*(values[name] for name in ("method", "regime", "dataset", "backbone", "seed", "settings")))
    return load_result(path.parent, key)


def test_reference_is_chosen_on_validation_and_never_on_test_rows():
    better_on_test = make_run("stsb", "a", "frozen", 0, 0.1, 5)
    better_on_validation = make_run("stsb", "bb", "frozen", 0, 1.0, 5)
    object.__setattr__(better_on_validation, "validation", {"pearson": 0.99, "spearman": 0.99, "nrmse": 0.1})
    (table,) = make_tables([better_on_test, better_on_validation])
    assert table.rows[0].name == "a"
    assert table.reference().name == "bb"
    with pytest.raises(ResultError, match="no row 'c'"):
        table.reference("c")


def test_constant_predictions_are_shown_as_not_defined(tmp_path):
    constant = RunResult.from_predictions(
        RunKey("constant", "frozen", "stsb", "SmolLM2", 0), test_predictions=[2.5] * 150, test_labels=LABELS["stsb"],
        label_range=(0, 5), validation={"pearson": math.nan, "spearman": math.nan, "nrmse": 0.3},
    )  # fmt: skip
    save_result(tmp_path, constant)
    save_result(tmp_path, make_run("stsb", "RELISH", "frozen", 0, 0.5, 5))
    rows = markdown_tables(write_report(tmp_path, tmp_path / "out", resamples=50)["md"].read_text())["stsb, SmolLM2"]
    assert rows[0][0] == "RELISH"
    assert rows[0][-1] == "reference"
    assert rows[1][3:5] == ["–", "–"]
    assert rows[1][8] == "–"
    assert rows[1][-1] == "not defined"


def test_runs_that_do_not_belong_together_are_refused():
    one = make_run("stsb", "a", "frozen", 0, 0.5, 5)
    with pytest.raises(ResultError, match="several results of one run"):
        make_tables([one, one])
    other = RunResult.from_predictions(
        RunKey("b", "frozen", "stsb", "Gemma", 0), test_predictions=[1.0, 2.0], test_labels=[1.0, 2.5],
        label_range=(0, 5), validation=one.validation,
    )  # fmt: skip
    with pytest.raises(ResultError, match="not measured on the same rows"):
        make_tables([one, other])


def test_calibration_is_the_mean_label_of_a_tenth_of_the_predictions():
    run = make_run("stsb", "a", "frozen", 0, 1.0, 5)
    x, y = calibration(Row("a", "frozen", (run,)), bins=10)
    order = np.argsort(run.test_predictions)
    expected = np.array(run.test_labels)[order].reshape(10, 15).mean(1)
    np.testing.assert_allclose(y, expected, atol=1e-9)
    np.testing.assert_allclose(x, np.sort(run.test_predictions).reshape(10, 15).mean(1), atol=1e-9)


def test_every_row_of_a_large_table_can_be_told_from_the_others_and_untimed_ones_are_named():
    noises = {f"method {i}": 0.3 + i / 10 for i in range(28)}
    runs = [
        replace(make_run("stsb", m, "frozen", 0, n, 100), curve=[(1.0, 0.1), (2.0, 0.2)]) for m, n in noises.items()
    ]
    runs[3] = replace(runs[3], extraction_seconds=None)
    (table,) = make_tables(runs)
    for draw in (plots._convergence, plots._calibration):
        lines = [line for line in draw(table).axes[0].lines if not line.get_label().startswith("_")]
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
        assert len(looks) == len(lines) == 28
    (caption, *_) = plots.figures(table)
    assert caption.endswith("lay in the cache: method 3")


def test_a_missing_matplotlib_is_told_by_name(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ResultError, match=r"modeling-relish\[explain\]"):
        write_report(report[0] / "runs", tmp_path / "out", resamples=20)
    assert not (tmp_path / "out").exists()
