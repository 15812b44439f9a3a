"""A RELISH checkpoint as TRL's reward model: RewardTrainer, GRPOTrainer and RLOOTrainer themselves, by object and by path."""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from preference_pairs import CHATS, CHATTY, PLAIN, STRINGS, WHOLE_CHATS, WHOLE_STRINGS, checkpoint, say, with_margin
from tiny import PAIRS, TEXTS, tiny_backbone
from training import SGD, head, make_trainer, same, tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer, apply_chat_template

from modeling_relish import RelishForSequenceRegression, RelishRewardTrainer, as_reward_model
from modeling_relish.configuration_relish import RelishConfigError
from modeling_relish.preferences import preference_ids

# TRL itself asks for gradient checkpointing by a name that transformers is about to drop.
pytestmark = [
    pytest.mark.usefixtures("workbench"),
    pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing\w*. is deprecated:FutureWarning"),
]
load = AutoModelForSequenceClassification.from_pretrained
FIXED = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}


def reward_trainer(model, pairs, folder, processing_class=None, peft_config=None, eval_dataset=None, **options):
    options = {"bf16": False, "max_steps": 1, "per_device_train_batch_size": len(pairs), **options}
    args = RewardConfig(str(folder / "out"), **FIXED, **options)
    return RewardTrainer(
        model, args, train_dataset=pairs, processing_class=processing_class, peft_config=peft_config,
        eval_dataset=eval_dataset,
    )  # fmt: skip


def of_relish(model) -> RelishForSequenceRegression:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ---------------------------------------------------------------------- RewardTrainer


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("given", ["object", "path", "peft"])
def test_reward_trainer_trains_on_preferences(given, margin, tmp_path):
    folder = checkpoint(tmp_path)
    pairs = with_margin(WHOLE_STRINGS) if margin else WHOLE_STRINGS
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"]) if given == "peft" else None
    trainer = reward_trainer(load(folder) if given == "object" else folder, pairs, tmp_path, peft_config=lora)
    relish = of_relish(trainer.model)
    before = {name: p.detach().clone() for name, p in relish.named_parameters()}
    seen = []
    relish.backbone.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    trainer.train()

    assert len(seen) == 1
    args, kwargs = seen[0]
    assert not args
    assert kwargs["use_cache"] is False
    assert "margin" not in kwargs
    expected = load(folder)
    eos = CHATTY.eos_token  # which TRL puts behind plain texts
    gap = torch.tensor([expected.predict([a + eos])[0] - expected.predict([b + eos])[0] for a, b in PAIRS])
    loss = -F.logsigmoid(gap - torch.tensor(pairs["margin"] if margin else 0.0)).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss), abs=1e-5)
    changed = {name for name, p in relish.named_parameters() if not torch.equal(p, before[name])}
    assert {name.partition(".")[0] for name in changed} == ({"backbone", "score"} if given == "peft" else {"score"})
    assert all("lora_" in name or name.startswith("score.") for name in changed)


def test_what_trl_writes_to_the_config_is_seen_at_the_top_and_saved(tmp_path):
    tokenizer = CHATTY.__class__.from_pretrained(checkpoint(tmp_path))
    tokenizer.pad_token = "~"
    pad_id, eos_id = tokenizer.convert_tokens_to_ids(["~", "^"])
    trainer = reward_trainer(str(tmp_path / "reward-model"), CHATS, tmp_path, tokenizer, eos_token="^")
    trainer.save_model(str(tmp_path / "saved"))
    for config in (
        trainer.model.config,
        AutoConfig.from_pretrained(tmp_path / "saved"),
        load(tmp_path / "saved").config,
    ):
        text_config = config.get_text_config()
        assert config.pad_token_id == text_config.pad_token_id == pad_id
        assert config.eos_token_id == text_config.eos_token_id == eos_id
        assert (text_config.vocab_size, text_config.hidden_size) == (config.vocab_size, config.hidden_size) == (300, 32)
    assert load(tmp_path / "saved").predict(TEXTS).tolist() == trainer.model.predict(TEXTS).tolist()


