"""What a foreign checkpoint must not do: run code, unpickle, lead out of its folder, reach into Python through its prompt."""

import json
from pathlib import Path

import pytest
import torch
from tiny import TEXTS, byte_bpe_tokenizer, save_backbone
from training import tiny_model
from transformers import AutoModel, AutoModelForSequenceClassification, pipeline

from modeling_relish import RelishConfig, RelishForSequenceRegression
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.base_model_relish import UnreachableError
from modeling_relish.configuration_relish import RelishConfigError
from modeling_relish.text_relish import TemplateError

CODE = (
    "from pathlib import Path\nPath({marker!r}).write_text('ran')\nfrom transformers import LlamaModel, LlamaConfig\n"
)
LOADERS = [RelishForSequenceRegression, AutoModel, AutoModelForSequenceClassification]
TOKENIZER = byte_bpe_tokenizer(add_bos=True)


@pytest.fixture
def base(tmp_path):
    return save_backbone("llama", tmp_path / "base")


@pytest.fixture
def checkpoint(base, tmp_path):
    tiny_model(str(base), prompt_template="Text: {text}\nScore:").save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def edit(folder: Path, **changes) -> Path:
    values = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        inner, _, key = name.rpartition("__")
        (values[inner] if inner else values)[key] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def plant(folder: Path, marker: Path) -> Path:
    """Put code into a folder that leaves a mark when it is run."""
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    return folder


def pickled(folder: Path, marker: Path) -> Path:
    """Replace the weights by a pickle that leaves a mark when it is read."""

    class Evil:
        def __reduce__(self):
            return Path.write_text, (marker, "ran")

    (folder / "model.safetensors").unlink()
    torch.save({"score.latent": Evil()}, folder / "pytorch_model.bin")
    return folder


EVIL_MAP = {"AutoConfig": "evil.LlamaConfig", "AutoModel": "evil.LlamaModel"}


