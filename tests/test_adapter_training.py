"""LoRA in training: three ways to one run, resumed, the best brought back, checkpointing on and off, the command line."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import BACKBONES, SCORES, TEXTS, random_batch, save_backbone, tiny_backbone
from training import ROWS, SCALE, TOKENIZER, losses, make_trainer, same, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Trainer
from transformers.utils import is_bitsandbytes_available
from typer.testing import CliRunner

from modeling_relish import RelishForSequenceRegression, cli
from modeling_relish.adapter_relish import AdapterError
from modeling_relish.backbone_relish import BackboneError

# PEFT 0.21 asks for an attribute that transformers 5.24 has renamed; a second wrapping is what reloading as PeftModel is.
MODEL_FILES = {"config.json", "model.safetensors"}
pytestmark = [
    pytest.mark.usefixtures("workbench"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
]
LORA = {"target_modules": "all-linear", "r": 4}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base") / "llama"))


def lora(seed=0, **config):
    torch.manual_seed(seed)  # lora_A is drawn where the adapter is put on
    return LoraConfig(**LORA | config)


def trainable(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_three_ways_to_start_give_one_run(make, base):
    torch.manual_seed(1)
    given = make(tiny_model(base, **SCALE), learning_rate=1e-2, peft_config=lora(task_type="SEQ_CLS"))
    wrapped = make(get_peft_model(tiny_model(base, **SCALE), lora(task_type="SEQ_CLS")), learning_rate=1e-2)
    plain = make(get_peft_model(tiny_model(base, **SCALE), lora(task_type="SEQ_CLS")), kind=Trainer, learning_rate=1e-2)
    runs = []
    for trainer in (given, wrapped, plain):
        with torch.no_grad():  # the same start for all
            for name, parameter in trainer.model.named_parameters():
                if ".lora_A." in name:
                    torch.manual_seed(len(name))
                    parameter.normal_()
        start = trainable(trainer.model)
        runs.append(losses(trainer))
        end = trainable(trainer.model)
        assert start.keys() == end.keys()
        assert not [n for n in start if torch.equal(start[n], end[n]) and "k_proj.bias" not in n]
    assert runs[0] == runs[1]
    assert runs[2] == pytest.approx(runs[0], abs=1e-5)


def test_config_is_the_users_and_task_and_targets_follow_the_model(make):
    config = LoraConfig(r=2)
    trainer = make(peft_config=config)
    assert config.task_type is None
    assert config.target_modules is None
    assert trainer.model.peft_config["default"].task_type == "SEQ_CLS"
    assert trainer.model.num_parameters(only_trainable=True) > 0
    assert not [name for name, _ in trainer.model.named_parameters() if ".score." in name and ".lora_" in name]


def test_resumed_run_is_the_uninterrupted_one(make, base, tmp_path):
    def run(name, **kwargs):
        torch.manual_seed(0)
        folder = tmp_path / name
        trainer = make_trainer(
            folder, tiny_model(base), eval_dataset=ROWS, peft_config=lora(lora_dropout=0.2), **EPOCHS
        )
        return losses(trainer, **kwargs), trainable(trainer.model)

    whole, end = run("whole")
    resumed, again = run("resumed", resume_from_checkpoint=str(tmp_path / "whole" / "out" / "checkpoint-6"))
    assert resumed == whole
    assert same(again, end)


def test_best_adapter_and_head_come_back_and_are_saved(make, base, tmp_path):
    values = iter([0.1, 0.9, 0.5])
    trainer = make(
        tiny_model(base), eval_dataset=ROWS, peft_config=lora(), load_best_model_at_end=True, metric_for_best_model="best",
        greater_is_better=True, compute_metrics=lambda _: {"best": next(values, 0.0)}, **EPOCHS,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    best = RelishForSequenceRegression.from_pretrained(trainer.state.best_model_checkpoint)
    last = RelishForSequenceRegression.from_pretrained(tmp_path / "out" / "checkpoint-9")
    found = trainer.predict(ROWS).predictions[:, 0].tolist()
    assert found == pytest.approx(best.predict(TEXTS).tolist(), abs=1e-5)
    assert found != pytest.approx(last.predict(TEXTS).tolist(), abs=1e-3)
    trainer.save_model(str(tmp_path / "final"))
    final = RelishForSequenceRegression.from_pretrained(tmp_path / "final")
    assert final.predict(TEXTS).tolist() == best.predict(TEXTS).tolist()
    assert final.config.label_mean == pytest.approx([sum(SCORES) / len(SCORES)])
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"} <= names
    assert "training_args.bin" not in names
    assert not (tmp_path / "features").exists()  # a backbone with LoRA has no states to keep


def test_loaded_adapter_is_trained_on_as_a_peft_model(make, base, tmp_path):
    first = make(tiny_model(base), peft_config=lora(), learning_rate=1e-2)
    first.train()
    first.save_model(str(tmp_path / "first"))
    model = RelishForSequenceRegression.from_pretrained(tmp_path / "first")
    with pytest.raises(AdapterError, match="is_trainable=True"):
        make(model)
    frozen = PeftModel.from_pretrained(model, tmp_path / "first")
    for head_is_trained in (False, True):
        frozen.get_base_model().score.requires_grad_(head_is_trained)
        with pytest.raises(AdapterError, match="no weight of the adapter"):
            make(frozen)
    second = make(PeftModel.from_pretrained(model, tmp_path / "first", is_trainable=True), learning_rate=1e-2)
    before = trainable(second.model)
    assert before.keys() == trainable(first.model).keys()
    second.train()
    assert not [n for n, p in trainable(second.model).items() if torch.equal(p, before[n]) and "k_proj.bias" not in n]


def test_settings_that_exclude_each_other_are_told(make):
    with pytest.raises(ValueError, match="choose one"):
        make(peft_config=lora(), freeze_backbone=False)
    with pytest.raises(ValueError, match="cache_features=True needs a frozen backbone"):
        make(peft_config=lora(), cache_features=True)
    with pytest.raises(AdapterError, match="CAUSAL_LM"):
        make(peft_config=lora(task_type="CAUSAL_LM"))
    with pytest.raises(AdapterError, match="got dict"):
        make(peft_config={"r": 8})
    with pytest.raises(AdapterError, match="merge_and_unload"):
        make(get_peft_model(tiny_model(), lora(task_type="SEQ_CLS")), peft_config=lora())
    with pytest.raises(AdapterError, match="SEQ_CLS"):  # without a task PEFT takes the head for layers like others
        make(get_peft_model(tiny_model(), lora()))
    with pytest.raises(AdapterError, match="leaves it out"):
        make(get_peft_model(tiny_model(), lora(target_modules=["gate_proj"])))


# ---------------------------------------------------------------------- gradient checkpointing

CHECKPOINTING = {"off": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


def gradients(model):
    model.train()
    batch = random_batch("llama", [7, 4, 9])
    model(**batch, labels=torch.tensor([1.0, 2.0, 3.0])).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("wanted", ["reentrant", "not reentrant"])
def test_checkpointing_changes_no_gradient_of_lora_or_head(wanted):
    found = {}
    for name in ("off", wanted):
        torch.manual_seed(0)
        model = get_peft_model(
            tiny_model(tiny_backbone("llama"), **SCALE), lora(task_type="SEQ_CLS", init_lora_weights=False)
        )
        if CHECKPOINTING[name]:
            model.activation_checkpointing_enable(CHECKPOINTING[name])
            assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        found[name] = gradients(model)
    assert found["off"].keys() == trainable(model).keys()
    for name, gradient in found["off"].items():
        torch.testing.assert_close(found[wanted][name], gradient, atol=1e-5, rtol=1e-4)
        assert gradient.abs().max() > 0 or "k_proj.bias" in name  # the keys' bias has no effect


@pytest.mark.parametrize("wanted", CHECKPOINTING)
def test_frozen_backbone_stays_in_eval_mode_and_stores_no_activation(wanted):
    model = tiny_model(tiny_backbone("gpt2", dropout=0.5), **SCALE)
    if CHECKPOINTING[wanted]:
        model.activation_checkpointing_enable(CHECKPOINTING[wanted])
    model.train()
    batch = random_batch("gpt2", [7, 4, 9])
    stored = []

    def keep(tensor):
        stored.append(tensor.numel())
        return tensor

    def count(**inputs):
        stored.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**inputs, attention_mask=batch["attention_mask"], labels=torch.tensor([1.0, 2.0, 3.0])).loss
        return sum(stored), loss

    with torch.no_grad():
        states, _ = model.token_states(**batch)
    by_tokens, loss = count(input_ids=batch["input_ids"])
    by_states, same_loss = count(hidden_states=states)
    assert by_tokens == by_states
    assert loss.item() == same_loss.item()  # no dropout
    assert not any(module.training for module in model.backbone.modules())
    loss.backward()
    assert not [n for n, p in model.score.named_parameters() if not p.grad.abs().max() > 0 and "k_proj.bias" not in n]
    assert not [n for n, p in model.backbone.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_checkpointing_of_the_training_arguments_changes_no_loss(kwargs, make, base):
    def run(**arguments):
        torch.manual_seed(0)
        return losses(make(tiny_model(base), peft_config=lora(), learning_rate=1e-2, **arguments))

    on = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    assert run(**on) == pytest.approx(run(), abs=1e-4)


# ---------------------------------------------------------------------- command line


def test_command_line_trains_lora_and_predicts_with_it(base, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text(
        "text,score\n" + "".join(f'"{t} {i}",{s}\n' for i, (t, s) in enumerate(zip(TEXTS * 2, SCORES * 2, strict=True)))
    )

    def run(*arguments):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    common = ["train", table, "--label", "score", "--backbone", base, "--epochs", 1]
    run(*common, "--output", tmp_path / "out", "--lora", "--lora-rank", 3)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (3, 6, base)
    assert not (tmp_path / "out" / "checkpoints").exists()
    run("predict", tmp_path / "out", table, "--output", tmp_path / "scored.jsonl")
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    model = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    expected = model.predict([row["text"] for row in scored]).tolist()
    assert [row["prediction"] for row in scored] == pytest.approx(expected, rel=1e-5)
    run(*common, "--output", tmp_path / "out", "--overwrite")  # without LoRA: nothing of the old model is left
    assert not RelishForSequenceRegression.from_pretrained(tmp_path / "out").has_adapter
    with pytest.raises(ValueError, match="choose one"):
        run(*common, "--output", tmp_path / "both", "--lora", "--train-backbone")
    with pytest.raises(AdapterError, match="at least 1"):
        run(*common, "--output", tmp_path / "zero", "--lora", "--lora-rank", 0)


# ---------------------------------------------------------------------- a 4-bit backbone


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory):
    """A Llama of a width that bitsandbytes can pack."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    AutoModel.from_config(LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=128)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.skipif(
    not is_bitsandbytes_available(),
    reason="bitsandbytes is not installed: QLoRA is NOT tested (pip install bitsandbytes)",
)
@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
def test_qlora_trains_comes_back_quantised_and_keeps_a_float_head(make, wide_base, tmp_path):
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def model(**kwargs):
        return tiny_model(wide_base, backbone_layer=2, prompt_template="Text: {text}\nScore:", **SCALE, **kwargs)

    quantised = model(quantization_config=four_bit)
    assert quantised.backbone.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert {p.dtype for p in quantised.score.parameters()} == {torch.float32}
    expected = quantised.predict(TEXTS, TOKENIZER).tolist()  # which packs the weights, where the processor can
    assert expected == pytest.approx(model().predict(TEXTS, TOKENIZER).tolist(), abs=0.5)
    quantised.save_pretrained(tmp_path / "head")
    assert {p.name for p in (tmp_path / "head").iterdir() if not p.name.endswith(("_relish.py", ".md"))} == MODEL_FILES
    assert (tmp_path / "head" / "model.safetensors").stat().st_size < 100e3
    assert RelishForSequenceRegression.from_pretrained(tmp_path / "head").predict(TEXTS).tolist() == expected

    trainer = make(quantised, eval_dataset=ROWS, peft_config=lora(), **EPOCHS)
    before = trainable(trainer.model)
    run = losses(trainer)
    assert sum(run[-3:]) < sum(run[:3])
    assert not [n for n, p in trainable(trainer.model).items() if torch.equal(p, before[n]) and "k_proj.bias" not in n]
    trainer.save_model(str(tmp_path / "final"))
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "final")
    assert loaded.backbone.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    assert {p.dtype for p in loaded.score.parameters()} == {torch.float32}
    assert loaded.predict(TEXTS).tolist() == pytest.approx(quantised.predict(TEXTS, TOKENIZER).tolist(), abs=1e-5)
    merged = trainer.model.merge_and_unload()
    with pytest.raises(BackboneError, match="without quantization_config"):
        merged.save_pretrained(tmp_path / "merged")


