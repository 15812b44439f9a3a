"""Regression-aware fine-tuning of a plain causal language model: what the trainer needs to know beside it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .backbone_relish import check_language_model
from .base_model_relish import bounded_length
from .configuration_checks_relish import RelishConfigError
from .configuration_relish import RelishConfig
from .lm_heads_relish import NumberGridHead, NumberGridOutput, grid_output
from .modeling_relish import RelishForSequenceRegression
from .number_grid_relish import NumberGrid
from .objectives_relish import weighted_mean
from .training_args import RelishTrainingArguments


class LanguageModelRegression:
    """RAIL and RAFT over a causal language model that stays what it is: nothing is added to it, or saved with it.

    Args:
        language_model: The causal language model, without PEFT's wrapper.
        number_grid: A `NumberGrid`, numbers, or a mapping word -> number.
        tokenizer: Finds the grid's tokens; not needed where the grid has them.
        prompt_template: The prompt, ending in words that ask for the number.
        max_length: Longest prompt in tokens.
        objective: raft, huber, mse, mbr or cross_entropy.
        normalize: Make the grid's probabilities sum to one; `None` = for mbr alone, which is nothing without.
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        number_grid: Any,
        tokenizer: Any,
        prompt_template: str,
        max_length: int,
        objective: str = "raft",
        normalize: bool | None = None,
    ) -> None:
        grid = NumberGrid.from_setting(number_grid)
        if grid.tokens is None and tokenizer is None:
            raise RelishConfigError("the number grid has no tokens yet: pass processing_class=tokenizer.")
        check_language_model(language_model)
        grid = grid.resolve(tokenizer, prompt_template)
        text_config = language_model.config.get_text_config()
        self.config = RelishConfig(
            backbone_config=text_config,
            head_type="number_grid",
            number_grid=grid.to_dict(),
            objective=objective,
            normalize_grid=objective == "mbr" if normalize is None else normalize,
            prompt_template=prompt_template,
            max_length=bounded_length(max_length, text_config, grid.num_appended_tokens),
        )
        self.head = NumberGridHead(self.config)
        self.backbone_is_frozen = False

    def outputs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> NumberGridOutput:
        """Run the language model, in whatever wrapper it is trained, on a padded batch; loss where it has labels.

        Cross-entropy asks for the label's own number alone while it trains: there is a loss then, and no prediction.
        """
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        labels, weight = inputs.get("labels"), inputs.get("sample_weight")
        self.head.to(ids.device)
        if (
            model.training
            and labels is not None
            and self.config.objective == "cross_entropy"
            and not self.head.normalize
        ):
            return NumberGridOutput(loss=weighted_mean(-self.head.read_labels(model, ids, mask, labels), weight))
        log_probs = self.head.read(model, ids, mask)
        return grid_output(self.head, log_probs, self.config, labels, weight)


def grid_diagnostics(log_probs: torch.Tensor) -> torch.Tensor:
    """Return (B, 2): the probability mass on the grid, and the entropy over it (made to sum to one), in nats."""
    log_mass = log_probs.logsumexp(1)
    normalized = log_probs - log_mass[:, None]
    entropy = -(normalized.exp() * normalized).nan_to_num(0.0).sum(1)
    return torch.stack([log_mass.exp(), entropy], dim=1)


def relish_model(
    model: Any, args: RelishTrainingArguments, number_grid: Any, tokenizer: Any, prompt_template: str | None
) -> RelishForSequenceRegression | LanguageModelRegression:
    """Return the RELISH model, or what stands for one beside a plain causal language model."""
    if isinstance(model, RelishForSequenceRegression):
        given = {"number_grid": number_grid, "prompt_template": prompt_template, "normalize_grid": args.normalize_grid}
        for name, value in given.items():
            if value is not None and (name == "number_grid" or value != getattr(model.config, name)):
                raise RelishConfigError(f"a RELISH model has its {name} from from_backbone({name}=...).")
        return model
    if number_grid is None or not isinstance(model, PreTrainedModel):
        raise RelishConfigError(
            "RelishTrainer trains a RelishForSequenceRegression, or a causal language model with number_grid=...; got "
            f"{type(model).__name__}{'' if number_grid is None else ' with a number_grid'}."
        )
    return LanguageModelRegression(
        model, number_grid, tokenizer, prompt_template or RelishConfig.prompt_template, args.max_length,
        args.objective or "raft", args.normalize_grid,
    )  # fmt: skip
