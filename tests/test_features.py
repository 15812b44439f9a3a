"""The feature cache from the outside: what is stored, for whom, and when the backbone runs."""

import re

import numpy as np
import pytest
import torch
from cached import SMALL, counted, filled, keys_in, shards
from tiny import SCORES, TEXTS, TOKENIZERS, save_backbone, tiny_backbone
from training import IDS, ROWS, TOKENIZER, losses, make_trainer, rows_of, tiny_model
from transformers import Trainer
from transformers.utils import logging

from modeling_relish import FeatureCache, RelishForSequenceRegression, feature_files, features
from modeling_relish.backbone_relish import NonFiniteStatesError
from modeling_relish.data_collator import RelishCollator
from modeling_relish.features import FeatureCacheError, FeatureDataset, text_key

pytestmark = pytest.mark.usefixtures("workbench")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "roberta", "gemma3"])
@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_are_those_of_the_backbone(kind, layer, dtype, tmp_path):
    backbone = tiny_backbone(kind)
    ids = [TOKENIZERS[kind]()(text)["input_ids"] for text in TEXTS]
    cache = filled(tmp_path, tiny_model(backbone, backbone_layer=layer), ids, dtype=dtype)
    for row in ids:
        with torch.no_grad():
            out = backbone(input_ids=torch.tensor([row]), output_hidden_states=True)
        expected = (out.last_hidden_state if layer is None else out.hidden_states[layer])[0]
        found = cache.states(text_key(row))
        assert found.dtype == getattr(torch, dtype)
        step = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[dtype]  # half the distance of two numbers near 1
        assert bool(((found.float() - expected).abs() <= 1e-5 + 1.01 * step * expected.abs()).all())


def test_equal_texts_are_stored_once_and_new_ones_are_added(tmp_path):
    model = tiny_model()
    seen = counted(model)
    cache = filled(tmp_path, model, [*IDS[:10], *IDS[3:8], *IDS[:10]])
    cache.add(IDS, show_progress=False)
    cache.add(IDS[::-1], show_progress=False)
    assert seen == dict.fromkeys(map(tuple, IDS), 1)
    assert sorted(key for path in shards(tmp_path) for key in keys_in(path)) == sorted(text_key(row) for row in IDS)
    assert all(row in cache for row in IDS)
    assert [*IDS[2], 5] not in cache
    assert IDS[2][::-1] not in cache


def test_files_are_mapped_and_an_unknown_text_raises(tmp_path):
    cache = filled(tmp_path)
    mapped = feature_files.map_shard(shards(tmp_path)[0]).states
    assert type(mapped) is np.memmap
    with pytest.raises(FeatureCacheError, match="add it"):
        cache.states(text_key([1, 2, 3]))
    before = cache.states(text_key(IDS[0])).clone()
    cache.states(text_key(IDS[0])).zero_()  # what a caller does to its copy stays there
    assert torch.equal(cache.states(text_key(IDS[0])), before)


def test_other_weights_layer_dtype_or_settings_never_share(tmp_path):
    other = tiny_backbone("llama")
    other.layers[3].mlp.down_proj.weight.data[31, 63] += 1e-3  # one of thousands of numbers
    stretched, eager = tiny_backbone("llama"), tiny_backbone("llama")
    stretched.config.rope_parameters["rope_theta"] = 500.0
    eager.set_attn_implementation("eager")
    others = [other, stretched, eager, tiny_backbone("llama", seed=1), tiny_backbone("llama", dtype=torch.bfloat16)]
    models = [*map(tiny_model, [None, *others]), tiny_model(backbone_layer=2), tiny_model(backbone_layer=3)]
    folders = [FeatureCache(model, tmp_path, dtype).folder for model in models for dtype in features.STORAGE_DTYPES]
    assert len(set(folders)) == len(folders)
    again = tiny_model(seed=1, num_labels=3, label_mean=[1.0] * 3, label_std=[2.0] * 3, objective="mse")
    again.config.pad_token_id = 7  # as Trainer sets it; head, labels and padding do not touch the states
    assert FeatureCache(again, tmp_path).folder in folders


def test_a_reloaded_checkpoint_finds_its_states(tmp_path):
    base = save_backbone("llama", tmp_path / "base")
    model = tiny_model(str(base), backbone_layer=3)
    filled(tmp_path / "cache", model)
    model.save_pretrained(tmp_path / "saved")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    seen = counted(loaded)
    assert IDS[0] in filled(tmp_path / "cache", loaded)
    assert not seen


