"""A comparison that is killed, that is locked, and that is run from the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparing import LAYERS, OPTIONS, SCALE, save_everything
from typer.testing import CliRunner

from modeling_relish import cli
from modeling_relish.compare import CompareError, compare, workbench
from modeling_relish.compare.results import ResultError, read_results

ROOT = Path(__file__).parents[1]
METHODS = "tfidf_ridge,relish_layer_search,mlp,linear"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return save_everything(tmp_path_factory.mktemp("compare"))


def run(places, output, features):
    return compare(
        str(places[0]), output, methods=METHODS, backbones=places[1], regimes="frozen", seeds=2,
        options=OPTIONS, features_dir=features,
        layer_settings=LAYERS, write_reports=False, log=lambda line: None, **SCALE,
    )  # fmt: skip


def files(folder):
    return {
        path: path.stat().st_mtime_ns for path in folder.rglob("*.json") if path.parent.name in ("results", "search")
    }


def start(places, output, features):
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from test_compare_resume import run\n"
        "run(sys.argv[3:6], sys.argv[6], sys.argv[7])"
    )
    command = [sys.executable, "-c", code, ROOT, ROOT / "tests", *places, output, features]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_a_killed_comparison_goes_on_and_does_nothing_twice(places, tmp_path):
    output, features = tmp_path / "killed", tmp_path / "features"
    process = start(places, output, features)
    deadline = time.monotonic() + 180
    while len(files(output)) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = files(output)
    assert len(before) >= 5
    layers = [path.stat().st_mtime_ns for path in output.glob("shared/layers--*.json")]

    found = run(places, output, features)
    after = files(output)
    assert before.items() <= after.items()
    assert found.left_out == {}
    assert len(found.runs) == 7
    if layers:
        assert [path.stat().st_mtime_ns for path in output.glob("shared/layers--*.json")] == layers
    whole = run(places, tmp_path / "whole", tmp_path / "features of its own")
    assert found.settings == whole.settings
    for one, other in zip(read_results(output / "results"), read_results(tmp_path / "whole" / "results"), strict=True):
        assert one.key == other.key
        assert one.test_predictions == pytest.approx(other.test_predictions, abs=1e-6)


def test_one_pass_keeps_every_layer_also_where_the_cache_was_emptied(places, tmp_path, monkeypatch):
    """What a pass over a large table takes is most of the time; a note that the states were there does not bring them back."""
    passes, fill = [], workbench.fill_layers
    monkeypatch.setattr(workbench, "fill_layers", lambda *given, **more: passes.append(given) or fill(*given, **more))
    options = {"backbones": places[1], "regimes": "frozen", "seeds": 1, "options": OPTIONS, "log": lambda line: None}
    given = {
        **options,
        "features_dir": tmp_path / "features",
        "write_reports": False,
        "layer_settings": LAYERS,
        **SCALE,
    }
    methods = "linear_layer_search,mlp_layer_search,linear,mlp"
    before = compare(str(places[0]), tmp_path / "out", methods=methods, **given)
    layers = {result.settings["backbone_layer"] for result in before.runs}
    assert layers == {2, None}  # of 4: one pass, two layers
    assert [len(caches) for caches, *_ in passes] == [2]
    shutil.rmtree(tmp_path / "features")
    for path in (tmp_path / "out").glob("*/*.json"):
        if path.parent.name in ("results", "search"):
            path.unlink()
    again = compare(str(places[0]), tmp_path / "out", methods=methods, **given)
    assert [len(caches) for caches, *_ in passes] == [2, 2]
    for one, other in zip(before.runs, again.runs, strict=True):
        # Texts share other batches: states in bfloat16 differ by roundings.
        assert one.test_predictions == pytest.approx(other.test_predictions, abs=5e-3)
        assert other.extraction_seconds > 0
    compare(str(places[0]), tmp_path / "out", methods="special_token", **given)  # another comparison, nothing to fill
    assert len(passes) == 2


def test_a_result_that_was_changed_is_told_and_not_taken(places, tmp_path):
    compare(str(places[0]), tmp_path, methods="tfidf_ridge", write_reports=False, log=lambda line: None, **SCALE)
    (path,) = (tmp_path / "results").glob("*.json")
    values = json.loads(path.read_text())
    values["test_predictions"][0] += 3
    path.write_text(json.dumps(values))
    with pytest.raises(ResultError, match="The file was changed"):
        compare(str(places[0]), tmp_path, methods="tfidf_ridge", write_reports=False, log=lambda line: None, **SCALE)


def test_two_comparisons_do_not_work_in_one_folder(places, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CompareError, match="another comparison is at work"):
            compare(str(places[0]), tmp_path, methods="tfidf_ridge", **SCALE)


def call(*arguments):
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def test_the_command_line_writes_the_report(places, tmp_path, monkeypatch):
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "home"))
    given = [
        places[0], "--label", "score", "--output", tmp_path / "out", "--methods", "tfidf_ridge,linear", "--backbone", places[1],
        "--seeds", 1, "--candidates", 1, "--epochs", 2, "--regimes", "frozen", "--label-min", 0, "--label-max", 5,
        "--template", r"A: {text_a}\nB: {text_b}\nScore:",
    ]  # fmt: skip
    found = call(*given)
    assert found.exit_code == 0, found.output
    assert "linear, mean, frozen, tiny-qwen, seed 0: validation Pearson" in found.output
    assert "2 runs; the report is" in found.output
    results = {r.method: r for r in read_results(tmp_path / "out" / "results")}
    assert results["linear, mean"].settings["prompt_template"] == "A: {text_a}\nB: {text_b}\nScore:"
    assert results["linear, mean"].label_range == (0, 5)
    assert {path.suffix for path in (tmp_path / "out").glob("report.*")} == {".md", ".csv", ".html"}
    del given[1:3]
    again = call(*given)  # the one column of numbers is the label
    assert again.output.count("done before") == 2
    assert "label: score" in again.output


def test_the_command_line_names_the_methods_it_knows(places, tmp_path):
    found = call(places[0], "--label", "score", "--output", tmp_path, "--methods", "relihs")
    assert isinstance(found.exception, CompareError)
    assert "relish_layer_search" in str(found.exception)
