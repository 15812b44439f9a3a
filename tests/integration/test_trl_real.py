"""TRL itself on SmolLM2-135M: preferences made from rated tweets, and a policy that learns to please a sentiment regressor."""

import csv

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer

from modeling_relish import (
    RelishForSequenceRegression,
    RelishRewardTrainer,
    RelishTrainer,
    RelishTrainingArguments,
)

pytestmark = [
    pytest.mark.integration,
    # TRL itself asks for gradient checkpointing by a name that transformers is about to drop.
    pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing\w*. is deprecated:FutureWarning"),
]
FIXED = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "seed": 0,
}
PROMPTS = [
    "The film was", "My day at work was", "I think the food here is", "Honestly, the weather today is",
    "This new phone is", "The party last night was", "Our holiday was", "People say that my city is",
]  # fmt: skip
ROWS, HELD_OUT = 500, 120


@pytest.fixture(scope="module")
def rated(tweets):
    """Return training and held-out rows, drawn by a fixed seed."""
    with tweets.open(encoding="utf-8", newline="") as file:
        rows = [{"text": row["text"], "label": float(row["score"])} for row in csv.DictReader(file)]
    drawn = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[: ROWS + HELD_OUT]]
    return Dataset.from_list(drawn[:ROWS]), Dataset.from_list(drawn[ROWS:])


@pytest.fixture(scope="module")
def preferences(rated):
    """Return pairs of rows whose ratings are more than a point apart: the more positive text is chosen."""
    return tuple(Dataset.from_list(pairs_of(list(rows))) for rows in rated)


def pairs_of(rows):
    pairs = []
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        low, high = sorted((one, other), key=lambda row: row["label"])
        if high["label"] - low["label"] > 1:
            pairs.append({"chosen": high["text"], "rejected": low["text"]})
    return pairs


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


def fresh(smollm2):
    torch.manual_seed(0)
    return RelishForSequenceRegression.from_backbone(str(smollm2), backbone_layer=8, max_length=64, dtype=torch.float32)


def arguments(room, **options):
    return RelishTrainingArguments(
        str(room / "run"), features_dir=str(room / "features"), per_device_train_batch_size=16, learning_rate=1e-3,
        **FIXED, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def regressor(smollm2, rated, tokenizer, room):
    """Return the folder of a tweet-sentiment regressor, -4 to 4."""
    trainer = RelishTrainer(
        fresh(smollm2), arguments(room, num_train_epochs=5), train_dataset=rated[0], eval_dataset=rated[1],
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_pearson"] > 0.75
    trainer.save_model(str(room / "regressor"))
    return str(room / "regressor")


def test_a_reward_model_from_scratch_knows_the_more_positive_text(smollm2, preferences, tokenizer, room):
    trainer = RelishRewardTrainer(
        fresh(smollm2), arguments(room, num_train_epochs=5), train_dataset=preferences[0], eval_dataset=preferences[1],
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] > 0.8
    trainer.save_model(str(room / "from-scratch"))
    loaded = AutoModelForSequenceClassification.from_pretrained(room / "from-scratch")
    gap = loaded.predict(preferences[1]["chosen"]) - loaded.predict(preferences[1]["rejected"])
    assert (gap > 0).mean() == pytest.approx(metrics["eval_accuracy"], abs=0.02)  # the features were kept in bf16


@pytest.mark.parametrize("lora", [False, True])
def test_trl_trains_a_checkpoint_on_preferences(lora, smollm2, preferences, tokenizer, room):
    folder = str(room / "fresh")
    fresh(smollm2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["q_proj", "v_proj"])
    trainer = RewardTrainer(
        folder,
        RewardConfig(
            str(room / "out"), max_steps=12, per_device_train_batch_size=8, learning_rate=1e-3, bf16=False,
            gradient_checkpointing=False, max_length=64, **FIXED,
        ),
        train_dataset=preferences[0],
        eval_dataset=preferences[1],
        peft_config=config if lora else None,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accuracy"] > max(0.6, before["eval_accuracy"])


def policy_trainer(kind, config, smollm2, reward, room, **options):
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    args = config(
        str(room / "policy"), num_generations=8, per_device_train_batch_size=16, max_completion_length=8, bf16=False,
        gradient_checkpointing=False, lr_scheduler_type="constant", **FIXED, **options,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": PROMPTS * 8})
    return kind(str(smollm2), reward, args=args, train_dataset=prompts, peft_config=lora)


def test_a_policy_learns_what_the_sentiment_regressor_rewards(smollm2, regressor, room):
    trainer = policy_trainer(GRPOTrainer, GRPOConfig, smollm2, regressor, room, max_steps=12, learning_rate=2e-3)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 12
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.5  # on a scale from -4 to 4


def test_rloo_is_given_the_score_that_predict_gives(smollm2, regressor, room):
    texts = []

    def watch(prompts, completions, **_):
        texts.extend(prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    options = {"max_steps": 1, "learning_rate": 1e-3, "reward_weights": [1.0, 0.0]}
    trainer = policy_trainer(RLOOTrainer, RLOOConfig, smollm2, [regressor, watch], room, **options)
    trainer.train()
    expected = AutoModelForSequenceClassification.from_pretrained(regressor).predict(texts)
    logged = trainer.state.log_history[0]
    assert logged["rewards/regressor/mean"] == pytest.approx(float(expected.mean()), abs=1e-3)
    assert logged["rewards/regressor/std"] == pytest.approx(float(expected.std(ddof=1)), abs=1e-3)
