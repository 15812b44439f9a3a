"""RelishConfig: defaults, checks, and what TRL and PEFT read and write on it."""

import pytest
from transformers import AutoConfig, BertConfig, Gemma3TextConfig, LlamaConfig

from modeling_relish import RelishConfig
from modeling_relish.configuration_relish import RelishConfigError


def llama(**kwargs):
    return LlamaConfig(num_hidden_layers=4, hidden_size=32, vocab_size=99, **kwargs)


def test_fresh_config_is_a_regression_with_one_target():
    config = RelishConfig()
    assert config.problem_type == "regression"
    assert config.num_labels == 1
    assert (config.head_hidden_size, config.head_num_attention_heads, config.num_refinement_steps) == (256, 8, 3)
    assert config.head_intermediate_size == 1024
    assert config.objective == "huber"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head_type": "magic"}, ["head_type", "magic", "relish"]),
        ({"pooling": "max"}, ["pooling", "max"]),
        ({"objective": "l1"}, ["objective", "l1"]),
        ({"truncation": "left"}, ["truncation", "left"]),
        ({"head_hidden_size": 250}, ["250", "8"]),
        ({"num_refinement_steps": 0}, ["num_refinement_steps", "0"]),
        ({"num_refinement_steps": "3"}, ["num_refinement_steps", "'3'"]),
        ({"num_latents": 0}, ["num_latents", "0"]),
        ({"latent_init": "random"}, ["latent_init", "random", "learned"]),
        ({"latent_combination": "sum"}, ["latent_combination", "sum", "concat"]),
        ({"share_refinement_steps": "no"}, ["share_refinement_steps", "'no'"]),
        ({"regressor": "tree"}, ["regressor", "tree", "mlp"]),
        ({"head_dropout": 1.0}, ["head_dropout", "1.0"]),
        ({"huber_delta": 0}, ["huber_delta", "0"]),
        ({"max_length": 0}, ["max_length", "0"]),
        ({"problem_type": "single_label_classification", "num_labels": 2}, ["regression"]),
        ({"label_mean": [1.0], "label_std": [0.0]}, ["label_std", "0.0"]),
        ({"label_mean": [1.0, 2.0], "label_std": [1.0, 1.0]}, ["2", "num_labels is 1"]),
        ({"num_labels": 1, "id2label": {0: "helpful", 1: "brief"}}, ["num_labels=1", "helpful", "as_reward_model"]),
        ({"label_mean": 1.0}, ["label_mean", "label_std"]),
        ({"label_mean": float("nan"), "label_std": 1.0}, ["finite"]),
        ({"label_min": 5, "label_max": 0}, ["5", "below"]),
        ({"backbone_layer": 5, "backbone_config": llama()}, ["1..4", "5"]),
        ({"backbone_layer": 0, "backbone_config": llama()}, ["backbone_layer", "0"]),
        ({"backbone_config": {"model_type": "not_a_model"}}, ["not_a_model"]),
    ],
)
def test_impossible_settings_raise_with_what_came_and_what_was_expected(settings, words):
    with pytest.raises(RelishConfigError) as info:
        RelishConfig(**settings)
    for word in words:
        assert word in str(info.value)


def test_round_trip_keeps_every_setting(tmp_path):
    config = RelishConfig(
        backbone_config=Gemma3TextConfig(num_hidden_layers=6),
        backbone_layer=2,
        num_labels=2,
        label_mean=[1, 2],
        label_std=[0.5, 3],
        label_min=[0, 0],
        label_max=[5, 9.5],
        prompt_template="A: {text_a}\nB: {text_b}\nScore:",
        head_dropout=0.1,
        num_latents=2,
        latent_init="last",
        latent_combination="concat",
        share_refinement_steps=True,
        regressor="mlp",
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, RelishConfig)
    for name in RelishConfig.__dataclass_fields__:
        if name not in ("transformers_version", "backbone_config"):
            assert getattr(loaded, name) == getattr(config, name), name
    assert type(loaded.backbone_config) is Gemma3TextConfig
    assert loaded.backbone_config.layer_types == config.backbone_config.layer_types


@pytest.mark.parametrize(
    ("layer", "setting", "expected"),
    [(None, None, False), (4, None, False), (2, None, True), (2, False, False), (None, True, True)],
)
def test_input_norm_follows_the_layer(layer, setting, expected):
    assert RelishConfig(backbone_config=llama(), backbone_layer=layer, input_norm=setting).uses_input_norm is expected


def test_sizes_are_seen_at_the_top():
    config = RelishConfig(backbone_config=llama())
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (32, 99, 4)


@pytest.mark.parametrize("name", ["pad_token_id", "bos_token_id", "eos_token_id"])
def test_special_tokens_are_one_value_on_both_levels(name, tmp_path):
    config = RelishConfig(backbone_config=llama(**{name: None}))
    assert getattr(config, name) is None
    setattr(config.get_text_config(), name, 7)  # as TRL writes it
    assert getattr(config, name) == 7
    setattr(config, name, 8)
    assert getattr(config.get_text_config(), name) == 8
    config.save_pretrained(tmp_path)
    assert getattr(RelishConfig.from_pretrained(tmp_path), name) == 8
    assert getattr(RelishConfig.from_pretrained(tmp_path, **{name: 9}).get_text_config(), name) == 9


def test_misspelt_setting_is_told(caplog):
    import logging

    from transformers.utils import logging as hf_logging

    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        RelishConfig(num_refinement_step=5)
    hf_logging.disable_propagation()
    assert "num_refinement_step" in caplog.text


def test_missing_fields_of_an_older_checkpoint_take_their_defaults():
    values = RelishConfig(backbone_config=BertConfig()).to_dict()
    del values["huber_delta"], values["input_norm"]
    assert RelishConfig.from_dict(values).huber_delta == 1.0
