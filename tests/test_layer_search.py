"""Layer search: every layer's fit is the fit that a model cut there would have had, from one pass over the texts."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import SCORES, TEXTS, byte_bpe_tokenizer, random_batch, save_backbone, tiny_backbone
from training import make_trainer, rows_of, tiny_model
from transformers import set_seed

from modeling_relish import RelishConfig, RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from modeling_relish.configuration_checks_relish import RelishConfigError
from modeling_relish.layer_search import best_layer, candidate_layers

# PEFT 0.21 asks for an attribute that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TRAIN = Dataset.from_dict({"text": TEXTS[:16], "label": SCORES[:16]})
VALIDATION = Dataset.from_dict({"text": TEXTS[16:], "label": SCORES[16:]})
SMALL = {"head_hidden_size": 16, "head_num_attention_heads": 4, "head_intermediate_size": 32, "num_refinement_steps": 1}


def arguments(folder, **kwargs):
    return RelishTrainingArguments(
        output_dir=str(folder / "run"), features_dir=str(folder / "features"), features_dtype="float32",
        per_device_train_batch_size=4, learning_rate=3e-3, disable_tqdm=True, report_to="none", seed=3, **kwargs,
    )  # fmt: skip


def whole(folder, **kwargs):
    return RelishForSequenceRegression.from_backbone(str(folder), prompt_template="{text} Score:", **SMALL, **kwargs)


def test_each_layers_score_is_that_of_a_model_cut_there_and_texts_run_once(tmp_path, monkeypatch):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    rows = []
    original = RelishForSequenceRegression.token_states

    def count(self, input_ids, attention_mask):
        rows.append(len(input_ids))
        return original(self, input_ids, attention_mask)

    monkeypatch.setattr(RelishForSequenceRegression, "token_states", count)
    found = RelishTrainer.search_layer(
        whole(folder), TRAIN, VALIDATION, byte_bpe_tokenizer(), layers=[3, 1, 4], epochs=2, args=arguments(tmp_path)
    )
    assert sum(rows) == len(TEXTS)  # one pass for three layers
    assert list(found) == [1, 3, 4]
    for layer, score in found.items():
        set_seed(3)
        model = whole(folder, backbone_layer=layer)
        args = arguments(tmp_path / "own", num_train_epochs=2, eval_strategy="epoch", warmup_steps=0.1)
        trainer = RelishTrainer(
            model, args, train_dataset=TRAIN, eval_dataset=VALIDATION, processing_class=byte_bpe_tokenizer()
        )
        trainer.train()
        own = [entry["eval_pearson"] for entry in trainer.state.log_history if "eval_pearson" in entry]
        assert score == pytest.approx(max(own), abs=1e-4)


def test_a_sample_of_a_plain_list_of_rows_gives_the_scores_of_a_data_set(tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    found = [
        RelishTrainer.search_layer(
            whole(folder), train, validation, byte_bpe_tokenizer(), layers=[2], sample_rows=12, validation_rows=6, epochs=1,
            args=arguments(tmp_path),
        )
        for train, validation in ((TRAIN, VALIDATION), (TRAIN.to_list(), VALIDATION.to_list()))
    ]  # fmt: skip
    assert found[0] == found[1]
    assert np.isfinite(found[0][2])


def test_training_after_the_search_finds_the_states_in_the_cache(tmp_path):
    folder = save_backbone("gpt2", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    RelishTrainer.search_layer(
        whole(folder), TRAIN, VALIDATION, byte_bpe_tokenizer(), layers=[2, 3], epochs=1, args=arguments(tmp_path)
    )
    model = whole(folder, backbone_layer=2)
    calls = []
    model.backbone.register_forward_hook(lambda *_: calls.append(1))
    trainer = RelishTrainer(
        model, arguments(tmp_path), train_dataset=TRAIN, eval_dataset=VALIDATION, processing_class=byte_bpe_tokenizer()
    )
    assert not calls
    states = trainer.train_dataset[0]["hidden_states"]
    ids = torch.tensor([byte_bpe_tokenizer()(f"{TEXTS[0]} Score:")["input_ids"]])
    expected, _ = model.token_states(ids, torch.ones_like(ids))
    torch.testing.assert_close(states, expected[0], atol=1e-5, rtol=1e-5)


def test_candidates_spread_and_the_best_is_chosen():
    assert candidate_layers(30)[-1] == 30
    assert len(candidate_layers(30)) == 8
    assert candidate_layers(2) == [1, 2]
    assert best_layer({4: 0.5, 8: 0.7, 12: 0.7, 16: float("nan")}) == 8
    assert best_layer({4: float("nan"), 2: float("nan")}) == 2


def test_search_needs_the_whole_backbone(tmp_path):
    folder = save_backbone("llama", tmp_path / "base")
    with pytest.raises(ValueError, match="reads layer 2"):
        RelishTrainer.search_layer(whole(folder, backbone_layer=2), TRAIN, VALIDATION, byte_bpe_tokenizer())


# ---------------------------------------------------------------------- a mix of layers


@pytest.mark.parametrize("layers", [[1, 3], [2, 4], [4, 1, 2]])
def test_mix_is_the_softmax_of_normalised_layers(layers):
    backbone = tiny_backbone("llama")
    model = RelishForSequenceRegression.from_backbone(backbone, backbone_layers=layers, head_type="linear").eval()
    with torch.no_grad():
        model.score.reader.layer_weights.copy_(torch.tensor([0.3, -1.0, 2.0])[: len(layers)])
    batch = random_batch("llama", [7, 7])
    with torch.no_grad():
        hidden = backbone(**batch, output_hidden_states=True).hidden_states
        got = model(**batch).logits
    states = np.stack([hidden[layer].double().numpy() for layer in layers])
    normal = (states - states.mean(-1, keepdims=True)) / np.sqrt(states.var(-1, keepdims=True) + 1e-5)
    weights = np.exp([0.3, -1.0, 2.0][: len(layers)])
    mixed = np.tensordot(weights / weights.sum(), normal, axes=1).mean(1)
    linear = model.score.regressor
    expected = mixed @ linear.weight.detach().double().numpy().T + linear.bias.detach().double().numpy()
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


def test_mix_is_cut_at_its_highest_layer_trains_and_comes_back(tmp_path):
    folder = save_backbone("qwen3", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    model = whole(folder, backbone_layers=[1, 3])
    assert len(model.backbone.layers) == 3
    trainer = RelishTrainer(
        model, arguments(tmp_path, num_train_epochs=2), train_dataset=TRAIN, processing_class=byte_bpe_tokenizer()
    )
    trainer.train()
    assert float(model.score.reader.layer_weights.detach().abs().sum()) > 0
    model.save_pretrained(tmp_path / "out")
    expected = model.predict(TEXTS, byte_bpe_tokenizer()).tolist()
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert loaded.predict(TEXTS, byte_bpe_tokenizer()).tolist() == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["backbone_layers"] == [1, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone_layers": []},
        {"backbone_layers": [2, 2]},
        {"backbone_layers": [9]},
        {"backbone_layers": [1], "backbone_layer": 1},
    ],
)
def test_impossible_mixes_raise(settings):
    with pytest.raises(RelishConfigError):
        RelishConfig(backbone_config=tiny_backbone("llama").config, **settings)


def test_auto_layer_is_chosen_by_the_trainer_cut_stored_and_saved(tmp_path, capsys):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    tokenizer = byte_bpe_tokenizer()
    args = {"report_to": "none", "features_dir": str(tmp_path / "features"), "use_cpu": True, "num_train_epochs": 1}
    model = whole(folder, backbone_layer="auto")
    assert model.config.read_layers == [4]
    trainer = RelishTrainer(
        model, RelishTrainingArguments(str(tmp_path / "run"), **args), train_dataset=TRAIN, eval_dataset=VALIDATION,
        processing_class=tokenizer,
    )  # fmt: skip
    found = {int(layer): score for layer, score in model.config.layer_search.items()}
    chosen = best_layer(found)
    assert f"{chosen}◀" in capsys.readouterr().out
    assert len(model.backbone.layers) == model.config.cut_layer == chosen
    assert model.score.reader.input_norm is model.config.uses_input_norm
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert (loaded.predict(TEXTS, tokenizer) == model.predict(TEXTS, tokenizer)).all()
    fresh = whole(folder, backbone_layer=chosen)
    fresh.score.load_state_dict(model.score.state_dict())
    fresh.config.label_mean, fresh.config.label_std = model.config.label_mean, model.config.label_std
    assert (fresh.predict(TEXTS, tokenizer) == model.predict(TEXTS, tokenizer)).all()


def test_auto_layer_without_rows_to_choose_it_on_is_told(tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    args = RelishTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(RelishConfigError, match="eval_dataset"):
        RelishTrainer(
            whole(folder, backbone_layer="auto"), args, train_dataset=TRAIN, processing_class=byte_bpe_tokenizer()
        )


def test_a_search_without_a_correlation_chooses_nothing(tmp_path):
    unlabelled = rows_of([2.0] * 8)  # all alike: no correlation
    model = tiny_model(backbone_layer="auto")
    with pytest.raises(ValueError, match="no correlation on any layer"):
        make_trainer(tmp_path, model, eval_dataset=unlabelled)
    assert model.config.backbone_layer == "auto"


def test_auto_layer_is_chosen_before_lora_is_put_on_and_trained(tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    rows = {"train_dataset": TRAIN, "eval_dataset": VALIDATION, "processing_class": byte_bpe_tokenizer()}
    lora = LoraConfig(target_modules=["up_proj"], r=2)
    model = whole(folder, backbone_layer="auto")
    trainer = RelishTrainer(model, arguments(tmp_path, use_cpu=True, max_steps=3), peft_config=lora, **rows)
    chosen = best_layer({int(layer): score for layer, score in model.config.layer_search.items()})
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    in_lora = {name for name in before if ".lora_" in name}
    assert len(in_lora) == 2 * chosen  # lora_A and lora_B of every layer that is left
    assert any(".score." in name for name in before)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert not [name for name in in_lora if torch.equal(after[name], before[name])]


@pytest.mark.parametrize("more", [{}, {"peft_config": LoraConfig(r=2)}])
def test_layer_of_a_model_with_an_adapter_is_not_searched(more, tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=byte_bpe_tokenizer())
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["up_proj"], r=2)
    wrapped = get_peft_model(whole(folder, backbone_layer="auto"), lora)
    rows = {"train_dataset": TRAIN, "eval_dataset": VALIDATION, "processing_class": byte_bpe_tokenizer()}
    with pytest.raises(ValueError, match="Choose the layer first"):
        RelishTrainer(wrapped, arguments(tmp_path, use_cpu=True), **rows, **more)
    assert all(p.requires_grad for name, p in wrapped.named_parameters() if ".lora_" in name)
