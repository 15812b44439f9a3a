"""LoRA and its relatives by PEFT: what is trained, what is written, and that it comes back with the same scores."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import TEXTS, TOKENIZERS, save_backbone, tiny_backbone
from training import SCALE, tiny_model
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from modeling_relish import RelishForSequenceRegression
from modeling_relish.adapter_relish import AdapterError
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.base_model_relish import BackboneMismatchError

# PEFT 0.21 asks for an attribute that transformers 5.24 has renamed; a second wrapping is what reloading as PeftModel is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
]
TEMPLATE = "Text: {text}\nScore:"
KINDS = {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base") / "llama"))


def adapted(base, rank=4, backbone_layer=3, dtype="float32", **config):
    """Return a PeftModel whose adapter and head are not fresh ones."""
    model = tiny_model(base, backbone_layer=backbone_layer, prompt_template=TEMPLATE, dtype=dtype, **SCALE)
    settings = {"task_type": "SEQ_CLS", "target_modules": "all-linear", "r": rank, **config}
    return stirred(get_peft_model(model, LoraConfig(**settings)))


def stirred(peft_model):
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peft_model.eval()


def scores(model):
    return model.predict(TEXTS, TOKENIZERS["llama"]()).tolist()


def settings_of(folder):
    return json.loads((Path(folder) / "adapter_config.json").read_text())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("head", ["relish", "mlp"])
def test_all_linear_leaves_the_head_alone_and_trains_it_whole(kind, head):
    model = tiny_model(tiny_backbone(kind), head_type=head)
    peft_model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    trained = {name for name, p in peft_model.named_parameters() if p.requires_grad}
    lora = {name for name in trained if ".lora_" in name}
    assert lora
    assert all(name.startswith("base_model.model.backbone.") for name in lora)
    fresh = tiny_model(tiny_backbone(kind), head_type=head)
    expected = {f"base_model.model.score.modules_to_save.default.{name}" for name, _ in fresh.score.named_parameters()}
    assert trained - lora == expected


RELOAD = """
import json, sys
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
from modeling_relish import RelishForSequenceRegression
texts = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    own = RelishForSequenceRegression.from_pretrained(folder)
    auto = AutoModelForSequenceClassification.from_pretrained(folder)
    again = PeftModel.from_pretrained(RelishForSequenceRegression.from_pretrained(folder), folder)
    print(json.dumps([model.predict(texts).tolist() for model in (own, auto, again)]))
