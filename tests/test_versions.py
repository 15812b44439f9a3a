"""Checkpoints that another version wrote: files with fields that are missing or not known still load, and say so."""

import json
import logging

import pytest
from tiny import TEXTS, byte_bpe_tokenizer, save_backbone
from training import tiny_model
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as hf_logging

from modeling_relish import RelishForSequenceRegression

TOKENIZER = byte_bpe_tokenizer(add_bos=True)
# What the first version wrote, and nothing else; every later field must have a default that means the same.
FIRST_FIELDS = {
    "architectures", "backbone_config", "backbone_fingerprint", "backbone_in_checkpoint", "backbone_layer",
    "backbone_name_or_path", "head_type", "head_hidden_size", "head_num_attention_heads", "head_intermediate_size", "label_mean",
    "label_std", "model_type", "prompt_template", "max_length", "dtype", "id2label", "label2id",
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["head", "whole"])
def checkpoint(request, tmp_path):
    base = save_backbone("llama", tmp_path / "base")
    model = tiny_model(
        str(base), backbone_layer=3, prompt_template="Text: {text}\nScore:", label_mean=4.0, label_std=2.0
    )
    model.save_pretrained(tmp_path / "out", save_backbone=request.param)
    return model.predict(TEXTS, TOKENIZER).tolist(), tmp_path / "out"


@pytest.fixture
def logged(caplog):
    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield caplog
    hf_logging.disable_propagation()


def change(folder, edit):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(edit(values)))


LOADERS = [RelishForSequenceRegression, AutoModelForSequenceClassification]


@pytest.mark.parametrize("loader", LOADERS)
def test_older_checkpoint_with_missing_fields_scores_the_same(loader, checkpoint, logged):
    expected, folder = checkpoint
    change(folder, lambda values: {k: v for k, v in values.items() if k in FIRST_FIELDS})
    for file in folder.glob("*.py"):
        file.unlink()
    assert loader.from_pretrained(folder).predict(TEXTS, TOKENIZER).tolist() == expected
    assert not [r for r in logged.records if "RelishConfig" in r.getMessage()]


@pytest.mark.parametrize("loader", LOADERS)
def test_newer_checkpoint_with_unknown_fields_scores_the_same_and_warns(loader, checkpoint, logged):
    expected, folder = checkpoint
    change(folder, lambda values: {**values, "head_temperature": 2.0, "calibration": {"points": [1, 2]}})
    model = loader.from_pretrained(folder)
    assert model.predict(TEXTS, TOKENIZER).tolist() == expected
    (warning,) = {r.getMessage() for r in logged.records if "RelishConfig" in r.getMessage()}
    assert "'calibration', 'head_temperature'" in warning
    assert "another version" in warning
    model.save_pretrained(folder.parent / "again")  # and what is not understood is not lost
    assert json.loads((folder.parent / "again" / "config.json").read_text())["calibration"] == {"points": [1, 2]}


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_type", "transformer"), ("objective", "pinball9"), ("pooling", "median"), ("truncation", "middle")],
)
def test_newer_checkpoint_that_means_something_else_is_refused_by_name(field, value, checkpoint):
    """A field that is known with a value that is not: loading it would give another number."""
    _, folder = checkpoint
    change(folder, lambda values: {**values, field: value})
    with pytest.raises(ValueError, match=f"{field} must be one of .*{value}"):
        RelishForSequenceRegression.from_pretrained(folder)


def test_newer_base_architecture_is_refused_by_name(checkpoint):
    _, folder = checkpoint
    change(folder, lambda values: {**values, "backbone_config": {**values["backbone_config"], "model_type": "llama9"}})
    with pytest.raises(ValueError, match="'llama9'.*update transformers"):
        RelishForSequenceRegression.from_pretrained(folder)


def test_card_of_an_older_checkpoint_is_written_on_save(checkpoint):
    _, folder = checkpoint
    change(folder, lambda values: {k: v for k, v in values.items() if k in FIRST_FIELDS})
    (folder / "README.md").unlink()
    RelishForSequenceRegression.from_pretrained(folder).save_pretrained(folder.parent / "again")
    assert "None were measured" in (folder.parent / "again" / "README.md").read_text()