@pytest.mark.parametrize("loader", LOADERS)
def test_pickle_is_refused_by_name_and_never_read(loader, checkpoint, base, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(
        BackboneError, match=r"checkpoint .*foreign.* has no model.safetensors.*pytorch_model.bin, a pickle"
    ):
        loader.from_pretrained(pickled(checkpoint, marker))
    tiny_model(str(base)).save_pretrained(tmp_path / "two")
    pickled(base, marker)
    with pytest.raises(
        BackboneError, match=r"base model .*base.* has no model.safetensors.*pytorch_model.bin, a pickle"
    ):
        loader.from_pretrained(tmp_path / "two")
    with pytest.raises(BackboneError, match=r"pytorch_model.bin, a pickle"):
        RelishForSequenceRegression.from_backbone(str(base))
    assert not marker.exists()


def test_whole_checkpoint_as_pickle_is_refused_too(base, tmp_path):
    tiny_model(str(base)).save_pretrained(tmp_path / "whole", save_backbone=True)
    with pytest.raises(BackboneError, match=r"pytorch_model.bin, a pickle"):
        RelishForSequenceRegression.from_pretrained(pickled(tmp_path / "whole", tmp_path / "marker"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("trust", [None, True])
def test_code_that_a_base_model_or_a_backbone_config_asks_for_never_runs(loader, trust, checkpoint, base, tmp_path):
    marker = tmp_path / "marker"
    plant(edit(base, auto_map=EVIL_MAP), marker)
    plant(edit(checkpoint, backbone_config__auto_map=EVIL_MAP), marker)
    model = loader.from_pretrained(checkpoint, **({} if trust is None else {"trust_remote_code": trust}))
    assert not hasattr(model.config.backbone_config, "auto_map")
    assert type(model.backbone).__module__ == "transformers.models.llama.modeling_llama"
    assert len(model.predict(TEXTS[:2], TOKENIZER)) == 2
    assert not marker.exists()


def test_base_model_that_needs_its_own_code_is_refused_without_a_question(checkpoint, base, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked on the terminal"))
    marker = tmp_path / "marker"
    plant(edit(base, model_type="evil", auto_map=EVIL_MAP), marker)
    with pytest.raises(BackboneError, match="base model .*custom code"):
        RelishForSequenceRegression.from_pretrained(checkpoint)
    with pytest.raises(BackboneError, match="custom code"):
        RelishForSequenceRegression.from_backbone(str(base))
    with pytest.raises(RelishConfigError, match="'evil'.*remote code"):
        RelishConfig.from_pretrained(edit(checkpoint, backbone_config__model_type="evil"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../../no-such-folder",
        "/home/somebody/models/base",
        "~/base",
        "C:\\models\\base",
        "a/b/c",
        "http://example.com/base",
        "embedded:../../no-such-folder",
        "embedded:/etc",
        "",
    ],
)
@pytest.mark.parametrize("loader", LOADERS[:2])
def test_base_model_name_that_leads_outside_is_refused_before_anything_is_asked(name, loader, checkpoint, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a network was asked"))
    with pytest.raises(BackboneError) as told:
        loader.from_pretrained(edit(checkpoint, backbone_name_or_path=name))
    if name:
        assert repr(name) in str(told.value)
    assert "backbone=" in str(told.value) or "embedded" in str(told.value)


def test_folder_outside_is_read_as_data_alone(checkpoint, tmp_path, monkeypatch):
    """A path that leads to a folder that is there: what is in it is no base model, and its code does not run."""
    outside, inside = tmp_path / "outside", tmp_path / "a" / "b"
    outside.mkdir()
    inside.mkdir(parents=True)
    (outside / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": EVIL_MAP}))
    plant(outside, tmp_path / "marker")
    monkeypatch.chdir(inside)
    with pytest.raises(BackboneError, match="custom code"):
        RelishForSequenceRegression.from_pretrained(edit(checkpoint, backbone_name_or_path="../../outside"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{text.__class__}",
        "{text.__class__.__mro__[1]}",
        "{text[0]}",
        "{text!r}",
        "{text:>999999999}",
        "{0}",
        "{}",
        "plain",
    ],
)
def test_foreign_template_reaches_nothing_but_the_text(template, checkpoint):
    edit(checkpoint, prompt_template=template)
    model = RelishForSequenceRegression.from_pretrained(checkpoint)
    with pytest.raises(TemplateError):
        model.predict(["a text"], TOKENIZER)
    with pytest.raises(TemplateError):
        pipeline("text-classification", model=model, tokenizer=TOKENIZER)("a text")
    model.save_pretrained(checkpoint.parent / "copy")  # the weights are not lost over the card that cannot be written
    assert not (checkpoint.parent / "copy" / "README.md").exists()


@pytest.mark.parametrize(
    "template", ["{text} {% include '/etc/passwd' %}", "{text} {{ config }}", "{text} {{{{ 7*7 }}}} @/etc/passwd"]
)
def test_foreign_template_is_no_program(template, checkpoint, tmp_path):
    """Neither in the prompt nor in the model card, which is written by a template engine, does it read a file or compute."""
    edit(checkpoint, prompt_template=template)
    model = RelishForSequenceRegression.from_pretrained(checkpoint)
    try:
        model.predict(["a text"], TOKENIZER)
    except TemplateError:
        return
    model.save_pretrained(tmp_path / "copy")
    card = (tmp_path / "copy" / "README.md").read_text()
    assert template in card
    assert "root:" not in card
    assert "49" not in card


def test_row_of_text_is_data(checkpoint):
    model = RelishForSequenceRegression.from_pretrained(checkpoint)
    texts = ["{text.__class__}", "{text}", "{{}}", "{0} {x!r}"]
    one_by_one = [float(model.predict([text], TOKENIZER)[0]) for text in texts]
    assert model.predict(texts, TOKENIZER).tolist() == pytest.approx(one_by_one, abs=1e-5)
    assert len(set(one_by_one)) == len(texts)


def test_missing_checkpoint_is_an_oserror_and_a_valueerror(tmp_path):
    with pytest.raises(UnreachableError) as told:
        RelishForSequenceRegression.from_pretrained("user/nothing", local_files_only=True)
    assert isinstance(told.value, OSError)
    with pytest.raises(BackboneError, match="no RELISH checkpoint"):
        RelishForSequenceRegression.from_pretrained(tmp_path)