@pytest.mark.skipif(
    not is_bitsandbytes_available(),
    reason="bitsandbytes is not installed: QLoRA is NOT tested (pip install bitsandbytes)",
)
def test_gradients_through_a_4_bit_backbone_are_those_before_an_evaluation(wide_base):
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    found = []
    for evaluated in (False, True):
        model = tiny_model(wide_base, quantization_config=four_bit, **SCALE)
        peft_model = get_peft_model(model, lora(task_type="SEQ_CLS", init_lora_weights=False))
        if evaluated:
            peft_model.eval().predict(TEXTS, TOKENIZER)
        found.append(gradients(peft_model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_lora_under_a_head_that_reads_the_language_models_distribution(make, tmp_path):
    causal_lm = AutoModelForCausalLM.from_config(BACKBONES["llama"]())
    causal_lm.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    model = RelishForSequenceRegression.from_backbone(
        str(tmp_path / "base"),
        head_type="number_grid",
        number_grid=[0, 1, 2, 3],
        prompt_template="Text: {text}\nScore:",
    )
    trainer = make(model, peft_config=lora(), learning_rate=1e-2, objective="raft")
    before = trainable(trainer.model)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in before if ".lora_" in name} == {
        f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    trainer.train()
    assert not [name for name, p in trainable(trainer.model).items() if torch.equal(p, before[name])]
    trainer.save_model(str(tmp_path / "final"))
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "final")
    assert loaded.predict(TEXTS).tolist() == model.predict(TEXTS, TOKENIZER).tolist()
