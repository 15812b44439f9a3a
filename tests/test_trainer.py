"""RelishTrainer from the outside, and a plain Trainer: against losses, gradients and metrics computed here."""

import copy
import json
import math
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from scipy import stats
from tiny import SCORES, TEXTS, TOKENIZERS, save_backbone, tiny_backbone
from training import (
    EIGHT,
    IDS,
    PADDED,
    ROWS,
    SCALE,
    SGD,
    TOKENIZER,
    TOKENS,
    close,
    head,
    losses,
    one_sgd_step,
    penalty,
    rows_of,
    same,
    tiny_model,
)
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from modeling_relish import RelishForSequenceRegression, RelishTrainer
from modeling_relish.configuration_checks_relish import RelishConfigError
from modeling_relish.data import TableError
from modeling_relish.metrics import ConstantInputWarning

pytestmark = pytest.mark.usefixtures("workbench")

BEST = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
BOTH = pytest.mark.parametrize("kind", [RelishTrainer, Trainer])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base") / "llama"))


def test_text_and_token_columns_cached_or_not_give_one_loss(make):
    wanted = losses(make(num_train_epochs=2))
    assert len(set(wanted)) == 6
    longest = max(map(len, IDS))
    left = {"input_ids": [[7] * (longest - len(row)) + row for row in IDS], "labels": SCORES}
    left["attention_mask"] = [[0] * (longest - len(row)) + [1] * len(row) for row in IDS]
    as_list = [{"text": text, "score": score} for text, score in zip(TEXTS, SCORES, strict=True)]
    for rows in (ROWS, as_list, TOKENS, TOKENS.with_format("torch"), Dataset.from_dict(left)):
        for cache in (True, False):
            model = tiny_model(tiny_backbone("llama", dropout=0.5))  # which a frozen backbone does not do
            found = losses(make(model, rows, num_train_epochs=2, cache_features=cache))
            assert found == pytest.approx(wanted, abs=1e-5)


def test_group_by_length_and_a_collator_of_ones_own_train_and_answer_in_order(make):
    for kwargs in ({}, {"cache_features": False}, {"data_collator": DataCollatorWithPadding(PADDED)}):
        grouped = make(train_sampling_strategy="group_by_length", num_train_epochs=2, **kwargs)
        assert len(losses(grouped)) == 6
        expected = grouped.model.predict(TEXTS, TOKENIZER)
        assert grouped.predict(ROWS).predictions[:, 0] == pytest.approx(expected, abs=1e-5)


KINDS = [int, float, str, np.float64, np.int32, lambda v: torch.tensor(v, dtype=torch.bfloat16), lambda v: [v]]


@pytest.mark.parametrize("convert", KINDS)
def test_labels_of_any_numeric_kind_are_measured_alike(convert, make):
    values = [3, 1, 4, 1, 5, 9, 2, 6]
    own = make(None, [{"text": text, "label": convert(v)} for text, v in zip(TEXTS, values, strict=False)])
    config = own.model.config
    assert config.label_mean == pytest.approx([np.mean(values)], rel=1e-12)
    assert config.label_std == pytest.approx([np.std(values)], rel=1e-12)  # of the population
    assert config.label_range == [(1.0, 9.0)]
    model = tiny_model(label_mean=np.mean(values), label_std=np.std(values))
    assert losses(own) == pytest.approx([one_sgd_step(model, values)[0]], rel=1e-5)


def test_only_training_rows_are_measured_and_what_the_config_has_is_kept(make, caplog):
    config = make(None, ROWS.select(range(5)), eval_dataset=ROWS).model.config
    assert config.label_mean == pytest.approx([np.mean(SCORES[:5])])
    assert config.label_max == [max(SCORES[:5])]
    kept = make(tiny_model(label_mean=2.0, label_std=3.0, label_min=-1.0, label_max=10.0)).model.config
    assert (kept.label_mean, kept.label_std, kept.label_range) == ([2.0], [3.0], [(-1.0, 10.0)])
    raw = make(standardize_labels=False).model.config
    assert (raw.label_mean, raw.label_std, raw.label_max) == (None, None, [max(SCORES)])
    assert not caplog.records
    equal = make(None, rows_of([2.0, 2.0])).model.config
    assert (equal.label_mean, equal.label_std, equal.label_range) == ([2.0], [1.0], None)
    assert "all equal" in caplog.text


