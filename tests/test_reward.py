"""Training on preference pairs; several targets as one reward; rewards through the model's own template."""

import itertools
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from preference_pairs import CHATS, CHATTY, STRINGS, WHOLE_STRINGS, say, with_margin
from tiny import PAIRS, TEXTS, save_backbone
from training import SGD, TOKENIZER, head, losses, make_trainer, same, tiny_model
from transformers import AutoModelForSequenceClassification

from modeling_relish import RelishRewardTrainer, as_reward_model
from modeling_relish.reward import RewardModelError, reward_function
from modeling_relish.tables import TableError
from modeling_relish.text_relish import TextTooLongError

pytestmark = pytest.mark.usefixtures("workbench")

CHOSEN, REJECTED = zip(*PAIRS, strict=True)


def pair_trainer(folder, model=None, pairs=WHOLE_STRINGS, **kwargs):
    return make_trainer(folder, model, pairs, RelishRewardTrainer, **{"processing_class": CHATTY, **kwargs})


def rewards_by_hand(model, texts):
    """Return (N,) rewards, each text run alone, with gradient."""
    return torch.cat([model(input_ids=torch.tensor([TOKENIZER(text)["input_ids"]])).logits[0] for text in texts])


def loss_by_hand(model, margin=0.0):
    return -F.logsigmoid(
        rewards_by_hand(model, CHOSEN) - rewards_by_hand(model, REJECTED) - torch.tensor(margin)
    ).mean()


# ---------------------------------------------------------------------- training on pairs


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("margin", [False, True])
def test_a_step_is_a_step_on_the_bradley_terry_loss(margin, cached, tmp_path):
    pairs = with_margin(WHOLE_STRINGS) if margin else WHOLE_STRINGS
    loss = loss_by_hand(model := tiny_model(), pairs["margin"] if margin else 0.0)
    parameters = dict(model.score.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    trainer = pair_trainer(
        tmp_path, tiny_model(), pairs, cache_features=cached, per_device_train_batch_size=len(pairs), **SGD
    )
    assert losses(trainer) == [pytest.approx(float(loss.detach()), abs=1e-5)]
    for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(head(trainer.model)[f"score.{name}"], p.detach() - 0.1 * gradient, atol=1e-5, rtol=0)


def test_pairs_are_learned_and_the_result_is_an_ordinary_checkpoint(tmp_path):
    base = str(save_backbone("llama", tmp_path / "base", tokenizer=CHATTY))
    trainer = pair_trainer(
        tmp_path, tiny_model(base), eval_dataset=WHOLE_STRINGS, num_train_epochs=30, learning_rate=3e-3,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="accuracy", greater_is_better=True,
    )  # fmt: skip
    start = trainer.evaluate()
    trainer.train()
    metrics = trainer.evaluate()
    assert start["eval_accuracy"] < 0.9 < metrics["eval_accuracy"]
    assert metrics["eval_loss"] < start["eval_loss"]

    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 100_000  # the head alone
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert (loaded.config.label_mean, loaded.config.label_std) == ([0.0], [1.0])
    assert loaded.config.num_labels == 1
    chosen, rejected = loaded.predict(list(CHOSEN)), loaded.predict(list(REJECTED))
    assert chosen.tolist() == trainer.model.predict(list(CHOSEN)).tolist()
    assert metrics["eval_accuracy"] == pytest.approx((chosen > rejected).mean())
    assert metrics["eval_margin"] == pytest.approx((chosen - rejected).mean(), abs=1e-4)
    assert metrics["eval_mean_reward"] == pytest.approx(np.concatenate([chosen, rejected]).mean(), abs=1e-4)
    predictions = trainer.predict(WHOLE_STRINGS).predictions
    np.testing.assert_allclose(predictions, np.stack([chosen, rejected], 1), atol=1e-5)


@pytest.mark.parametrize("size", [5, 8])
def test_evaluation_is_the_mean_over_pairs_whatever_the_batch(size, tmp_path):
    pairs = with_margin(WHOLE_STRINGS, start=-1.0)
    trainer = pair_trainer(tmp_path, tiny_model(), pairs, eval_dataset=pairs, per_device_eval_batch_size=size)
    with torch.no_grad():
        expected = loss_by_hand(trainer.model.eval(), pairs["margin"])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), abs=1e-5)


def test_a_frozen_backbone_runs_once_per_text(tmp_path):
    # Seven texts in six pairs.
    pairs = Dataset.from_list([{"chosen": a, "rejected": b} for a, b in itertools.pairwise(TEXTS[:7])])
    model, rows = tiny_model(), []
    model.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer = pair_trainer(tmp_path, model, pairs, num_train_epochs=3, eval_dataset=pairs)
    trainer.train()
    trainer.evaluate()
    assert sum(rows) == 7
    assert not any(p.requires_grad for p in trainer.model.backbone.parameters())