def test_a_trained_reward_model_comes_back_and_is_trained_further(tmp_path):
    folder = checkpoint(tmp_path)
    first = reward_trainer(folder, CHATS, tmp_path, max_steps=60, learning_rate=3e-3)
    first.train()
    first.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 100_000  # the head alone
    again = reward_trainer(
        str(tmp_path / "saved"), CHATS, tmp_path, eval_dataset=CHATS, per_device_eval_batch_size=len(CHATS)
    )
    assert same(head(again.model), head(first.model))
    metrics = again.evaluate()
    chosen, rejected = (
        first.model.predict([row["prompt"] + row[side] for row in CHATS]) for side in ("chosen", "rejected")
    )
    assert metrics["eval_accuracy"] == pytest.approx((chosen > rejected).mean())
    assert metrics["eval_margin"] == pytest.approx((chosen - rejected).mean(), abs=1e-5)
    assert metrics["eval_accuracy"] > 0.9


@pytest.mark.parametrize("head_type", ["relish", "linear", "mlp"])
def test_autocast_leaves_the_head_in_full_precision(head_type):
    model = tiny_model(head_type=head_type).eval()
    states = torch.randn(3, 7, 32)
    with torch.no_grad():
        expected = model(hidden_states=states).logits
        with torch.autocast("cpu", torch.bfloat16):  # TRL's default
            assert torch.equal(model(hidden_states=states).logits, expected)


# ---------------------------------------------------------------------- the text that is scored


@pytest.mark.parametrize(
    "pairs", [CHATS, WHOLE_CHATS, STRINGS, WHOLE_STRINGS], ids=["chats", "whole", "strings", "plain"]
)
def test_our_trainer_reads_the_tokens_that_trl_reads(pairs, tmp_path):
    model = tiny_model()
    rows = reward_trainer(model, pairs, tmp_path, processing_class=CHATTY).train_dataset
    ours = preference_ids(list(pairs), "train", model.config, CHATTY)
    # TRL puts EOS behind plain texts, ours does not: what `predict` scores has none.
    end = [CHATTY.eos_token_id] if pairs in (STRINGS, WHOLE_STRINGS) else []
    for side, ids in zip(("chosen", "rejected"), ours[:2], strict=True):
        assert [row + end for row in ids] == rows[f"{side}_ids"]
        assert all(row.count(CHATTY.bos_token_id) == 1 and row[0] == CHATTY.bos_token_id for row in ids)


@pytest.mark.parametrize("margin", [False, True])
def test_our_trainer_makes_the_step_that_trl_makes(margin, tmp_path):
    pairs = with_margin(CHATS) if margin else CHATS
    options = {**SGD, "max_steps": 1, "per_device_train_batch_size": len(pairs)}
    theirs = reward_trainer(tiny_model(label_mean=3.0, label_std=2.0), pairs, tmp_path, CHATTY, **options)
    ours = make_trainer(
        tmp_path,
        tiny_model(label_mean=3.0, label_std=2.0),
        pairs,
        RelishRewardTrainer,
        processing_class=CHATTY,
        **options,
    )
    start = head(ours.model)
    for trainer in (theirs, ours):
        trainer.train()
    assert ours.state.log_history[0]["loss"] == pytest.approx(theirs.state.log_history[0]["loss"], abs=1e-5)
    assert not same(head(ours.model), start)
    for name, tensor in head(theirs.model).items():
        torch.testing.assert_close(head(ours.model)[name], tensor, atol=1e-5, rtol=1e-4)