@pytest.mark.parametrize("bad", [math.nan, -math.inf, "good", "nan", "1,5", "", None, True, np.float32("inf")])
@pytest.mark.parametrize("where", ["train", "eval", "weight"])
def test_bad_label_or_weight_is_named_with_column_and_first_row(bad, where, make):
    rows = [{"text": text, "grade": 1.0 * i, "w": 1.0} for i, text in enumerate(TEXTS[:6])]
    column = "w" if where == "weight" else "grade"
    spoilt = [{**row, column: bad} if i in (2, 4) else row for i, row in enumerate(rows)]
    train = rows if where == "eval" else spoilt
    with pytest.raises(TableError, match=rf"row 3.*'{column}'"):
        make(None, train, eval_dataset=spoilt, label_columns=["grade"], weight_column="w")


TWO = [[1.0, 2.0]] * 3
WRONG = [(TWO, 1, 1, 2), ([1.0, 2.0], 3, 1, 1), ([*TWO, [5.0]], 2, 4, 1)]


@pytest.mark.parametrize(("labels", "K", "row", "got"), WRONG)
def test_wrong_number_of_targets_names_row_and_both_numbers(labels, K, row, got, make):
    with pytest.raises(TableError, match=rf"row {row}: {got} target.*num_labels={K}\b"):
        make(tiny_model(num_labels=K), rows_of(labels))


