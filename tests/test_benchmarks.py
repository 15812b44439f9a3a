"""The benchmark scripts run (small), and what the README says of them is what their files hold."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_relish.compare.results import read_results
from modeling_relish.compare.summary import make_tables
from modeling_relish.number_grid_relish import NumberGrid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    "command", [["gpu.py", "--small", "--runs", "1"], ["speed.py", "head", "--small", "--runs", "1"]]
)
def test_benchmarks_run_small_on_the_cpu(command, tmp_path):
    script, *rest = command
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *rest, "--output", str(tmp_path)],
        check=True, capture_output=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["versions"]["torch"]


def table(marker):
    """Rows of the README table under `<!-- marker -->`: first cell -> the other cells."""
    text = (ROOT / "README.md").read_text().split(f"<!-- {marker} -->")[1].split("<!-- end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {cells[0].strip("* "): [c.strip("* ") for c in cells[1:]] for cells in rows[2:]}


def header(marker):
    """Names of the columns of that table, without the first."""
    text = (ROOT / "README.md").read_text().split(f"<!-- {marker} -->")[1]
    return [cell.strip() for cell in text.strip().splitlines()[0].strip("|").split("|")][1:]


def test_readme_quotes_the_heads_results():
    results = json.loads((RESULTS / "heads-stsb.json").read_text())["rows"]
    rows = table("heads-stsb")
    assert rows.keys() == results.keys()
    for name, cells in rows.items():
        for metric, cell in zip(("pearson", "spearman", "nrmse"), cells, strict=False):
            measured = results[name]["summary"][metric]
            assert cell == f"{measured['mean']:.3f} ± {measured['std']:.3f}", (name, metric)


def test_readme_quotes_what_int8_states_cost():
    (row,) = json.loads((RESULTS / "heads-stsb-int8.json").read_text())["rows"].values()
    readme = " ".join((ROOT / "README.md").read_text().split())
    quoted = ", ".join(
        f"{name} {row['summary'][key]['mean']:.3f} ± {row['summary'][key]['std']:.3f}"
        for name, key in (("Pearson", "pearson"), ("Spearman", "spearman"), ("NRMSE", "nrmse"))
    )
    assert f"RELISH at layer 16 then has {quoted} (`heads-stsb-int8.json`)" in readme


def test_readme_quotes_the_demos_results():
    results = json.loads((RESULTS / "demo.json").read_text())["test"]
    rows = table("demo")
    assert rows.keys() == results.keys()
    for name, cells in rows.items():
        assert cells == [f"{results[name][metric]:.3f}" for metric in ("pearson", "spearman", "nrmse")], name


def test_goals_of_quality_are_met_by_the_files():
    heads = json.loads((RESULTS / "heads-stsb.json").read_text())["rows"]
    assert heads["RELISH, layer 16"]["summary"]["pearson"]["mean"] >= 0.83
    assert len(heads["RELISH, layer 16"]["runs"]) == 3
    assert json.loads((RESULTS / "demo.json").read_text())["test"]["RELISH"]["pearson"] >= 0.91


def measured(folder, dataset, backbone="SmolLM2"):
    """Rows of a table of `results/paper`, the best first."""
    tables = make_tables(read_results(RESULTS / "paper" / folder / "results"))
    (found,) = [t for t in tables if t.dataset == dataset and t.backbone.startswith(backbone)]
    return found.rows


def cells_of(row, metrics=("pearson", "spearman", "nrmse")):
    deterministic = len(row.runs) == 1
    return [f"{row.mean(m):.3f}" + ("" if deterministic else f" ± {row.spread(m):.3f}") for m in metrics]


def test_readme_quotes_every_frozen_method_and_says_where_relish_with_layer_search_does_not_lead():
    rows = table("frozen")
    unbeaten = set()
    for place, column in enumerate(header("frozen")):
        found = {row.name: row for row in measured("frozen", *column.split(", "))}
        own = found.pop("RELISH, layer search")
        assert set(found) <= set(rows)
        for name, cells in rows.items():
            row = own if name == own.name else found.get(name)
            assert cells[place] == ("–" if row is None else cells_of(row, ["pearson"])[0]), (column, name)
        for row in found.values():
            assert len(row.runs) == len(own.runs) == 3 or row.runs[0].is_deterministic, (column, row.name)
            spread = max(own.spread("pearson"), 0 if len(row.runs) == 1 else row.spread("pearson"))
            if not own.mean("pearson") - row.mean("pearson") > spread:
                unbeaten.add(column)
    assert unbeaten == {"wmt20-enzh, SmolLM2", "wmt20-sien, Gemma"}
    assert "**not on wmt20-enzh with SmolLM2 and on wmt20-sien with Gemma**" in " ".join(
        (ROOT / "README.md").read_text().split()
    )


def test_readme_quotes_the_language_models_own_numbers():
    thousand, whole = (
        {row.name: row for row in measured(*where)} for where in (("thousand", "stsb-1000"), ("whole", "stsb"))
    )
    rows = table("numbers")
    assert set(whole) <= set(rows)
    for name, cells in rows.items():
        name = name.split(" (")[0]
        assert cells == [*cells_of(thousand[name]), *(cells_of(whole[name]) if name in whole else "–––")], name
    assert all(len(thousand[name].runs) == 3 for name in whole)


@pytest.mark.parametrize("name", ["02_your_own_table_and_layer_search", "03_raft_and_relish"])
def test_a_notebook_quotes_the_papers_table(name):
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    ((folder, dataset, backbone, block),) = re.findall(
        r"<!-- results/paper/(\w+): ([\w-]+), (\w+) -->\n([\s\S]*?)<!-- end -->", text
    )
    found = {row.name: row for row in measured(folder, dataset, backbone)}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
    assert len(rows) > 3
    for method, *cells in rows:
        assert cells == cells_of(found[method]), method
        assert len(found[method].runs) == 3, method


def test_readme_quotes_raft_over_other_grids_and_one_digit_trains_as_well_as_five():
    by_grid = {
        " ".join(NumberGrid.from_setting(row.runs[0].settings["number_grid"]).strings): row
        for row in measured("grids", "stsb-1000")
    }
    rows = table("grids")
    for name, cells in rows.items():
        assert cells == cells_of(by_grid[name.strip("`")])
    one, five = by_grid["5"], by_grid["1 2 3 4 5"]
    assert len(one.runs) == len(five.runs) == 3
    assert one.mean("pearson") > five.mean("pearson") - max(one.spread("pearson"), five.spread("pearson"))


def test_readme_quotes_the_speed_results():
    rows = table("speed")
    for cells in rows.values():
        file, *keys = re.findall(r"[\w.-]+", cells[-1])
        value = json.loads((RESULTS / file).read_text())
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        assert cells[0] == f"{value:.2f}x", cells


def test_readme_quotes_the_layer_searches_and_their_goal_is_met():
    rows = table("layers")
    assert set(rows) == {"stsb", "sickr"}
    for name, cells in rows.items():
        measured = json.loads((RESULTS / f"layers-{name}.json").read_text())
        scores = {layer: values["pearson"] for layer, values in measured["test"].items()}
        best = max(scores, key=scores.__getitem__)
        chosen = max(measured["search"], key=measured["search"].__getitem__)
        assert cells == [
            chosen, f"{scores[chosen]:.3f}", best, f"{scores[best]:.3f}", f"{scores[best] - scores[chosen]:.4f}",
        ]  # fmt: skip
        assert scores[best] - scores[chosen] <= 0.01