def test_a_backbone_that_learns_sees_tokens(tmp_path):
    trainer = pair_trainer(tmp_path, tiny_model(), freeze_backbone=False, per_device_train_batch_size=12, **SGD)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    assert losses(trainer) == [pytest.approx(float(loss_by_hand(tiny_model()).detach()), abs=1e-5)]
    assert not torch.equal(trainer.model.get_input_embeddings().weight, before)


def test_a_label_scale_that_is_there_stays(tmp_path):
    trainer = pair_trainer(tmp_path, tiny_model(label_mean=3.0, label_std=2.0))
    assert (trainer.model.config.label_mean, trainer.model.config.label_std) == ([3.0], [2.0])


def test_groups_by_length_and_still_answers_in_order(tmp_path):
    trainer = pair_trainer(
        tmp_path, tiny_model(), train_sampling_strategy="group_by_length", per_device_eval_batch_size=5
    )
    assert len(losses(trainer)) == 2
    expected = np.stack([trainer.model.predict(list(texts), CHATTY) for texts in (CHOSEN, REJECTED)], 1)
    np.testing.assert_allclose(trainer.predict(WHOLE_STRINGS).predictions, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("template", "pairs", "expected"),
    [
        ("{text}", STRINGS, "How was it? {}"),
        ("Rate: {review}\nScore:", STRINGS, "Rate: How was it? {}\nScore:"),
        ("Q: {prompt}\nA: {completion}\nScore:", STRINGS, "Q: How was it? \nA: {}\nScore:"),
        ("Rate: {text}\nScore:", CHATS, "Rate: user: How was it?\nassistant: {}\n\nScore:"),
        ("A: {completion}", CHATS, "A: assistant: {}\n"),
    ],
)
def test_the_text_goes_through_the_models_template(template, pairs, expected, tmp_path):
    trainer = pair_trainer(tmp_path, tiny_model(prompt_template=template), pairs)
    texts = [[expected.format(text) for text in side] for side in (CHOSEN, REJECTED)]
    plain = tiny_model()
    rewards = np.stack([plain.predict(side, TOKENIZER) for side in texts], 1)  # which puts one BOS in front
    np.testing.assert_allclose(trainer.predict(pairs).predictions, rewards, atol=1e-5)


def test_pairs_of_tokens_need_no_tokenizer(tmp_path):
    ids = [{f"{s}_ids": TOKENIZER(row[s])["input_ids"] for s in ("chosen", "rejected")} for row in WHOLE_STRINGS]
    predictions = [
        pair_trainer(tmp_path, tiny_model(), pairs, processing_class=tokenizer).predict(pairs).predictions
        for pairs, tokenizer in ((Dataset.from_list(ids), None), (WHOLE_STRINGS, CHATTY))
    ]
    np.testing.assert_allclose(*predictions, atol=1e-6)


def test_a_pair_that_is_too_long_is_left_out_and_said(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    lengths = [max(len(TOKENIZER(text)["input_ids"]) for text in pair) for pair in PAIRS]
    limit = sorted(lengths)[-3]
    kept = WHOLE_STRINGS.select([i for i, length in enumerate(lengths) if length <= limit])
    assert 0 < len(kept) < len(PAIRS)
    trainer = pair_trainer(tmp_path, tiny_model(max_length=limit))
    assert f"{len(PAIRS) - len(kept)} of {len(PAIRS)} pairs" in caplog.text
    assert len(trainer.train_dataset) == len(kept)
    assert trainer.predict(kept).predictions.shape == (len(kept), 2)
    with pytest.raises(TextTooLongError, match=f"only {len(kept)} of the {len(PAIRS)}"):
        trainer.predict(WHOLE_STRINGS)
    with pytest.raises(TextTooLongError, match="every pair"):
        pair_trainer(tmp_path, tiny_model(max_length=2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "label": 1.0}], "'chosen', row 1.*NoneType.*label"),
        ([{"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": None}], "'rejected', row 2"),
        ([{"chosen": "a", "rejected": 3}], "'rejected', row 1.*int"),
        ([{"prompt": say("a", "user"), "chosen": "a", "rejected": "b"}], "row 1: the prompt is a conversation"),
        ([{"prompt": 7, "chosen": "a", "rejected": "b"}], "'prompt', row 1.*int"),
        ([{"chosen": "a", "rejected": "b", "margin": float("nan")}], "margin"),
        ([{"chosen": "a", "rejected": "b", "margin": 1.0}, {"chosen": "a", "rejected": "b", "margin": None}], "row 2.*margin"),
        ([{"chosen_ids": [], "rejected_ids": [1]}], "'chosen', row 1: the text has no token"),
        ([], "no row"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pairs_are_named(rows, message, tmp_path):
    with pytest.raises(TableError, match=message):
        pair_trainer(tmp_path, tiny_model(), rows)


def test_what_does_not_apply_is_refused(tmp_path):
    with pytest.raises(RewardModelError, match="as_reward_model"):
        pair_trainer(tmp_path, tiny_model(num_labels=2))
    with pytest.raises(ValueError, match="weight_column"):
        pair_trainer(tmp_path, tiny_model(), weight_column="w")
    with pytest.raises(TableError, match="streamed"):
        pair_trainer(tmp_path, tiny_model(), WHOLE_STRINGS.to_iterable_dataset(), max_steps=1)
    with pytest.raises(ValueError, match="processing_class"):
        pair_trainer(tmp_path, tiny_model(), processing_class=None)


# ---------------------------------------------------------------------- several targets as one reward

SCALES = {"label_mean": [3.0, 50.0, 0.1], "label_std": [1.0, 20.0, 0.01]}
NAMES = {"id2label": {0: "helpful", 1: "brief", 2: "polite"}, "num_labels": 3}
WEIGHTS = [1.0, -0.02, 30.0]


@pytest.mark.parametrize("scales", [SCALES, {}], ids=["scaled", "raw"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"regressor": "mlp"}, {"head_type": "linear"}, {"head_type": "mlp"}],
    ids=lambda settings: "-".join(settings.values()) or "relish",
)
def test_one_reward_is_the_weighted_sum_also_when_it_comes_back(settings, scales, tmp_path):
    base = str(save_backbone("llama", tmp_path / "base", tokenizer=CHATTY))
    model = tiny_model(base, **settings, **NAMES, **scales)
    before = head(model)
    expected = model.predict(TEXTS, CHATTY).astype(np.float64) @ WEIGHTS
    reward = as_reward_model(model, WEIGHTS)
    assert reward.config.num_labels == 1
    assert reward.config.target_names == ["1*helpful + -0.02*brief + 30*polite"]
    np.testing.assert_allclose(reward.predict(TEXTS, CHATTY), expected, atol=1e-5 * expected.std() + 1e-5)
    assert same(head(model), before)
    assert reward.backbone is model.backbone

    reward.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 100_000
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", num_labels=1)  # as TRL does
    assert loaded.predict(TEXTS, CHATTY).tolist() == reward.predict(TEXTS, CHATTY).tolist()
    assert len(losses(pair_trainer(tmp_path, loaded))) == 2