def test_int8_keeps_each_token_to_a_127th_of_its_largest_number(tmp_path):
    exact, coarse = filled(tmp_path, dtype="float32"), filled(tmp_path, dtype="int8")
    for key in map(text_key, IDS):
        expected, found = exact.states(key), coarse.states(key)
        assert found.dtype == torch.float32
        step = expected.abs().amax(-1, keepdim=True) / 127
        assert bool(((found - expected).abs() <= 0.51 * step).all())
    assert shards(exact.folder)[0].stat().st_size > 3 * shards(coarse.folder)[0].stat().st_size


def test_caches_are_listed_with_their_sizes(tmp_path):
    model = tiny_model(backbone_layer=2)
    model.config.backbone_name_or_path = "some/base"
    folder = filled(tmp_path, model, dtype="float16").folder
    (entry,) = feature_files.list_caches(tmp_path)
    distinct = {tuple(row) for row in IDS}
    assert (entry.folder, entry.name, entry.backbone) == (folder, folder.name, "some/base")
    assert (entry.layers, entry.dtype, entry.texts) == ("2", "float16", len(distinct))
    assert entry.tokens == sum(map(len, distinct))
    assert entry.size == sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert feature_files.list_caches(tmp_path / "none") == []


def test_the_bar_tells_tokens_per_second_and_the_time_left(tmp_path, capsys):
    cache = FeatureCache(tiny_model(), tmp_path, **SMALL)
    was_enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        cache.add(IDS)
    finally:
        if not was_enabled:
            logging.disable_progress_bar()
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert re.search(r"\d\d:\d\d<\d\d:\d\d, .*token/s", shown)


def test_unknown_dtype_and_trained_backbone_are_refused(tmp_path):
    for dtype in ("float64", "int4", ""):
        with pytest.raises(FeatureCacheError, match=rf"bfloat16.*float16.*float32.*'{dtype}'"):
            FeatureCache(tiny_model(), tmp_path, dtype)
    with pytest.raises(FeatureCacheError, match="frozen"):
        FeatureCache(tiny_model().unfreeze_backbone(), tmp_path)


def test_states_beyond_float16_raise_and_are_not_stored(tmp_path):
    model = tiny_model()
    model.backbone.norm.weight.data *= 1e6
    with pytest.raises(NonFiniteStatesError, match=r"last layer.*float16.*bfloat16 or float32"):
        filled(tmp_path, model, dtype="float16")
    assert not shards(tmp_path)
    cache = filled(tmp_path, model, dtype="bfloat16")
    largest = max(float(cache.states(text_key(row)).float().abs().max()) for row in IDS)
    assert 65504 < largest < 1e8


def test_trainers_run_a_frozen_backbone_once_per_text(tmp_path):
    model = tiny_model()
    seen = counted(model)
    rows = rows_of([*SCORES, *SCORES[:5]], [*TEXTS, *TEXTS[:5]])
    trainer = make_trainer(tmp_path, model, rows, eval_dataset=ROWS.select(range(9)), num_train_epochs=3)
    assert len(losses(trainer)) == 12
    trainer.evaluate()
    trainer.predict(ROWS)
    assert seen == dict.fromkeys(map(tuple, IDS), 1)
    second = tiny_model(seed=1, objective="mse")
    seen_again = counted(second)
    losses(make_trainer(tmp_path, second))
    assert not seen_again
    losses(make_trainer(tmp_path, second, cache_features=False, num_train_epochs=2))
    assert set(seen_again.values()) == {2}


def test_another_template_gets_its_own_states(tmp_path):
    for template in ("{text}", "Rate: {text}\nScore:", "{text}{text}"):
        trainer = make_trainer(tmp_path, tiny_model(prompt_template=template))
        found = trainer.predict(ROWS).predictions[:, 0]
        assert found == pytest.approx(trainer.model.predict(TEXTS, TOKENIZER), abs=1e-5)


def test_cached_rows_train_a_plain_trainer(tmp_path):
    rows = FeatureDataset(filled(tmp_path), IDS, {"labels": SCORES, "sample_weight": [1.0] * 24})
    own, plain = (tiny_model(label_mean=2.0, label_std=1.0) for _ in range(2))
    kwargs = {"learning_rate": 1e-3}
    found = losses(make_trainer(tmp_path, plain, rows, Trainer, data_collator=RelishCollator(), **kwargs))
    assert found == pytest.approx(losses(make_trainer(tmp_path, own, **kwargs)), abs=1e-5)