def test_what_is_missing_is_named(make, tmp_path):
    def refused(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            make(*args, **kwargs)

    refused(r"no label.*'label'.*\['text', 'grade'\].*label_columns", None, ROWS.rename_column("label", "grade"))
    refused(r"no label column \['grade'\].*\['text', 'label'\]", label_columns="grade")
    refused(r"no column \['title'\].*'\{title\}: \{text\}'.*", tiny_model(prompt_template="{title}: {text}"))
    refused(r"no weight column 'w'.*\['text', 'label'\]", weight_column="w")
    refused("no row", None, ROWS.select([]))
    refused("row 2.*no token", None, [{"input_ids": [5], "attention_mask": [i], "label": i} for i in (1, 0)])
    refused("processing_class", processing_class=None)
    refused("streamed rows", None, TOKENS.to_iterable_dataset())
    refused("streamed.*input_ids", tiny_model(**SCALE), ROWS.to_iterable_dataset(), max_steps=1)
    refused("got LlamaModel", tiny_backbone("llama"))
    with pytest.raises(ValueError, match="got TrainingArguments"):
        RelishTrainer(tiny_model(), TrainingArguments(output_dir=tmp_path))


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_weights_are_scaled_to_mean_one(factor, make):
    weights = np.array([1.0, 0.5, 0.0, 2.0, 4.0, 1.0, 0.0, 3.0])
    loss, expected = one_sgd_step(tiny_model(**SCALE), EIGHT, weights=weights / weights.mean())
    for split in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        own = make(tiny_model(**SCALE), rows_of(EIGHT, w=factor * weights), weight_column="w", **SGD, **split)
        assert losses(own) == pytest.approx([loss], rel=1e-5)
        close(head(own.model), expected, atol=1e-5)
    assert own.predict(ROWS).predictions.shape == (24, 1)  # new rows need no weight


def test_rows_of_weight_zero_do_not_matter_and_negative_ones_raise(make):
    def after(labels, weights, texts=TEXTS):
        own = make(tiny_model(**SCALE), rows_of(labels, texts, sample_weight=weights), **SGD)
        losses(own)
        return head(own.model)

    one = after(EIGHT[:6], [1, 1, 1, 1, 0, 0])
    close(one, after([*EIGHT[:4], 999.0, -999.0], [3, 3, 3, 3, 0, 0], [*TEXTS[:4], "quite another", "text"]), atol=1e-6)
    close(one, after(EIGHT[:4], [1, 1, 1, 1]), atol=1e-6)
    unscaled = make(tiny_model(), rows_of([*EIGHT[:4], 999.0, -999.0], sample_weight=[1, 1, 1, 1, 0, 0])).model.config
    measured = (unscaled.label_mean, unscaled.label_std, unscaled.label_min, unscaled.label_max)
    assert measured == ([np.mean(EIGHT[:4])], [np.std(EIGHT[:4])], [-100.0], [7.25])
    with pytest.raises(TableError, match=r"'sample_weight', row 2.*-0.5"):
        after(EIGHT[:3], [1.0, -0.5, -1.0])
    with pytest.raises(TableError, match="all zero"):
        after(EIGHT[:3], [0.0] * 3)


def test_labels_that_fp32_cannot_tell_apart_are_refused(make):
    with pytest.raises(TableError, match="around 1.7e\\+09 and differ by 2.29.*Subtract a constant"):
        make(tiny_model(), rows_of([1.7e9 + i for i in range(8)]))
    make(tiny_model(), rows_of([1000.0 + i for i in range(8)]))


def test_a_padding_token_without_an_embedding_is_refused_and_predict_needs_none(make):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model = tiny_model(**SCALE)
    assert tokenizer.pad_token_id >= model.config.vocab_size
    expected = model.predict(TEXTS[:5], TOKENIZER)
    np.testing.assert_allclose(model.predict(TEXTS[:5], tokenizer), expected, rtol=1e-6)
    with pytest.raises(TableError, match=r"'\[PAD\]' has the id \d+, and the backbone's vocabulary ends at 299"):
        make(model, processing_class=tokenizer)


def test_a_row_without_the_label_is_named(make):
    rows = [{"text": t, "label": 1.0 * i} for i, t in enumerate(TEXTS[:6])]
    del rows[3]["label"]
    with pytest.raises(TableError, match="row 4 of the data has no 'label'"):
        make(tiny_model(), rows)


def test_several_label_columns_are_several_targets_with_their_names(make):
    labels = np.array([[v**2 for v in EIGHT], EIGHT]).T
    rows = Dataset.from_dict({"text": TEXTS[:8], "valence": labels[:, 1], "arousal": labels[:, 0]})
    own = make(tiny_model(num_labels=2), rows, label_columns=["arousal", "valence"])
    config = own.model.config
    assert (config.id2label, config.label2id) == ({0: "arousal", 1: "valence"}, {"arousal": 0, "valence": 1})
    assert config.label_mean == pytest.approx(labels.mean(axis=0))
    assert config.label_std == pytest.approx(labels.std(axis=0))
    z = (own.model.predict(TEXTS[:8], TOKENIZER) - labels) / labels.std(axis=0)
    assert losses(own) == pytest.approx([float(penalty(z).mean())], rel=1e-5)


@BOTH
@pytest.mark.parametrize("objective", ["huber", "mse"])
@pytest.mark.parametrize("labels", [EIGHT, [int(v) for v in EIGHT]], ids=["float", "int"])
def test_accumulation_changes_neither_loss_nor_gradients(kind, labels, objective, make):
    loss, expected = one_sgd_step(tiny_model(**SCALE), labels, objective)
    rows = Dataset.from_dict({"input_ids": IDS[:8], "label": labels})
    for size, steps in ((8, 1), (2, 4)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        own = make(tiny_model(objective=objective, **SCALE), rows, kind, **SGD, **split)
        assert losses(own) == pytest.approx([loss], rel=1e-5)
        close(head(own.model), expected, atol=2e-5)


@BOTH
@pytest.mark.parametrize("K", [1, 2])
def test_predictions_are_a_plain_array_also_when_states_and_attentions_are_asked_for(kind, K, make):
    model = tiny_model(num_labels=K, label_mean=[2.0] * K, label_std=[3.0] * K)
    model.set_attn_implementation("eager")  # transformers lets attentions be asked for with this alone
    expected = model.predict(TEXTS, TOKENIZER).reshape(24, K)
    model.config.output_hidden_states = model.config.output_attentions = True
    labelled = TOKENS.remove_columns("label").add_column("labels", np.random.rand(24, K).tolist())
    own = make(model, labelled, kind, per_device_eval_batch_size=5)
    for rows in (labelled, labelled.remove_columns("labels")):
        found = own.predict(rows).predictions
        assert type(found) is np.ndarray
        assert found == pytest.approx(expected, abs=1e-5)


def test_reported_metrics_are_those_of_the_reloaded_model_in_label_units(make, base, tmp_path):
    labels = [100 + 40 * score for score in SCORES]
    rows = rows_of(labels)
    own = make(tiny_model(base), rows.select(range(16)), learning_rate=3e-3, per_device_eval_batch_size=3)
    own.train()
    reported = own.evaluate(rows.select(range(16, 24)))
    own.save_model(tmp_path / "saved")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    p, y = loaded.predict(TEXTS[16:], TOKENIZER).astype(np.float64), np.array(labels[16:])
    rmse = np.sqrt(np.mean((p - y) ** 2))
    assert rmse > 1  # in units, not in deviations
    expected = {"rmse": rmse, "nrmse": rmse / np.ptp(labels[:16]), "mae": np.abs(p - y).mean()}
    expected |= {"pearson": np.corrcoef(p, y)[0, 1], "spearman": stats.spearmanr(p, y).statistic}
    expected["loss"] = float(penalty((p - y) / np.std(labels[:16])).mean())
    found = {name: reported[f"eval_{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_other_eval_sets_dicts_and_rows_without_labels(make):
    parts = {"train": ROWS.select(range(9)), "b": ROWS.select(range(9, 24))}
    own = make(eval_dataset=parts)
    both = own.evaluate()
    for name, rows in parts.items():
        alone = own.evaluate(rows)
        for metric in ("loss", "pearson", "spearman", "nrmse", "rmse", "mae"):
            assert both[f"eval_{name}_{metric}"] == pytest.approx(alone[f"eval_{metric}"], rel=1e-5)
    new = own.predict(Dataset.from_dict({"text": TEXTS[5:8]}))
    assert new.label_ids is None
    assert new.predictions[:, 0] == pytest.approx(own.model.predict(TEXTS[5:8], TOKENIZER), abs=1e-5)
    assert not any("pearson" in name for name in new.metrics)


def test_constant_predictions_give_nan_with_one_warning_and_the_best_is_still_chosen(make, base):
    model = tiny_model(base)
    torch.nn.init.zeros_(model.score.regressor.weight)
    own = make(model, eval_dataset=ROWS, metric_for_best_model="pearson", learning_rate=0.0, **BEST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = own.evaluate()
    assert [w.category for w in caught] == [ConstantInputWarning]
    assert math.isnan(found["eval_pearson"])
    assert math.isnan(found["eval_spearman"])
    assert math.isfinite(found["eval_rmse"])
    with pytest.warns(ConstantInputWarning):
        assert len(losses(own)) == 9


SCRIPTS = [("pearson", [math.nan, 0.7, math.nan], 2), ("rmse", [5.0, 1.0, 3.0], 2), ("mae_1", [1.0, 2.0, 3.0], 1)]


@BOTH
@pytest.mark.parametrize(("name", "values", "best"), SCRIPTS)
def test_best_head_comes_back_exactly(kind, name, values, best, make, base, tmp_path, caplog):
    scripted = iter(values)
    kwargs = {"metric_for_best_model": name, "compute_metrics": lambda _: {name: next(scripted)}, **BEST}
    if kind is Trainer:
        kwargs["greater_is_better"] = name == "pearson"  # RelishTrainingArguments knows by itself
    own = make(tiny_model(base, **SCALE), TOKENS, kind, eval_dataset=TOKENS, **kwargs)
    own.train()
    saved = [load_file(tmp_path / "out" / f"checkpoint-{i}" / "model.safetensors") for i in (3, 6, 9)]
    assert [same(head(own.model), state) for state in saved] == [i == best for i in (1, 2, 3)]
    assert "keys" not in caplog.text


@BOTH
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_resumed_run_is_the_uninterrupted_one(kind, dropout, make, base, tmp_path, caplog):
    kwargs = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 3e-3}
    whole, other = (tiny_model(base, seed, head_dropout=dropout, **SCALE) for seed in (0, 1))
    expected = losses(make(whole, TOKENS, kind, **kwargs))
    again = make(other, TOKENS, kind, **kwargs)
    assert not same(head(other), head(whole))
    assert losses(again, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")) == expected
    assert same(head(other), head(whole))
    assert not any(p.requires_grad for p in other.backbone.parameters())
    assert same(tiny_backbone("llama").state_dict(), other.backbone.state_dict())
    assert not caplog.records


def test_unfrozen_backbone_is_trained_runs_without_cache_and_is_saved_whole(make, base, tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        make(tiny_model(base), freeze_backbone=False, cache_features=True)
    own = make(tiny_model(base), freeze_backbone=False, save_strategy="epoch")
    own.train()
    before = tiny_backbone("llama").state_dict()
    assert not any(torch.equal(p, before[n]) for n, p in own.model.backbone.named_parameters() if "layers" in n)
    assert not (tmp_path / "features").exists()
    saved = tmp_path / "out" / "checkpoint-3"
    assert json.loads((saved / "config.json").read_text())["backbone_in_checkpoint"] is True
    loaded = RelishForSequenceRegression.from_pretrained(saved, backbone_name_or_path=str(tmp_path / "nowhere"))
    assert (loaded.predict(TEXTS, TOKENIZER) == own.model.predict(TEXTS, TOKENIZER)).all()


def test_settings_of_the_objective_override_the_config(make):
    for objective, delta in ((None, None), ("mse", None), (None, 2.0)):
        model = tiny_model(huber_delta=0.5, **SCALE)
        z = (model.predict(TEXTS[:8], TOKENIZER) - EIGHT) / 3.0
        loss = penalty(z, objective or "huber", delta or 0.5).mean()
        found = losses(make(model, rows_of(EIGHT), objective=objective, huber_delta=delta))
        assert found == pytest.approx([float(loss)], rel=1e-5)
        assert (model.config.objective, model.config.huber_delta) == (objective or "huber", delta or 0.5)
    for bad in ({"objective": "hinge"}, {"huber_delta": 0.0}, {"huber_delta": math.nan}):
        with pytest.raises(RelishConfigError, match=next(iter(bad))):
            make(**bad)


@BOTH
def test_loss_falls(kind, make):
    model = tiny_model(label_mean=np.mean(SCORES), label_std=np.std(SCORES))
    found = losses(make(model, TOKENS, kind, num_train_epochs=40, learning_rate=3e-3))
    assert np.mean(found[-3:]) < 0.2 * np.mean(found[:3])
    assert np.corrcoef(model.predict(TEXTS, TOKENIZER), SCORES)[0, 1] > 0.9


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma3", "roberta"])
def test_without_pad_token_or_with_pad_equal_to_eos(kind, make, tmp_path):
    model = tiny_model(str(save_backbone(kind, tmp_path / "base")))
    size = model.get_input_embeddings().weight.shape
    own = make(model, processing_class=TOKENIZERS[kind]())
    assert all(map(math.isfinite, losses(own)))
    own.save_model(tmp_path / "saved")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    assert loaded.predict(TEXTS) == pytest.approx(own.predict(ROWS).predictions[:, 0], abs=1e-5)
    assert loaded.get_input_embeddings().weight.shape == size
