"""Heads that share a backbone, and backbones that are not what their name says: a score is right or refused, weights are kept."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import tiny_language_model
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from tiny import TEXTS, TOKENIZERS, save_backbone
from torch import nn
from training import ROWS, make_trainer, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from modeling_relish import RelishForSequenceRegression
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.base_model_relish import bounded_length
from modeling_relish.reward import RewardModelError, as_reward_model
from modeling_relish.weights_relish import backbone_fingerprint

# PEFT asks transformers by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base")))


def test_an_adapter_in_a_shared_backbone_moves_no_other_head_in_silence(base, tmp_path):
    shared = AutoModel.from_pretrained(base)
    first = tiny_model(shared, seed=1)
    before = first.predict(TEXTS[:4])
    tuned = tiny_model(shared)
    trainer = make_trainer(tmp_path, tuned, ROWS, peft_config=LoraConfig(r=2), learning_rate=1e-2)
    trainer.train()
    for fails in (
        lambda: first.predict(TEXTS[:4]),
        lambda: first.save_pretrained(tmp_path / "first"),
        lambda: tiny_model(shared),
    ):
        with pytest.raises(BackboneError, match="another model's adapter"):
            fails()
    assert not (tmp_path / "first").exists()
    tuned.predict(TEXTS[:4])  # its own
    trainer.model.unload()
    np.testing.assert_array_equal(first.predict(TEXTS[:4]), before)


def test_a_few_tokens_that_were_trained_are_not_taken_for_the_base_models(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = tiny_model(base)
    ids = sorted(set(tokenizer(TEXTS[0])["input_ids"]))[:3]
    adapted = get_peft_model(
        model, TrainableTokensConfig(task_type="SEQ_CLS", token_indices=ids, target_modules=["embed_tokens"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter += torch.randn_like(parameter)
    merged = adapted.merge_and_unload()
    expected = merged.predict(TEXTS[:4], tokenizer)
    merged.save_pretrained(tmp_path / "merged")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(loaded.predict(TEXTS[:4], tokenizer), expected, rtol=1e-6)
    reward = as_reward_model(merged, [1.0])
    reward.save_pretrained(tmp_path / "reward")
    found = RelishForSequenceRegression.from_pretrained(tmp_path / "reward").predict(TEXTS[:4], tokenizer)
    np.testing.assert_allclose(found, reward.predict(TEXTS[:4], tokenizer), rtol=1e-6)


def test_a_trained_backbone_stays_trained_when_its_layer_is_searched(base, tmp_path):
    model = tiny_model(base)
    with torch.no_grad():
        model.backbone.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path / "whole")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "whole", backbone_layer="auto")
    trainer = make_trainer(tmp_path, loaded, ROWS, eval_dataset=ROWS)
    trainer.train()
    expected = trainer.relish.predict(TEXTS[:4])
    trainer.save_model(str(tmp_path / "out"))
    again = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(again.predict(TEXTS[:4]), expected, rtol=1e-5)


def test_a_name_that_is_a_folder_is_the_same_folder_from_elsewhere(base, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(base).parent)
    model = tiny_model(AutoModel.from_pretrained(Path(base).name))
    assert model.config.backbone_name_or_path == str(Path(base).resolve())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_of_many_embeddings_counts(dtype):
    module = nn.Sequential(nn.Embedding(8000, 32, dtype=dtype))
    before = backbone_fingerprint(module, fine=True)
    with torch.no_grad():
        module[0].weight[7] += 1
    assert backbone_fingerprint(module, fine=True) != before


@pytest.mark.parametrize(
    ("kind", "positions", "bound"),
    [("camembert", 130, 128), ("mpnet", 514, 512), ("roberta", 514, 512), ("xlnet", -1, 1024), ("llama", 64, 64)],
)
def test_prompts_are_as_long_as_the_positions_that_a_backbone_has(kind, positions, bound):
    config = SimpleNamespace(model_type=kind, max_position_embeddings=positions, pad_token_id=1)
    assert bounded_length(1024, config) == bound


def test_an_adapter_is_merged_before_targets_become_a_reward(base):
    model = tiny_model(base, num_labels=2)
    get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"]))
    with pytest.raises(RewardModelError, match="merge it first"):
        as_reward_model(model, [1.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["bare", "language model"])
@pytest.mark.parametrize("changed", ["nothing", "a bias", "a matrix"])
def test_a_model_that_was_tuned_in_memory_is_saved_whole_and_an_untouched_one_by_its_name(
    changed, given, dtype, tmp_path
):
    source = tiny_language_model("gpt2")
    source.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    TOKENIZERS["gpt2"]().save_pretrained(tmp_path / "base")
    kind = AutoModel if given == "bare" else AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path / "base", dtype=dtype)
    with torch.no_grad():
        layer = loaded.base_model.h[1].mlp.c_fc
        if changed != "nothing":
            (layer.bias if changed == "a bias" else layer.weight).add_(0.05)
    model = tiny_model(loaded)
    assert (model.config.backbone_name_or_path is None) is (changed != "nothing")
    expected = model.predict(TEXTS[:3], TOKENIZERS["gpt2"]())
    model.save_pretrained(tmp_path / "out")
    again = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(again.predict(TEXTS[:3], TOKENIZERS["gpt2"]()), expected, rtol=1e-5)


def test_a_model_that_was_rounded_on_its_way_keeps_its_name(base):
    assert (
        tiny_model(AutoModel.from_pretrained(base, dtype=torch.bfloat16).float()).config.backbone_name_or_path == base
    )
