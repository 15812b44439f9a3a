"""Heads over a language model's distribution, from the outside: losses in numpy, logits of the model itself, files on disk."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from language_models import TEMPLATE, brute_force, grid_model, padded, prompts, save_tiny_llama, tiny_language_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import SCORES, TEXTS, TOKENIZERS, tiny_backbone
from training import make_trainer, rows_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.utils import logging

from modeling_relish import RelishConfig, RelishForSequenceRegression, regression_metrics
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.configuration_checks_relish import RelishConfigError
from modeling_relish.number_grid_relish import NumberGrid, NumberGridError
from modeling_relish.objectives_relish import LabelError, grid_loss, nearest_number

pytestmark = pytest.mark.usefixtures("workbench")

TOKENIZER = TOKENIZERS["llama"]()
TENTHS = NumberGrid.between(0, 5, 0.5)
OBJECTIVES = ["raft", "mse", "huber", "mbr", "cross_entropy"]


@pytest.fixture
def base(tmp_path):
    """Return the folder of a tiny Llama with its output layer, and a tokenizer."""
    return save_tiny_llama(tmp_path / "base")


# ------------------------------------------------------------------ losses


def loss_in_numpy(log_probs, values, targets, objective, scale=1.0, delta=1.0, normalize=False, weights=None):
    log_probs, values = log_probs.double().numpy(), values.double().numpy()
    p = np.exp(log_probs)
    if normalize:
        p = p / p.sum(1, keepdims=True)
    rows = []
    for row, y in zip(p, targets.double().numpy().reshape(-1), strict=True):
        error = (y - row @ values) / scale
        if objective in ("raft", "mse"):
            rows.append(error**2)
        elif objective == "huber":
            rows.append(error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2))
        elif objective == "mbr":
            rows.append((row * ((y - values) / scale) ** 2).sum())
        else:
            nearest = min(range(len(values)), key=lambda g: (abs(y - values[g]), values[g]))
            rows.append(-math.log(row[nearest]))
    return np.mean(rows if weights is None else np.array(rows) * weights.double().numpy().reshape(-1))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_are_those_of_numpy_in_fp64(objective, normalize):
    if objective == "mbr" and not normalize:
        with pytest.raises(ValueError, match="mbr' *.*normalize=False"):
            grid_loss(torch.zeros(1, 2), torch.ones(2), torch.ones(1, 1), objective)
        return
    log_probs = torch.randn(6, 4).mul(3).log_softmax(1) - torch.rand(6, 1)
    values = torch.tensor([3.0, -1.0, 0.5, 10.0])  # in no order
    targets = torch.tensor([[1.75], [-0.25], [6.5], [3.0], [-100.0], [99.0]])  # the first three lie between two of them
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 3.0])
    for scale, delta, w in ((1.0, 1.0, None), (2.5, 0.3, weights), (0.1, 2.0, weights[:, None])):
        expected = loss_in_numpy(log_probs, values, targets, objective, scale, delta, normalize, w)
        found = grid_loss(
            log_probs, values, targets, objective, scale=scale, huber_delta=delta, normalize=normalize, sample_weight=w
        )
        assert (found.dtype, found.shape) == (torch.float32, ())
        assert float(found) == pytest.approx(expected, rel=2e-6)


def test_of_two_numbers_as_near_the_lower_is_learned():
    log_probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    for values, y, index in (
        ([1, 2, 3, 4], 2.5, 1),
        ([4, 3, 2, 1], 2.5, 2),
        ([1, 2, 3, 4], -7, 0),
        ([4, 3, 2, 1], 9, 0),
    ):
        found = grid_loss(log_probs, torch.tensor(values).float(), torch.tensor([[y]]), "cross_entropy")
        assert float(found) == pytest.approx(-math.log([0.1, 0.2, 0.3, 0.4][index]))


def test_unknown_objective_is_named():
    with pytest.raises(ValueError, match="'hinge'"):
        grid_loss(torch.zeros(1, 2), torch.ones(2), torch.ones(1, 1), "hinge")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_model_hands_labels_scale_and_weights_to_the_loss(objective):
    settings = {"objective": objective, "huber_delta": 0.4, "label_mean": 50.0, "label_std": 1.7}
    model = grid_model(grid=TENTHS, normalize_grid=objective == "mbr", **settings)
    ids, mask = padded(prompts(TOKENIZER, TEXTS[:4]))
    weights = torch.tensor([1.0, 0.0, 3.0, 0.5])
    out = model(input_ids=ids, attention_mask=mask)
    assert (out.loss, out.logits.shape, out.logits.dtype, out.log_probs.shape) == (None, (4, 1), torch.float32, (4, 11))
    y = torch.tensor([3, 1, 0, 5])
    expected = loss_in_numpy(
        out.log_probs, torch.tensor(TENTHS.values), y, objective, 1.7, 0.4, objective == "mbr", weights
    )
    kinds = [y, y[:, None], y.double(), y.bfloat16(), y.to(torch.int32)[:, None]]
    found = [model(input_ids=ids, attention_mask=mask, labels=k, sample_weight=weights).loss for k in kinds]
    assert float(found[0]) == pytest.approx(expected, rel=1e-5)
    assert len({float(f) for f in found}) == 1
    loss, logits, log_probs = model(input_ids=ids, attention_mask=mask, labels=y, return_dict=False)
    assert (loss.shape, logits.shape, log_probs.shape) == ((), (4, 1), (4, 11))
    one = model(input_ids=ids[:1], attention_mask=mask[:1], labels=y[:1]).loss
    assert float(one) == float(model(input_ids=ids[:1], attention_mask=mask[:1], labels=y[:1, None]).loss)
    for bad in (y[:3], torch.zeros(4, 2), torch.tensor([1.0, math.nan, 1.0, 1.0])):
        with pytest.raises(LabelError):
            model(input_ids=ids, attention_mask=mask, labels=bad)


# ------------------------------------------------------------------ the number_grid head


def test_predict_pipelines_and_metrics_say_one_number(base, tmp_path):
    model = RelishForSequenceRegression.from_backbone(
        base, head_type="number_grid", number_grid=[1, 2, 3, 4, 5], prompt_template=TEMPLATE
    )
    expected = model.predict(TEXTS, batch_size=5)
    with torch.no_grad():
        log_probs = brute_force(model.backbone, prompts(TOKENIZER), model.score.trie.sequences)
    wanted = (log_probs.exp() @ torch.arange(1.0, 6).double()).numpy()
    assert expected.shape == (24,)
    assert expected == pytest.approx(wanted, rel=1e-4)
    model.save_pretrained(tmp_path / "saved")
    TOKENIZER.save_pretrained(tmp_path / "saved")
    for task in ("text-regression", "text-classification"):
        scores = [found["score"] for found in pipeline(task, model=str(tmp_path / "saved"))(TEXTS)]
        assert scores == pytest.approx(expected, rel=1e-5)
    own = make_trainer(tmp_path, grid_model(learn_values=True, label_min=0.0, label_max=5.0), rows_of(SCORES))
    found = own.evaluate(rows_of(SCORES))
    metrics = regression_metrics(own.model.predict(TEXTS, TOKENIZER), np.array(SCORES), label_range=[(0.0, 5.0)])
    for name in ("pearson", "spearman", "nrmse", "rmse", "mae"):
        assert found[f"eval_{name}"] == pytest.approx(metrics[name], rel=1e-4)


@pytest.mark.parametrize("values", [[5, 1, 3, 2, 4], [i / 10 for i in range(51)], [i / 100 for i in range(100)]])
def test_the_lower_of_two_numbers_as_near_is_the_nearest_in_decimals(values):
    """The oracle counts in thousandths: 0.25 lies as far from 0.2 as from 0.3, in fp32 it does not."""
    labels = [i / 1000 for i in range(-100, 5200, 5)] + [0.123456, 1e6]
    exact = [Fraction(str(v)) for v in values]
    wanted = [min(exact, key=lambda v, y=Fraction(str(y)): (abs(y - v), v)) for y in labels]
    found = nearest_number(torch.tensor(values), torch.tensor(labels)[:, None])
    assert [exact[i] for i in found[:, 0].tolist()] == wanted


def test_small_numbers_beside_huge_ones_keep_their_own_nearest():
    values, labels = torch.tensor([0, 1e-3, 1, 1e6]), torch.tensor([[1e-3], [4e-4], [0.5005], [7e5]])
    assert nearest_number(values, labels)[:, 0].tolist() == [1, 0, 1, 3]


@pytest.mark.parametrize("learn_values", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])  # the last two share embedding and output layer
def test_saved_head_and_saved_whole_come_back_to_the_bit(kind, learn_values, tmp_path):
    tiny_language_model(kind).save_pretrained(tmp_path / "base")
    TOKENIZERS[kind]().save_pretrained(tmp_path / "base")
    model = RelishForSequenceRegression.from_backbone(
        str(tmp_path / "base"), head_type="number_grid", number_grid=TENTHS, prompt_template=TEMPLATE,
        learn_values=learn_values, normalize_grid=True,
    )  # fmt: skip
    if learn_values:
        model.score.values.data.add_(torch.rand(11))
    expected = model.predict(TEXTS)
    model.save_pretrained(tmp_path / "head")
    model.save_pretrained(tmp_path / "whole", save_backbone=True)
    assert load_file(tmp_path / "head" / "model.safetensors").keys() == {"score.values"}
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["number_grid"]["strings"] == list(TENTHS.strings)
    loaders = [RelishForSequenceRegression, AutoModelForSequenceClassification]
    for folder in ("head", "whole"):
        for loader in loaders:
            loaded = loader.from_pretrained(tmp_path / folder)
            assert type(loaded) is RelishForSequenceRegression
            assert (loaded.predict(TEXTS, TOKENIZERS[kind]()) == expected).all()
            assert torch.equal(loaded.score.values, model.score.values)
            for name, tensor in model.backbone.state_dict().items():
                assert torch.equal(loaded.backbone.state_dict()[name], tensor)
    shared = RelishForSequenceRegression.from_pretrained(tmp_path / "head", backbone=model.backbone)
    assert shared.backbone.get_input_embeddings().weight is model.backbone.get_input_embeddings().weight
    assert (shared.predict(TEXTS, TOKENIZERS[kind]()) == expected).all()
    with pytest.raises(BackboneError, match="output layer"):
        RelishForSequenceRegression.from_pretrained(tmp_path / "head", backbone=tiny_backbone(kind))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # is what it was
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.backbone.state_dict().items())


def test_trained_backbone_is_saved_whole(base, tmp_path):
    model = grid_model(AutoModelForCausalLM.from_pretrained(base), objective="raft")
    own = make_trainer(tmp_path, model, rows_of(SCORES), freeze_backbone=False, learning_rate=1e-3)
    own.train()
    own.save_model(tmp_path / "saved")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    assert (loaded.predict(TEXTS, TOKENIZER) == model.predict(TEXTS, TOKENIZER)).all()
    assert not (loaded.predict(TEXTS, TOKENIZER) == grid_model().predict(TEXTS, TOKENIZER)).any()


def test_values_are_learned_over_a_frozen_backbone_and_nothing_else(base, tmp_path):
    model = grid_model(AutoModelForCausalLM.from_pretrained(base), learn_values=True, normalize_grid=True)
    before = {n: t.clone() for n, t in model.backbone.state_dict().items()}
    start = model.predict(TEXTS[:8], TOKENIZER)
    labels = [10.0 + s for s in SCORES[:8]]
    std = float(np.std(labels))
    own = make_trainer(tmp_path, model, rows_of(labels), objective="raft", optim="sgd", lr_scheduler_type="constant",
                       learning_rate=0.5, max_grad_norm=0.0)  # fmt: skip
    with torch.no_grad():
        p = torch.softmax(
            model(
                **dict(zip(("input_ids", "attention_mask"), padded(prompts(TOKENIZER, TEXTS[:8])), strict=True))
            ).log_probs,
            1,
        )
    own.train()
    gradient = (2 / std**2 * (torch.tensor(start) - torch.tensor(labels))[:, None].double() * p.double()).mean(0)
    torch.testing.assert_close(
        model.score.values.data.double(), torch.arange(1.0, 6).double() - 0.5 * gradient, atol=1e-4, rtol=0
    )
    assert all(torch.equal(t, before[n]) for n, t in model.backbone.state_dict().items())
    own.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["backbone_in_checkpoint"] is False
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert (loaded.predict(TEXTS, TOKENIZER) == model.predict(TEXTS, TOKENIZER)).all()


def test_what_cannot_be_trained_or_asked_is_named(tmp_path):
    def refused(match, error, make, *args, **kwargs):
        with pytest.raises(error, match=match):
            make(*args, **kwargs)

    refused("nothing would be trained", RelishConfigError, make_trainer, tmp_path, grid_model())
    refused("cache_features", ValueError, make_trainer, tmp_path, grid_model(learn_values=True), cache_features=True)
    refused("needs number_grid", RelishConfigError, grid_model, grid=None)
    unresolved = {"head_type": "number_grid", "number_grid": {"values": [1, 2]}}
    config = RelishConfig(backbone_config=tiny_language_model("llama").config, **unresolved)
    refused("no tokens yet", RelishConfigError, RelishForSequenceRegression, config)
    refused("brings no tokenizer.*tokenizer=", BackboneError, grid_model, tokenizer=None)
    refused("ends in a field", ValueError, grid_model, prompt_template="{text}")
    refused("one number.*nothing would be learned", RelishConfigError, grid_model, grid=[5], normalize_grid=True)
    refused("num_labels=2", RelishConfigError, grid_model, num_labels=2)
    refused("backbone_layer=None", ValueError, grid_model, backbone_layer=2)
    refused("normalize_grid=True", RelishConfigError, grid_model, objective="mbr")
    refused(
        "token 300.*resize_token_embeddings",
        RelishConfigError,
        grid_model,
        grid=NumberGrid((1, 2), tokens=((3,), (300,))),
    )
    for objective in ("raft", "mbr", "cross_entropy"):
        refused(
            objective,
            RelishConfigError,
            RelishForSequenceRegression.from_backbone,
            tiny_backbone("llama"),
            objective=objective,
        )
        refused(objective, RelishConfigError, make_trainer, tmp_path, objective=objective)
    embeddings = torch.zeros(1, 3, 32)
    for given in ({"inputs_embeds": embeddings}, {"hidden_states": embeddings}, {}):
        refused("input_ids", ValueError, grid_model(), **given)
    refused("refinement steps", ValueError, grid_model().predict_each_step, *padded([[1, 2]]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_numbers_of_new_tokens_are_saved_with_their_untrained_rows(base, tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<bad>", "<good>"])
    language_model = AutoModelForCausalLM.from_pretrained(base)
    language_model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    settings = {"grid": {"<bad>": 1, "<good>": 5}, "tokenizer": tokenizer}
    model = grid_model(language_model, **settings)
    expected = model.predict(TEXTS[:4], tokenizer)
    model.save_pretrained(tmp_path / "out")
    again = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert np.array_equal(again.predict(TEXTS[:4], tokenizer), expected)
    with pytest.raises(NumberGridError, match="another tokenizer"):
        again.predict(TEXTS[:1], TOKENIZERS["gpt2"]())
    for task in ("text-regression", "text-classification"):
        with pytest.raises(NumberGridError, match="another tokenizer"):
            pipeline(task, model=again, tokenizer=TOKENIZERS["gpt2"]())(TEXTS[0])
    plain = grid_model(AutoModelForCausalLM.from_pretrained(base))
    assert (model.config.backbone_name_or_path, plain.config.backbone_name_or_path) == (None, base)
    tuned = get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"], task_type="SEQ_CLS"))
    logging.enable_propagation()
    tuned.base_model.model.save_pretrained(tmp_path / "adapter")
    logging.disable_propagation()
    assert "weights are not saved with the adapter" in caplog.text


def test_longest_prompt_leaves_room_for_the_numbers(tmp_path):
    grid = NumberGrid.words({"bad and terrible": 1, "good": 2})
    model = grid_model(tiny_language_model("gpt2"), grid, "gpt2", max_length=1024)
    longest = max(map(len, model.config.number_grid["tokens"]))
    assert (model.config.max_length, longest > 3) == (128 - longest + 1, True)
    found = model.predict([" ".join(TEXTS), TEXTS[0]], TOKENIZERS["gpt2"]())  # GPT-2 has no position beyond its last
    assert np.isfinite(found).all()