def test_scale_and_range_follow_from_the_targets():
    model = tiny_model(**NAMES, **SCALES, label_min=[1, 0, 0], label_max=[5, 100, 1])
    config = as_reward_model(model, {"helpful": 2.0, "brief": -0.1}).config
    assert config.label_mean == [pytest.approx(2 * 3.0 - 0.1 * 50)]
    assert config.label_std == [pytest.approx((2.0**2 + 2.0**2) ** 0.5)]
    assert config.label_range == [(pytest.approx(2 - 10), pytest.approx(10 - 0))]


def test_a_backbone_that_was_trained_is_saved_with_the_reward(tmp_path):
    model = tiny_model(**NAMES).unfreeze_backbone()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    reward = as_reward_model(model.eval(), WEIGHTS)
    reward.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    np.testing.assert_allclose(loaded.predict(TEXTS, CHATTY), reward.predict(TEXTS, CHATTY), rtol=1e-5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "2 weight"),
        ([0.0, 0.0, 0.0], "not all 0"),
        ([1.0, float("nan"), 1.0], "finite"),
        ({"helpfull": 1.0}, "helpfull.*helpful"),
    ],
)
def test_weights_that_make_no_reward_are_refused(weights, message):
    with pytest.raises(RewardModelError, match=message):
        as_reward_model(tiny_model(**NAMES), weights)


def test_only_a_relish_model_is_folded():
    with pytest.raises(RewardModelError, match="LlamaModel"):
        as_reward_model(tiny_model().backbone, [1.0])


# ---------------------------------------------------------------------- through the model's own template


def test_reward_function_asks_as_the_model_was_trained():
    model = tiny_model(prompt_template="Rate: {text}\nScore:")
    prompts, completions = list(CHOSEN[:3]), [" " + text for text in REJECTED[:3]]
    expected = model.predict([p + c for p, c in zip(prompts, completions, strict=True)], CHATTY)
    assert (
        reward_function(model, CHATTY)(prompts=prompts, completions=completions, other=[1, 2, 3]) == expected.tolist()
    )
    chats = [say(p, "user") for p in prompts], [say(c) for c in completions]
    alone = reward_function(model, CHATTY, row=lambda _, completion: completion[-1]["content"])
    assert alone(*chats) == model.predict(completions, CHATTY).tolist()
    together = model.predict([p + c for p, c in zip(*chats, strict=True)], CHATTY)
    assert reward_function(model, CHATTY)(*chats) == together.tolist()
    apart = tiny_model(prompt_template="Q: {prompt}\nA: {completion}")
    rows = [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]
    assert reward_function(apart, CHATTY)(prompts, completions) == apart.predict(rows, CHATTY).tolist()
    with pytest.raises(RewardModelError, match="as_reward_model"):
        reward_function(tiny_model(num_labels=2))