def test_a_conversation_is_scored_as_trl_renders_it():
    model = tiny_model().eval()
    chat = say("How was it?", "user") + say("A great film.")
    text = apply_chat_template({"messages": chat}, CHATTY)["text"]
    ids = CHATTY(text, add_special_tokens=False, return_tensors="pt")
    assert ids["input_ids"][0].tolist().count(CHATTY.bos_token_id) == 1
    with torch.no_grad():
        expected = model(**ids).logits[0, 0]
    assert model.predict([chat], CHATTY)[0] == pytest.approx(float(expected), abs=1e-6)
    assert model.predict([text], CHATTY)[0] == pytest.approx(float(expected), abs=1e-6)
    assert model.predict([{"text": chat}], CHATTY)[0] == pytest.approx(float(expected), abs=1e-6)


# ---------------------------------------------------------------------- GRPO and RLOO

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def rewards_of_a_step(kind, reward, prompts, tokenizer, folder, **options):
    """Let a policy answer for one step; return the conversations or texts, and what TRL logged of their rewards."""
    trainer_class, config_class = TRAINERS[kind]
    texts = []

    def watch(prompts, completions, **_):
        texts.extend(prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    args = config_class(
        str(folder / "out"), **FIXED, max_steps=1, per_device_train_batch_size=8, num_generations=2, bf16=False,
        max_completion_length=6, reward_weights=[1.0, 0.0], **options,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_backbone("llama").config).save_pretrained(folder / "policy")
    trainer = trainer_class(
        str(folder / "policy"),
        [reward, watch],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer.train()
    return texts, trainer.state.log_history[0]


@pytest.mark.parametrize("given", ["object", "path"])
@pytest.mark.parametrize("form", ["texts", "conversations"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_reward_is_what_predict_says(kind, form, given, tmp_path):
    tokenizer = PLAIN if form == "texts" else CHATTY
    folder = checkpoint(tmp_path, tokenizer, label_mean=10.0, label_std=4.0)
    prompts = TEXTS[:4] if form == "texts" else [say(text, "user") for text in TEXTS[:4]]
    reward = folder if given == "path" else load(folder)
    texts, log = rewards_of_a_step(kind, reward, prompts, tokenizer, tmp_path)
    expected = load(folder).predict(texts)
    assert len(texts) == 8
    assert expected.std() > 0.01
    assert log["rewards/reward-model/mean"] == pytest.approx(expected.mean(), abs=1e-4)
    assert log["rewards/reward-model/std"] == pytest.approx(expected.std(ddof=1), abs=1e-4)
    assert log["reward"] == pytest.approx(expected.mean(), abs=1e-4)


def test_of_several_targets_one_reward_is_made(tmp_path):
    folder = checkpoint(
        tmp_path, PLAIN, num_labels=2, id2label={0: "helpful", 1: "brief"}, label_mean=[3, 50], label_std=[1, 20]
    )
    with pytest.raises(RelishConfigError, match="as_reward_model"):
        rewards_of_a_step("grpo", folder, TEXTS[:4], PLAIN, tmp_path)
    with pytest.raises(RelishConfigError, match="helpful"):
        reward_trainer(folder, WHOLE_STRINGS, tmp_path)
    with pytest.raises(ValueError, match="num_labels"):  # TRL's own
        reward_trainer(load(folder), WHOLE_STRINGS, tmp_path)

    as_reward_model(load(folder), {"helpful": 1.0, "brief": -0.02}).save_pretrained(tmp_path / "one")
    PLAIN.save_pretrained(tmp_path / "one")
    texts, log = rewards_of_a_step("grpo", str(tmp_path / "one"), TEXTS[:4], PLAIN, tmp_path)
    expected = load(folder).predict(texts) @ [1.0, -0.02]
    assert log["rewards/one/mean"] == pytest.approx(expected.mean(), abs=1e-4)
    assert log["rewards/one/std"] == pytest.approx(expected.std(ddof=1), abs=1e-4)
    trainer = reward_trainer(load(tmp_path / "one"), WHOLE_STRINGS, tmp_path)
    trainer.train()
    assert trainer.model.config.num_labels == 1


def test_targets_without_a_scale_are_no_reward_either(tmp_path):
    with pytest.raises(RelishConfigError, match="num_labels=1"):
        load(checkpoint(tmp_path, num_labels=2), num_labels=1)
