"""Regression-aware fine-tuning under RelishTrainer and a plain Trainer: against losses and gradients computed here."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from language_models import TEMPLATE, brute_force, grid_model, prompts, tiny_language_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import SCORES, TEXTS, TOKENIZERS, tiny_backbone
from training import SGD, losses, make_trainer, rows_of, same
from transformers import AutoModelForCausalLM, Trainer
from transformers.utils import logging

from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.configuration_checks_relish import RelishConfigError
from modeling_relish.lm_training import grid_diagnostics
from modeling_relish.number_grid_relish import NumberGrid, TokenTrie

TOKENIZER = TOKENIZERS["llama"]()
GRID = NumberGrid((0, 2.5, 5)).resolve(TOKENIZER, TEMPLATE)  # of several tokens each
pytestmark = [
    pytest.mark.usefixtures("workbench"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT reads it
]
OBJECTIVES = ["raft", "huber", "mbr", "cross_entropy"]
SCALE = {"label_mean": 2.0, "label_std": 3.0}
LABELS = [3.0, -100.0, 2.4, 7.25, 0.0, 4.0, 12.0, -1.5]


@pytest.fixture
def make(tmp_path):
    return partial(make_lm_trainer, tmp_path)


def make_lm_trainer(folder, model=None, rows=None, grid=GRID, **kwargs):
    """Return a RelishTrainer over a plain causal language model, as `make_trainer`."""
    trainer_arguments = {"eval_dataset", "processing_class", "compute_metrics", "prompt_template", "peft_config"}
    own = {"processing_class": TOKENIZER, "number_grid": grid, "prompt_template": TEMPLATE}
    own |= {name: kwargs.pop(name) for name in trainer_arguments & set(kwargs)}
    fixed = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    fixed |= {"logging_steps": 1, "save_strategy": "no", "num_train_epochs": 1, "per_device_train_batch_size": 8}
    model = tiny_language_model("llama") if model is None else model
    rows = rows_of(SCORES) if rows is None else rows
    return RelishTrainer(model, RelishTrainingArguments(**fixed | kwargs), train_dataset=rows, **own)


def with_lora(model):
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return adapted


def penalty(log_probs, y, objective, std, values=GRID.values):
    """Return the loss of one batch from (B, G) log-probabilities, in fp64."""
    values, y = torch.tensor(values).double(), torch.tensor(y).double()
    error = (y - log_probs.exp() @ values) / std
    if objective == "huber":
        return torch.where(error.abs() <= 1, error**2 / 2, error.abs() - 0.5).mean()
    if objective == "mbr":
        return (log_probs.softmax(1) * ((y[:, None] - values) / std) ** 2).sum(1).mean()
    if objective == "cross_entropy":
        return -log_probs[range(len(y)), (y[:, None] - values).abs().argmin(1)].mean()
    return (error**2).mean()


def one_step(model, objective, std):
    """Return loss and weights after one step of `SGD` over all labels, every number by a forward of its own."""
    loss = penalty(brute_force(model, prompts(TOKENIZER, TEXTS[:8]), GRID.tokens), LABELS, objective, std)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), {
        n: p.detach() - 0.01 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)
    }


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["grid head", "grid head, plain Trainer", "plain model", "plain model with LoRA"])
def test_accumulation_changes_neither_loss_nor_gradients(kind, objective, make, tmp_path):
    lora, std = kind.endswith("LoRA"), 3.0 if "grid head" in kind else float(np.std(LABELS))
    fresh = tiny_language_model("llama")
    loss, stepped = one_step(with_lora(fresh) if lora else fresh, objective, std)
    sgd = {**SGD, "learning_rate": 0.01}
    for size, steps in ((8, 1), (2, 4)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        model = tiny_language_model("llama")
        if kind.startswith("grid head"):
            settings = {"objective": objective, "normalize_grid": objective == "mbr", **SCALE}
            ids = {"input_ids": prompts(TOKENIZER, TEXTS[:8]), "label": LABELS}
            plain = kind.endswith("plain Trainer")
            trained = grid_model(model, GRID, **settings).unfreeze_backbone()
            own = make_trainer(tmp_path, trained, Dataset.from_dict(ids), Trainer if plain else RelishTrainer,
                               **sgd, **split, **({} if plain else {"freeze_backbone": False}))  # fmt: skip
        else:
            own = make(with_lora(model) if lora else model, rows_of(LABELS), objective=objective, **sgd, **split)
        assert losses(own) == pytest.approx([loss], rel=1e-4)
        found = dict((own.model if lora else model).named_parameters())
        for name, tensor in stepped.items():
            torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", ["cross_entropy", "raft"])
def test_cross_entropy_runs_the_labels_own_number_alone(objective, make):
    grid = NumberGrid.between(0, 5, 0.1).resolve(TOKENIZER, TEMPLATE)
    model = tiny_language_model("llama")
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, states: seen.append(ids[0].shape[1]))
    own = make(model, rows_of(LABELS), grid=grid, objective=objective)
    own.train()
    prompt = max(map(len, prompts(TOKENIZER, TEXTS[:8])))
    longest, every = max(map(len, grid.tokens)) - 1, len(TokenTrie(grid.tokens))
    assert longest <= 3 < 10 < every
    assert seen == [prompt + (longest if objective == "cross_entropy" else every)]
    assert np.isfinite(own.predict(rows_of(LABELS)).predictions).all()  # scoring reads the whole grid


@pytest.mark.parametrize("normalize", [None, True])
def test_first_predictions_of_raft_are_those_of_rail_to_the_bit(normalize, make, tmp_path):
    rail = grid_model(grid=GRID, normalize_grid=bool(normalize))
    expected = rail.predict(TEXTS, TOKENIZER, batch_size=24)
    plain = make(objective="raft", normalize_grid=normalize, learning_rate=0.0)
    headed = make_trainer(tmp_path, grid_model(grid=GRID, normalize_grid=bool(normalize), objective="raft"), rows_of(SCORES),
                          freeze_backbone=False, learning_rate=0.0)  # fmt: skip
    order = sorted(range(24), key=lambda i: -len(prompts(TOKENIZER)[i]))  # as predict orders them
    rows = Dataset.from_dict({"text": [TEXTS[i] for i in order]})
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])  # its B is zero before the first step
    adapted = make(objective="raft", normalize_grid=normalize, learning_rate=0.0, peft_config=lora)
    for own in (plain, headed, adapted):
        assert (own.predict(rows).predictions[:, 0] == expected[order]).all()
        own.train()
        assert (own.predict(rows).predictions[:, 0] == expected[order]).all()


def test_trained_language_model_is_an_ordinary_checkpoint(make, tmp_path):
    model = tiny_language_model("llama")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    own = make(model, objective="raft", learning_rate=1e-3, num_train_epochs=2)
    found = losses(own)
    assert all(map(math.isfinite, found))
    own.save_model(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == before.keys()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert not {"number_grid", "head_type", "label_mean"} & set(config)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(loaded.state_dict(), model.state_dict())
    assert not any(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    asked = RelishForSequenceRegression.from_backbone(
        str(tmp_path / "saved"), head_type="number_grid", number_grid=GRID.values, prompt_template=TEMPLATE
    )
    predictions = own.predict(rows_of(SCORES)).predictions
    assert asked.predict(TEXTS)[:, None] == pytest.approx(predictions, abs=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_resumed_run_is_the_uninterrupted_one_and_the_best_comes_back(lora, make, tmp_path):
    def model():
        return with_lora(tiny_language_model("llama")) if lora else tiny_language_model("llama")

    kwargs = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 3e-3,
        "objective": "raft",
    }
    whole = make(model(), **kwargs)
    expected = losses(whole)
    again = make(model(), **kwargs)
    assert losses(again, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")) == expected
    assert same(dict(again.model.named_parameters()), dict(whole.model.named_parameters()))

    scripted = iter([0.2, 0.9, 0.1])
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
    best |= {"metric_for_best_model": "pearson", "compute_metrics": lambda _: {"pearson": next(scripted)}}
    own = make(model(), eval_dataset=rows_of(SCORES), learning_rate=3e-3, **best)
    own.train()
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    saved = {i: load_file(tmp_path / "out" / f"checkpoint-{i}" / name) for i in (3, 6, 9)}
    current = own.model.state_dict()
    brought = {n: current[n.replace(".weight", ".default.weight") if lora else n] for n in saved[6]}
    assert [same(brought, state) for state in saved.values()] == [False, True, False]


def test_adapter_is_peft_s_own_and_nothing_else_is_trained(make, tmp_path):
    base = tiny_language_model("llama")
    before = {n: t.clone() for n, t in base.state_dict().items()}
    own = make(with_lora(base), objective="raft", learning_rate=1e-2)
    losses(own)
    own.save_model(tmp_path / "adapter")
    predictions = own.predict(rows_of(SCORES)).predictions
    loaded = PeftModel.from_pretrained(tiny_language_model("llama"), tmp_path / "adapter").eval()
    with torch.no_grad():
        log_probs = brute_force(loaded, prompts(TOKENIZER), GRID.tokens)
    expected = (log_probs.exp() @ torch.tensor(GRID.values).double())[:, None]
    assert predictions == pytest.approx(expected.numpy(), abs=1e-5)
    merged = make(loaded.merge_and_unload().requires_grad_(True))
    assert merged.predict(rows_of(SCORES)).predictions == pytest.approx(predictions, abs=1e-5)
    fresh = {
        n.replace("base_model.model.", "").replace(".base_layer", ""): t for n, t in own.model.state_dict().items()
    }
    assert all(torch.equal(fresh[n], t) for n, t in before.items())


def test_rows_without_labels_and_evaluation_in_label_units(make):
    own = make(with_lora(tiny_language_model("llama")))
    for rows in (rows_of(SCORES), Dataset.from_dict({"text": TEXTS})):
        found = own.predict(rows)
        assert type(found.predictions) is np.ndarray
        assert (found.predictions.shape, found.predictions.dtype) == ((24, 1), np.float32)
    assert found.label_ids is None
    assert not any("pearson" in name for name in found.metrics)
    metrics = own.evaluate(rows_of(SCORES))
    error = found.predictions[:, 0] - np.array(SCORES)
    assert metrics["eval_rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx((error**2).mean() / np.var(SCORES), rel=1e-5)


@pytest.mark.parametrize("kind", ["plain model", "grid head"])
def test_mass_and_entropy_on_request(kind, make, tmp_path):
    arguments = {"grid_diagnostics": True, "per_device_eval_batch_size": 7, "learning_rate": 0.0}
    if kind == "plain model":
        own = make(**arguments)
    else:
        own = make_trainer(tmp_path, grid_model(grid=GRID), rows_of(SCORES), freeze_backbone=False, **arguments)
    own.train()  # whose batches are not counted
    with torch.no_grad():
        p = brute_force(tiny_language_model("llama"), prompts(TOKENIZER), GRID.tokens).exp().numpy()
    mass = p.sum(1)
    q = p / mass[:, None]
    wanted = {"mass": mass.mean(), "entropy": -(q * np.log(q)).sum(1).mean()}
    for prefix, found in (("eval", own.evaluate(rows_of(SCORES))), ("test", own.predict(rows_of(SCORES)).metrics)):
        assert {n: found[f"{prefix}_grid_{n}"] for n in wanted} == pytest.approx(wanted, rel=1e-4)
    assert any("eval_grid_entropy" in entry for entry in own.state.log_history)
    own.args.grid_diagnostics = False
    assert not any("grid" in name for name in own.evaluate(rows_of(SCORES)))
    certain = grid_diagnostics(torch.tensor([[0.0, -math.inf]]))
    assert certain.tolist() == [[1.0, 0.0]]


def test_bf16_model_and_mixed_precision_train_over_the_tree(make, caplog):
    exact = make(objective="raft").predict(rows_of(SCORES)).predictions
    wanted = losses(make(objective="raft", learning_rate=0.0))
    for model, arguments in ((tiny_language_model("llama").to(torch.bfloat16), {}), (None, {"bf16": True})):
        caplog.clear()
        logging.get_logger("modeling_relish.language_model_relish").warning_once.__func__.cache_clear()
        own = make(model, objective="raft", learning_rate=1e-3, **arguments)
        start = own.predict(rows_of(SCORES)).predictions
        assert np.abs(start - exact).max() < 0.1
        assert (torch.tensor(start) != torch.tensor(start).bfloat16()).any()  # three digits are not all there are
        assert losses(own)[0] == pytest.approx(wanted[0], rel=0.05)
        assert "run by itself" not in caplog.text


@pytest.mark.parametrize("objective", ["raft", "mbr"])
def test_mbr_collapses_and_raft_spreads_on_noisy_labels(objective, make):
    """The best number lies between the two that can be said: the nearer one, or both with the right weights."""
    noise = np.random.default_rng(0).normal(0, 0.8, 48).round(2)
    noisy = rows_of([float(3.2 + v) for v in noise], TEXTS * 2)
    own = make(
        None, noisy, NumberGrid((1, 5)), processing_class=TOKENIZERS["qwen3"](), objective=objective, normalize_grid=True,
        grid_diagnostics=True, learning_rate=1e-3, num_train_epochs=8, lr_scheduler_type="constant",
    )  # fmt: skip
    before = own.evaluate(noisy)
    own.train()
    after = own.evaluate(noisy)
    change = after["eval_grid_entropy"] - before["eval_grid_entropy"]
    assert (change > 0.1) if objective == "raft" else (change < -0.2)
    predictions = own.predict(noisy).predictions
    if objective == "raft":
        assert abs(predictions.mean() - 3.2) < 0.25
    else:
        assert (np.abs(predictions - 3) > 1.9).mean() > 0.9


def test_what_is_not_a_causal_language_model_or_cannot_be_meant_is_named(make, tmp_path):
    def refused(match, error, *args, **kwargs):
        with pytest.raises(error, match=match):
            make(*args, **kwargs)

    refused("got LlamaForCausalLM", RelishConfigError, grid=None)
    refused("number_grid from from_backbone", RelishConfigError, grid_model())
    own = {"grid": None, "prompt_template": None}
    refused("prompt_template from from_backbone", RelishConfigError, grid_model(), grid=None, prompt_template="{text}:")
    refused("normalize_grid from from_backbone", RelishConfigError, grid_model(), normalize_grid=True, **own)
    refused("LlamaModel.*AutoModelForCausalLM", BackboneError, tiny_backbone("llama"))
    refused("bert is no causal", BackboneError, tiny_backbone("bert"))
    refused("processing_class", RelishConfigError, grid=[1, 2], processing_class=None)
    refused("ends in a field", ValueError, grid=[1, 2], prompt_template="{text}")
    refused("normalize_grid=True", RelishConfigError, objective="mbr", normalize_grid=False)
    refused("hinge", RelishConfigError, objective="hinge")
    refused("cache_features", ValueError, cache_features=True)
    frozen = tiny_language_model("llama").requires_grad_(False)
    refused("nothing would be trained", RelishConfigError, frozen)
    bounded = make(frozen.requires_grad_(True), grid=NumberGrid((1, 2), tokens=((7,), (8, 9, 10))))
    assert bounded.relish.config.max_length == 126  # of 128 positions
    neox = make(
        tiny_language_model("gpt_neox"), grid=[1, 2], objective="cross_entropy"
    )  # its output layer has another name
    assert all(map(math.isfinite, losses(neox)))
