"""Rewards: RELISH trained on preference pairs, several attributes as one reward, and rewards for TRL.

A trained checkpoint is itself a reward model for TRL, as an object or by its path (import `modeling_relish` first): TRL renders
and tokenizes the text and takes `logits[:, 0]`, with no prompt template of ours around it. That number is what `predict` gives
for the same tokens: with `prompt_template="{text}"`, for the same conversation. [`reward_function`] is for checkpoints whose
template says more than that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .data import TableError
from .features import FeatureDataset
from .modeling_relish import RelishForSequenceRegression
from .objectives_relish import bradley_terry_loss
from .preferences import SIDES, PairCollator, PairDataset, joined, preference_ids, preference_metrics
from .text_relish import TextTooLongError
from .trainer import RelishTrainer
from .training_data import TokenDataset


class RewardModelError(ValueError):
    """A model that cannot give one reward, or weights that make none of it; the message says what to do."""


# ---------------------------------------------------------------------- training on preferences


class RelishRewardTrainer(RelishTrainer):
    """[`RelishTrainer`] on preference pairs: Bradley-Terry loss, and a frozen backbone runs once per text.

    Rows are in TRL's preference formats: `chosen` and `rejected`, and `prompt` where they do not contain it; each a string or a
    conversation (rendered by the tokenizer's chat template, with the columns `tools` and `chat_template_kwargs` where they are
    there); or `chosen_ids` and `rejected_ids`. `margin`, a number per row, is taken off the difference of the two rewards.

    The text goes through the model's prompt template, so that `predict` scores what was trained: a template with one field gets
    prompt and completion together (concatenated as they are), one with the fields `prompt` and `completion` gets them apart.
    With `"{text}"` and conversations the token ids are those of TRL's `RewardTrainer`. (To plain strings TRL's adds the EOS
    token; here nothing is added. Write it into the template where it is wanted.) A pair with a text longer than the config's
    `max_length` is dropped with a warning, as TRL does, for its end is what the two differ in; `predict` raises instead.

    Only differences of rewards are learned. A fresh model gets `label_mean` 0 and `label_std` 1, so that the reward is the head's
    own output and a difference of 1 says that the first text wins with probability sigmoid(1) = 0.73; its zero means nothing. A
    model that has a label scale keeps it, and its predictions are trained as rewards in that unit, as TRL does.

    Evaluation reports, under the names of TRL's `RewardTrainer`, `accuracy` (share of pairs whose chosen text has the higher
    reward), `margin` (mean difference) and `mean_reward`. `predict(pairs).predictions` is (N, 2): chosen, rejected.

    Args:
        model: A [`RelishForSequenceRegression`] with one target, or a PEFT model around one.
        args: [`RelishTrainingArguments`]; `label_columns` and `weight_column` do not apply.
        data_collator: `None` = [`PairCollator`].
        compute_metrics: Replaces the metrics above; gets predictions (N, 2) and margins (N,).
        **kwargs: As in [`RelishTrainer`].

    Raises:
        RewardModelError: for a model with several targets.
        TableError: for rows in none of these formats, with column and row.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("label_columns", "weight_column"):
            if getattr(args, name, None) is not None:
                raise ValueError(f"{name} does not apply to preference pairs, got {getattr(args, name)!r}.")
        pad_token_id = getattr(getattr(model, "config", None), "pad_token_id", None)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or PairCollator(pad_token_id),
            compute_metrics=compute_metrics or preference_metrics,
            **kwargs,
        )

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = [*SIDES, "margin"]  # type: ignore[assignment]

    def _measure_labels(self, dataset: Any) -> None:
        """There is no label: a reward's scale is the head's own where none is given."""
        if not isinstance(self.relish, RelishForSequenceRegression):
            raise RewardModelError(
                "preferences train a RelishForSequenceRegression, not a plain language model with number_grid=."
            )
        _check_one_target(self.relish)
        if not isinstance(dataset, IterableDataset) and not len(dataset):
            raise TableError("the train data has no row.")
        if self.relish.config.label_mean is None:
            self.relish.config.label_mean, self.relish.config.label_std = [0.0], [1.0]

    def _prepare(self, dataset: Any, name: str, *, is_train: bool = False) -> Any:  # noqa: ARG002
        """Turn preference rows into pairs of rows of states (frozen backbone, cached) or of tokens."""
        if dataset is None or isinstance(dataset, PairDataset):
            return dataset
        if (id(dataset), False) in self._prepared:
            return self._prepared[id(dataset), False][1]
        if isinstance(dataset, IterableDataset):
            raise TableError(f"streamed {name} data cannot be cached; give preference pairs as a datasets.Dataset.")
        rows = [dataset[i] for i in range(len(dataset))]
        chosen, rejected, margins = preference_ids(rows, name, self.relish.config, self.processing_class)
        ids = chosen + rejected
        sides: Any = FeatureDataset(self._cached(ids), ids, {}) if self._caches() else TokenDataset(ids, {})
        prepared = PairDataset(sides, [len(a) + len(b) for a, b in zip(chosen, rejected, strict=True)], margins)
        self._prepared[id(dataset), False] = (dataset, prepared)
        return prepared

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As in `Trainer`; every row is answered, so none may be too long."""
        prepared = self._prepare(test_dataset, "test")
        if len(prepared) < len(test_dataset):
            raise TextTooLongError(
                f"only {len(prepared)} of the {len(test_dataset)} pairs fit into max_length, so the predictions would "
                "not stand in the order of the rows. Remove the others, or raise the config's max_length."
            )
        return super().get_test_dataloader(prepared)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the Bradley-Terry loss of a batch of [`PairCollator`], and the rewards (2 B, 1) in the model's output."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "margin"})
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        loss = bradley_terry_loss(chosen, rejected, inputs["margin"])
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss, the rewards (B, 2) of chosen and rejected, and the margins (B,), one row per pair."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), outputs.logits.detach().view(2, -1).T.contiguous(), inputs["margin"]


# ---------------------------------------------------------------------- rewards for TRL


def as_reward_model(
    model: RelishForSequenceRegression, weights: Sequence[float] | Mapping[str, float]
) -> RelishForSequenceRegression:
    """Make one reward of several targets: a model with a single target, `sum_k weights[k] * prediction[k]` in label units.

    The head's last layer is linear, so the weighted sum is one row of weights in its place: the result is an ordinary model with
    `num_labels=1`, which saves, loads and trains like any other, and which TRL takes by object or by path. It shares the
    backbone with `model`, which is not changed. Its target is named by the formula, its label scale follows from the targets'
    (deviation: as if they were uncorrelated), and it has a label range where they have one. Given the model itself, TRL's
    GRPOTrainer and RLOOTrainer would take its first target for the reward, without a word.

    Args:
        model: With K targets.
        weights: K numbers in the targets' order, or target name -> weight (a target left out counts 0). They are used as they
            are: neither divided by their sum nor by a target's deviation.

    Raises:
        RewardModelError: for weights that do not fit, a head without a linear last layer, or a PEFT model (merge it first).
    """
    if not isinstance(model, RelishForSequenceRegression):
        raise RewardModelError(
            f"as_reward_model takes a RelishForSequenceRegression, got {type(model).__name__}; of a PEFT model, the one that "
            "merge_and_unload() returns."
        )
    if model.has_adapter:
        raise RewardModelError("the model has an adapter on it: merge it first (peft_model.merge_and_unload()).")
    names = model.config.target_names
    w = torch.tensor(list(_checked_weights(weights, names)), dtype=torch.float64)
    state = {name: tensor.clone() for name, tensor in model.score.state_dict().items()}
    weight = next(
        (name for name in reversed(state) if name.startswith("regressor.") and name.endswith(".weight")), None
    )
    last = [name for name in state if weight and name.startswith(weight.removesuffix("weight"))]
    if not last or any(len(state[name]) != len(names) for name in last):
        raise RewardModelError(f"a {model.config.head_type} head has no linear last layer to put the weights into.")
    mean, std = (scale.double().cpu() for scale in model._label_scale(torch.device("cpu")))
    config = _reward_config(model, w, mean, std)
    share = w * std / config.label_std[0]
    for name in last:
        folded = torch.tensordot(share.to(state[name].device), state[name].double(), dims=1)[None]
        state[name] = folded.to(state[name].dtype)
    reward = type(model)(config, model.backbone)
    reward.score.to(next(model.score.parameters()).device)
    reward.score.load_state_dict(state)
    reward._base_fingerprint = model._base_fingerprint
    reward._base_fine_fingerprint = model._base_fine_fingerprint
    return reward.train(model.training)


def _reward_config(model: RelishForSequenceRegression, w: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> Any:
    names, label_range = model.config.target_names, model.config.label_range
    config = copy.deepcopy(model.config)
    formula = " + ".join(f"{weight:g}*{name}" for weight, name in zip(w.tolist(), names, strict=True) if weight)
    config.id2label, config.label2id = {0: formula}, {formula: 0}
    config.label_mean = [float((w * mean).sum())]
    config.label_std = [float((w * std).square().sum().sqrt())]
    if label_range is not None:
        ends = [
            sorted((weight * low, weight * high)) for weight, (low, high) in zip(w.tolist(), label_range, strict=True)
        ]
        config.label_min, config.label_max = [sum(low for low, _ in ends)], [sum(high for _, high in ends)]
    return config


def _checked_weights(weights: Sequence[float] | Mapping[str, float], names: list[str]) -> Iterator[float]:
    if isinstance(weights, Mapping):
        if unknown := sorted(set(weights) - set(names)):
            raise RewardModelError(f"weights name {unknown}; the targets are {names}.")
        weights = [weights.get(name, 0.0) for name in names]
    values = [float(weight) for weight in weights]
    if len(values) != len(names):
        raise RewardModelError(f"{len(values)} weight(s) for {len(names)} targets {names}: give one for each.")
    if not all(map(math.isfinite, values)) or not any(values):
        raise RewardModelError(f"weights must be finite, and not all 0, got {values}.")
    yield from values


def reward_function(
    model: RelishForSequenceRegression,
    tokenizer: Any = None,
    *,
    row: Callable[[Any, Any], Any] | None = None,
    batch_size: int = 32,
) -> Callable[..., list[float]]:
    r"""Make a reward function for `GRPOTrainer` and `RLOOTrainer` that scores through the model's own prompt template.

    TRL hands a model its text without a template around it, and a plain text without BOS. A checkpoint that was trained with
    `"Rate the sentiment ...: {text}\nSentiment:"` should be asked the same way: by this function.

    Args:
        model: With one target.
        tokenizer: The backbone's; `None` as in `predict`.
        row: `(prompt, completion) -> what predict scores`; `None` = both together as `text`, apart as `prompt` and
            `completion`, strings or conversations as TRL has them. `lambda prompt, completion: completion[-1]["content"]`
            scores the answer alone.
        batch_size: As in `predict`.

    Raises:
        RewardModelError: for a model with several targets.
    """
    _check_one_target(model)

    def relish_reward(prompts: Sequence[Any], completions: Sequence[Any], **_columns: Any) -> list[float]:
        rows = [(row or _both)(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        return model.predict(rows, tokenizer, batch_size=batch_size).tolist()

    return relish_reward


def _both(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"text": joined(prompt, completion), "prompt": prompt, "completion": completion}


def _check_one_target(model: RelishForSequenceRegression) -> None:
    if model.config.num_labels != 1:
        raise RewardModelError(
            f"a reward is one number, the model has the targets {model.config.target_names}: make one of them with "
            "as_reward_model(model, weights)."
        )