"""


def test_fresh_process_gives_the_same_scores_by_every_way_of_loading(base, tmp_path):
    expected = []
    for name, config in KINDS.items():
        model = adapted(base, **config).get_base_model()
        model.save_pretrained(tmp_path / name)
        expected.append([scores(model)] * 3)
    assert len({str(s) for s in expected}) == len(KINDS)
    folders = [str(tmp_path / name) for name in KINDS]
    command = [sys.executable, "-c", RELOAD, json.dumps(TEXTS), *folders]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder_is_small_names_the_base_and_stands_alone(dtype, base, tmp_path):
    peft_model = adapted(base, dtype=dtype)
    peft_model.get_base_model().save_pretrained(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    head = {f"base_model.model.score.{name}" for name in tiny_model(base).score.state_dict()}
    assert {key for key in weights if ".lora_" not in key} == head
    assert all(key.startswith("base_model.model.backbone.") for key in set(weights) - head)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    card_and_code = {"README.md", *(name for name in names if name.endswith("_relish.py"))}
    assert names - card_and_code == {"adapter_model.safetensors", "adapter_config.json", "config.json"}
    assert settings_of(tmp_path / "out")["base_model_name_or_path"] == base
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.label_mean == [2.0]
    assert not any(p.requires_grad for p in loaded.parameters())
    assert scores(loaded) == scores(peft_model)
    loaded.save_pretrained(tmp_path / "again")
    assert scores(RelishForSequenceRegression.from_pretrained(tmp_path / "again")) == scores(peft_model)


def test_adapter_on_a_bare_language_model_is_an_error_not_a_random_head(base, tmp_path):
    model = adapted(base, target_modules=["q_proj"]).get_base_model()
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="[Nn]o modules were targeted|not found"):
        AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("save_backbone", [False, True])
def test_adapter_on_a_saved_relish_model_as_peft_writes_it(save_backbone, base, tmp_path):
    start = tiny_model(base, backbone_layer=3, prompt_template=TEMPLATE, **SCALE)
    with torch.no_grad():
        start.backbone.layers[0].mlp.up_proj.weight.add_(0.05 if save_backbone else 0.0)
    start.save_pretrained(tmp_path / "start", save_backbone=save_backbone)
    model = RelishForSequenceRegression.from_pretrained(tmp_path / "start")
    peft_model = stirred(get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", r=2)))
    peft_model.save_pretrained(tmp_path / "out")
    assert settings_of(tmp_path / "out")["base_model_name_or_path"] == str(tmp_path / "start")
    assert not (tmp_path / "out" / "config.json").exists()
    model.save_pretrained(tmp_path / "own")
    for folder in ("out", "own"):
        for auto in (
            RelishForSequenceRegression,
            AutoModelForSequenceClassification,
            AutoPeftModelForSequenceClassification,
        ):
            assert scores(auto.from_pretrained(tmp_path / folder)) == scores(peft_model), (folder, auto)


def test_what_peft_wrote_without_a_config_says_what_to_do_and_then_loads(base, tmp_path):
    peft_model = adapted(base)
    peft_model.save_pretrained(tmp_path / "out")
    with pytest.raises(AdapterError, match=r"label's scale are lost.*config\.save_pretrained"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    peft_model.get_base_model().config.save_pretrained(tmp_path / "out")
    assert scores(RelishForSequenceRegression.from_pretrained(tmp_path / "out")) == scores(peft_model)


def _without(part):
    return lambda weights: {key: tensor for key, tensor in weights.items() if part not in key}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without(".score."), "holds no head"),
        (_without(".score.latent"), "score.latent"),
        (_without("layers.1.mlp.up_proj.lora_B"), "layers.1.mlp.up_proj.lora_B"),
        (lambda weights: {k: v[:1] if "layers.0.mlp.up_proj.lora_B" in k else v for k, v in weights.items()}, "size"),
        (lambda weights: weights | {"base_model.model.more": torch.zeros(1)}, "model.more"),
    ],
    ids=["no head", "part of the head", "no lora_B", "shape", "more"],
)
@pytest.mark.parametrize("auto", [RelishForSequenceRegression, AutoModelForSequenceClassification])
def test_adapter_that_is_not_whole_is_refused(damage, words, auto, base, tmp_path):
    adapted(base).get_base_model().save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in damage(load_file(file)).items()}, file, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=words):
        auto.from_pretrained(tmp_path / "out")


def test_pickled_adapter_is_refused_and_the_base_model_is_checked(base, tmp_path):
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    peft_model = adapted(str(copy))
    model = peft_model.get_base_model()
    model.save_pretrained(tmp_path / "out")
    save_backbone("llama", copy, seed=1)
    with pytest.raises(BackboneMismatchError):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    shared = RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=tiny_backbone("llama"))
    assert scores(shared) == scores(peft_model)
    shutil.rmtree(copy)
    with pytest.raises(BackboneError, match=str(copy)):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    (tmp_path / "out" / "adapter_model.safetensors").rename(tmp_path / "out" / "adapter_model.bin")
    with pytest.raises(AdapterError, match="never read"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "out", backbone=tiny_backbone("llama"))


@pytest.mark.parametrize("size", [0.05, 1e-6])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_is_saved_whole_however_small_the_change(kind, size, base, tmp_path):
    peft_model = adapted(base, **KINDS[kind])
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(size / 0.05)
    before = scores(peft_model)
    merged = peft_model.merge_and_unload()
    assert type(merged) is RelishForSequenceRegression
    assert not merged.has_adapter
    merged.save_pretrained(tmp_path / "merged")
    assert any(key.startswith("backbone.") for key in load_file(tmp_path / "merged" / "model.safetensors"))
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "merged")
    assert scores(loaded) == pytest.approx(before, abs=3e-5)
    assert all(torch.equal(p, merged.state_dict()[name]) for name, p in loaded.state_dict().items())


def test_unmerged_adapter_is_never_taken_for_a_whole_checkpoint(base, tmp_path):
    model = adapted(base).get_base_model()
    with pytest.raises(BackboneError, match="merge_and_unload"):
        model.save_pretrained(tmp_path / "out", save_backbone=True)
    unloaded = PeftModel.from_pretrained(model, _saved(model, tmp_path / "out")).unload()
    unloaded.save_pretrained(tmp_path / "head")  # the trained head on the base model itself
    assert all(key.startswith("score.") for key in load_file(tmp_path / "head" / "model.safetensors"))


@pytest.mark.parametrize("save_backbone", [None, True])
def test_model_saved_where_an_adapter_lies_is_the_one_that_comes_back(save_backbone, base, tmp_path, monkeypatch):
    first = adapted(base)
    first.get_base_model().save_pretrained(tmp_path / "out")
    plain = tiny_model(base, seed=1, backbone_layer=2, prompt_template=TEMPLATE, **SCALE).eval()
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", _full_disk)
        with pytest.raises(OSError, match="no space"):
            plain.save_pretrained(tmp_path / "out", save_backbone=save_backbone)
    plain.save_pretrained(tmp_path / "out", is_main_process=False, save_backbone=save_backbone)
    assert scores(RelishForSequenceRegression.from_pretrained(tmp_path / "out")) == scores(first)
    plain.save_pretrained(tmp_path / "out", save_backbone=save_backbone)
    assert not list((tmp_path / "out").glob("adapter_[cm]*"))
    for auto in (RelishForSequenceRegression, AutoModelForSequenceClassification):
        assert scores(auto.from_pretrained(tmp_path / "out")) == scores(plain)
    first.get_base_model().save_pretrained(tmp_path / "out")  # and the other way round
    assert scores(RelishForSequenceRegression.from_pretrained(tmp_path / "out")) == scores(first)


def _full_disk(*_, **__):
    raise OSError("no space left on device")


def _saved(model, folder):
    model.save_pretrained(folder)
    return folder
