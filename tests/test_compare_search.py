"""The searches of `compare`: each head's own layer, learning rates that fail, what a failure and a budget leave standing."""

from dataclasses import replace

import numpy as np
import pytest
from comparing import LAYERS, OPTIONS, compare_on, save_everything

from modeling_relish.compare import METHODS, CompareError, methods_heads, workbench
from modeling_relish.compare.budget import Clock
from modeling_relish.compare.methods_heads import HEAD_RATES, RELISH_RATES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return compare_on(save_everything(tmp_path_factory.mktemp("search")), tmp_path_factory.mktemp("features"))


def test_the_backbone_runs_once_for_the_layers_that_heads_read(run, tmp_path, monkeypatch):
    passes, fill = [], workbench.fill_layers
    monkeypatch.setattr(
        workbench, "fill_layers", lambda caches, *a, **k: (passes.append(len(caches)), fill(caches, *a, **k))
    )
    settings = {**LAYERS, "layers": [1]}
    run(tmp_path, methods="linear,relish_layer_search,mlp", regimes="frozen", layer_settings=settings)
    assert passes == [2]


def test_a_layer_search_that_fails_leaves_out_its_own_rows_alone(run, tmp_path):
    settings = {**LAYERS, "layers": [99]}
    found = run(tmp_path, methods="linear,relish_layer_search", regimes="frozen", layer_settings=settings)
    assert {r.method for r in found.runs} == {"linear, mean"}
    assert [name for name in found.left_out if "layer search" in name]


def test_every_head_searches_its_own_layer(run, tmp_path, monkeypatch):
    searched, search = [], workbench.RelishTrainer.search_layer

    def best_for_mlp(model, *args, **kwargs):
        searched.append((model.config.head_type, kwargs["args"].learning_rate))
        found = search(model, *args, **kwargs)
        return {layer: float((layer == 1) == (model.config.head_type == "mlp")) for layer in found}

    monkeypatch.setattr(workbench.RelishTrainer, "search_layer", best_for_mlp)
    settings = {**LAYERS, "layers": [1, 2]}
    given = {
        "methods": "relish_layer_search,mlp_layer_search",
        "regimes": "frozen",
        "layer_settings": settings,
        "seeds": 2,
    }
    found = run(tmp_path, **given)
    layers = {r.method: r.settings["backbone_layer"] for r in found.runs}
    assert layers == {"RELISH, layer search": 2, "MLP, mean, layer search": 1}
    assert sorted(searched) == [("mlp", HEAD_RATES[0]), ("relish", RELISH_RATES[0])]
    run(tmp_path, **given)
    assert len(searched) == 2


def test_one_methods_failure_costs_no_other(run, tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS["tfidf_ridge"], "run", lambda *a: [][1])
    found = run(tmp_path, methods="tfidf_ridge,linear", regimes="frozen")
    assert {r.method for r in found.runs} == {"linear, mean"}
    assert "IndexError" in found.left_out["TF-IDF, ridge, none, seed 0"]


def test_a_rate_that_diverges_costs_neither_the_method_nor_a_second_try(run, tmp_path, monkeypatch):
    tried, fit = [], methods_heads.fit

    def too_high(bench, model, settings, *args, **kwargs):
        tried.append(settings["learning_rate"])
        model, outcome = fit(bench, model, settings, *args, **kwargs)
        if settings["learning_rate"] == HEAD_RATES[0]:
            outcome = replace(outcome, predictions=np.full_like(outcome.predictions, np.nan))
        return model, outcome

    monkeypatch.setattr(methods_heads, "fit", too_high)
    options = replace(OPTIONS, candidates=2)
    found = run(tmp_path / "one", methods="linear", regimes="frozen", options=options, seeds=2)
    assert {r.settings["learning_rate"] for r in found.runs} == {HEAD_RATES[1]}
    assert tried == [*HEAD_RATES[:2], HEAD_RATES[1]]
    with pytest.raises(CompareError, match="no run has succeeded"):
        run(tmp_path / "other", methods="linear", regimes="frozen", options=replace(OPTIONS, candidates=1))


@pytest.mark.parametrize("bad", [HEAD_RATES[:1], HEAD_RATES[:2]])
def test_a_rate_that_raises_costs_no_other_and_none_is_chosen_where_all_do(bad, run, tmp_path, monkeypatch):
    fit = methods_heads.fit

    def fails(bench, model, settings, *args, **kwargs):
        if settings["learning_rate"] in bad:
            raise RuntimeError("out of something")
        return fit(bench, model, settings, *args, **kwargs)

    monkeypatch.setattr(methods_heads, "fit", fails)
    given = {"methods": "tfidf_ridge,linear", "regimes": "frozen", "options": replace(OPTIONS, candidates=2)}
    found = run(tmp_path, **given)
    chosen = [r.settings["learning_rate"] for r in found.runs if r.method == "linear, mean"]
    assert chosen == [rate for rate in HEAD_RATES[:2] if rate not in bad]
    assert ("linear/frozen" in found.settings.get("tiny-qwen", {})) is bool(chosen)
    assert any("no setting came to" in reason for reason in found.left_out.values()) is not bool(chosen)


def test_a_budget_counts_the_search_for_whichever_seed_asks(run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Clock, "estimate", lambda self, job, runs: asked.append((job.seed, runs)) or 1e9)
    options = replace(OPTIONS, candidates=3)
    run_nothing = {"methods": "linear", "regimes": "frozen", "budget": "1h", "seeds": 2, "options": options}
    with pytest.raises(CompareError, match="no run has succeeded"):
        run(tmp_path, **run_nothing)
    assert asked == [(0, 3), (1, 4)]
