"""Checkpoints: what is written, what comes back, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BACKBONES, TEXTS, TOKENIZERS, byte_bpe_tokenizer, save_backbone, tiny_backbone
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from modeling_relish import RelishConfig, RelishForSequenceRegression
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.base_model_relish import BackboneMismatchError
from modeling_relish.configuration_checks_relish import RelishConfigError

TEMPLATE = "Text: {text}\nScore:"


@pytest.fixture
def base(tmp_path):
    return save_backbone("llama", tmp_path / "base")


@pytest.fixture
def trained(base):
    """A model whose head is not a fresh one."""
    model = RelishForSequenceRegression.from_backbone(
        str(base), backbone_layer=3, prompt_template=TEMPLATE, label_mean=3.0, label_std=1.5
    )
    with torch.no_grad():
        for p in model.score.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def predictions(model):
    return model.predict(TEXTS, byte_bpe_tokenizer(add_bos=True)).tolist()


@pytest.mark.parametrize("kind", sorted(BACKBONES))
@pytest.mark.parametrize("save_backbone_too", [False, True])
def test_every_backbone_comes_back_bit_equal(kind, save_backbone_too, tmp_path):
    folder = save_backbone(kind, tmp_path / "base")
    for layer in (2, None):
        model = RelishForSequenceRegression.from_backbone(str(folder), backbone_layer=layer, head_hidden_size=64)
        tokenizer = TOKENIZERS[kind]()
        expected = model.predict(TEXTS, tokenizer).tolist()
        model.save_pretrained(tmp_path / f"out{layer}", save_backbone=save_backbone_too)
        keys = set(load_file(tmp_path / f"out{layer}" / "model.safetensors"))
        assert any(k.startswith("backbone.") for k in keys) is save_backbone_too
        loaded = RelishForSequenceRegression.from_pretrained(tmp_path / f"out{layer}")
        assert loaded.predict(TEXTS, tokenizer).tolist() == expected
        assert not loaded.training


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_auto_classes_bring_it_back_without_a_flag(auto, trained, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    loaded = auto.from_pretrained(tmp_path / "out")
    assert type(loaded) is RelishForSequenceRegression
    assert predictions(loaded) == predictions(trained)


def test_head_only_checkpoint_holds_the_head_names_its_base_and_gets_it_back(trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == {f"score.{k}" for k in trained.score.state_dict()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["backbone_name_or_path"] == str(base)
    assert config["backbone_in_checkpoint"] is False
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    whole = AutoModel.from_pretrained(base).state_dict()
    for name, tensor in loaded.backbone.state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_paper_configuration_is_under_16_mb(tmp_path):
    folder = save_backbone("llama", tmp_path / "base")
    model = RelishForSequenceRegression.from_backbone(str(folder))
    model.score.input_proj = torch.nn.Linear(4096, 256)  # as over an 8B backbone
    model.save_pretrained(tmp_path / "out")
    size = sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert 13e6 < size < 16e6


def test_trained_backbone_is_always_saved(trained, tmp_path):
    with pytest.raises(BackboneError, match="would lose weights"):
        trained.unfreeze_backbone().save_pretrained(tmp_path / "a", save_backbone=False)
    with torch.no_grad():
        trained.backbone.layers[0].mlp.up_proj.weight.add_(0.01)
    trained.freeze_backbone()  # frozen again, but no longer the base model
    trained.save_pretrained(tmp_path / "b")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "b")
    assert predictions(loaded) == predictions(trained)
    loaded.save_pretrained(tmp_path / "c")  # and stays whole from then on
    assert predictions(RelishForSequenceRegression.from_pretrained(tmp_path / "c")) == predictions(trained)


def test_backbone_without_a_name_is_saved_whole(tmp_path):
    backbone = tiny_backbone("llama")
    backbone.config._name_or_path = ""
    model = RelishForSequenceRegression.from_backbone(backbone, prompt_template=TEMPLATE)
    model.save_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    assert predictions(RelishForSequenceRegression.from_pretrained(tmp_path / "out")) == predictions(model)


def test_base_model_with_other_weights_is_refused(trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    save_backbone("llama", base, seed=1)
    with pytest.raises(BackboneMismatchError, match="not those this head was trained on"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")


def test_missing_base_model_is_named_and_another_place_can_be_given(trained, base, tmp_path):
    expected = predictions(trained)
    trained.save_pretrained(tmp_path / "out")
    base.rename(tmp_path / "moved")
    with pytest.raises(BackboneError, match=str(base)):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    moved = RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone_name_or_path=str(tmp_path / "moved"))
    assert predictions(moved) == expected


def test_backbone_in_memory_is_shared_and_nothing_else_is_read(trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    backbone = AutoModel.from_pretrained(base)
    shutil.rmtree(base)
    one = RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=backbone)
    two = RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=backbone)
    assert predictions(one) == predictions(trained)
    embedding = backbone.get_input_embeddings().weight
    assert one.get_input_embeddings().weight is embedding
    assert two.get_input_embeddings().weight is embedding
    with pytest.raises(BackboneMismatchError):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=tiny_backbone("llama", seed=5))


def test_two_heads_on_one_loaded_backbone_both_name_it(base, tmp_path):
    backbone = AutoModel.from_pretrained(base)
    for name in ("one", "two"):
        model = RelishForSequenceRegression.from_backbone(backbone, prompt_template=TEMPLATE)
        model.save_pretrained(tmp_path / name)
        assert model.config.backbone_name_or_path == str(base)
        assert all(k.startswith("score.") for k in load_file(tmp_path / name / "model.safetensors"))
    assert backbone.config._name_or_path == str(base)


def test_base_model_is_not_taken_for_a_trained_backbone(trained, base, tmp_path):
    with torch.no_grad():
        trained.backbone.layers[0].mlp.up_proj.weight.add_(0.01)
    trained.save_pretrained(tmp_path / "out")
    with pytest.raises(BackboneError, match="holds its own backbone weights"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=AutoModel.from_pretrained(base))


def test_pinned_revision_reaches_the_loader(trained, tmp_path, monkeypatch):
    trained.config.backbone_revision = "abc123"
    trained.save_pretrained(tmp_path / "out")
    seen = []
    original = AutoModel.from_pretrained

    def spy(name, *args, **kwargs):
        seen.append(kwargs.get("revision"))
        return original(name, *args, **kwargs)

    monkeypatch.setattr(AutoModel, "from_pretrained", spy)
    RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert seen == ["abc123"]


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_head_that_is_not_what_the_config_says_is_refused(damage, trained, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    if damage == "missing":
        del weights["score.latent"]
    elif damage == "extra":
        weights["score.more"] = torch.zeros(1)
    else:
        weights["score.latent"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(BackboneError, match="does not hold the head"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")


def test_base_models_own_folder_is_not_overwritten(trained, base):
    with pytest.raises(BackboneError, match="another folder"):
        trained.save_pretrained(base)
    with pytest.raises(BackboneError, match="another folder"):
        trained.save_pretrained(base, save_backbone=True)
    assert AutoModel.from_pretrained(base)


def test_no_path_of_the_training_machine_but_the_base_models_name_is_written(trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    assert text.count(str(base.parent)) == 1


def test_device_map_auto_and_dtype(trained, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    for folder_kwargs in ({}, {"save_backbone": True}):
        trained.save_pretrained(tmp_path / "out", **folder_kwargs)
        mapped = RelishForSequenceRegression.from_pretrained(tmp_path / "out", device_map="auto")
        assert predictions(mapped) == predictions(trained)
        half = RelishForSequenceRegression.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert half.score.latent.dtype == torch.float32


def test_tokenizer_is_found_with_the_checkpoint_or_the_base(trained, base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    expected = trained.predict(TEXTS, tokenizer).tolist()
    trained.save_pretrained(tmp_path / "out")
    assert RelishForSequenceRegression.from_pretrained(tmp_path / "out").predict(TEXTS).tolist() == expected
    tokenizer.save_pretrained(tmp_path / "out")
    assert RelishForSequenceRegression.from_pretrained(tmp_path / "out").predict(TEXTS).tolist() == expected


def test_load_tells_what_it_loaded(trained, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_unknown_setting_is_refused_at_the_start(base):
    with pytest.raises(ValueError, match="num_refinement_step'"):
        RelishForSequenceRegression.from_backbone(str(base), num_refinement_step=2)


def test_fresh_config_without_backbone_says_how_to_start():
    with pytest.raises(BackboneError, match="from_backbone"):
        RelishForSequenceRegression(RelishConfig())


PEAK = """
import resource, sys, threading, time
from modeling_relish import RelishForSequenceRegression
import torch
def rss():
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
before, peak, stop = rss(), 0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, rss()); time.sleep(0.001)
t = threading.Thread(target=watch); t.start()
model = RelishForSequenceRegression.from_pretrained(sys.argv[1]); stop = True; t.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(peak - before, size)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_head_only_load_needs_no_more_memory_than_base_and_head(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=6, intermediate_size=4096, num_attention_heads=8, vocab_size=9000
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    model = RelishForSequenceRegression.from_backbone(str(tmp_path / "base"))
    model.save_pretrained(tmp_path / "out")
    del model
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    peak, size = map(int, out.stdout.split())
    assert size > 400e6
    assert peak < 1.1 * size + 40e6, (
        peak / 1e6,
        size / 1e6,
    )  # 40 MB: what Python itself imports and allocates meanwhile


@pytest.mark.parametrize("whole", [False, True])
def test_misspelt_settings_raise_and_the_older_name_of_dtype_counts(whole, tmp_path):
    base = str(save_backbone("llama", tmp_path / "base"))
    RelishForSequenceRegression.from_backbone(base, prompt_template="{text}:").save_pretrained(
        tmp_path / "out", save_backbone=whole
    )
    with pytest.raises(RelishConfigError, match="no setting 'promt_template'; 'prompt_template' may be meant"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", promt_template="{text}?")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert loaded.backbone.dtype == torch.bfloat16


def test_shards_are_not_hidden_by_a_head_that_lay_there_nor_the_other_way(tmp_path):
    base = str(save_backbone("llama", tmp_path / "base"))
    model = RelishForSequenceRegression.from_backbone(base)
    model.save_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out", save_backbone=True, max_shard_size="50KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    expected = model.predict(TEXTS[:3])
    for _ in range(2):
        found = RelishForSequenceRegression.from_pretrained(tmp_path / "out").predict(TEXTS[:3])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        model.save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("change", ["one row", "two rows change places"])
def test_base_model_with_other_token_embeddings_alone_is_refused(change, trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    weights = load_file(base / "model.safetensors")
    (name,) = [key for key in weights if "embed_tokens" in key]
    if change == "one row":
        weights[name][123] *= 1.5
    else:
        weights[name][[40, 41]] = weights[name][[41, 40]]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackboneMismatchError, match="not those this head was trained on"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")


def test_a_checkpoint_from_before_embeddings_were_digested_loads(trained, base, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["backbone_fingerprint"] = config["backbone_fingerprint"].rpartition(":")[0]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for dtype in ("float32", "bfloat16"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", dtype=dtype)


def test_number_and_names_of_targets_override_the_checkpoints_or_are_refused(trained, tmp_path):
    trained.save_pretrained(tmp_path / "out")
    renamed = RelishForSequenceRegression.from_pretrained(tmp_path / "out", id2label={0: "clarity"})
    assert renamed.config.target_names == ["clarity"]
    with pytest.raises(RelishConfigError, match=r"num_labels=2 was asked for, but the targets are"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", num_labels=2)
