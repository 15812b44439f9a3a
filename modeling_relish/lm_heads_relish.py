"""Heads over a language model's distribution: the expected number of a grid, and an MLP on the last token's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import maybe_autocast

from .configuration_checks_relish import RelishConfigError
from .configuration_relish import RelishConfig
from .language_model_relish import grid_log_probs, last_logits, own_log_probs
from .number_grid_relish import NumberGrid, TokenTrie
from .objectives_relish import check_labels, grid_loss, grid_probs, nearest_number


@dataclass
class NumberGridOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput` with the (B, G) log-probabilities of the grid's numbers, fp32."""

    log_probs: torch.Tensor | None = None


class NumberGridHead(nn.Module):
    """The expected number, sum_g p(str(g) | x) g, in label units: RAIL, and trained, RAFT (RAFT, sections 3 and 4).

    Its values are parameters under `learn_values`, else constants; both are saved.
    """

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        if config.number_grid is None:
            raise RelishConfigError('head_type="number_grid" needs number_grid: the numbers, as [1, 2, 3, 4, 5].')
        grid = NumberGrid.from_setting(config.number_grid)
        if grid.tokens is None:
            raise RelishConfigError(
                "the number grid has no tokens yet: start the model with from_backbone, or call NumberGrid.resolve(tokenizer, "
                "prompt_template)."
            )
        if (largest := max(map(max, grid.tokens))) >= config.vocab_size:
            raise RelishConfigError(
                f"the number grid has the token {largest}, and the language model's vocabulary ends at {config.vocab_size - 1}: "
                "after adding tokens call resize_token_embeddings(len(tokenizer)) on it first."
            )
        if len(grid.values) == 1 and config.normalize_grid and not config.learn_values:
            raise RelishConfigError(
                "the number grid has one number, whose probability normalize_grid=True makes 1: nothing would be learned. Leave "
                "normalize_grid=False, or give the grid more numbers."
            )
        self.normalize = config.normalize_grid
        self.trie = TokenTrie(grid.tokens)
        values = torch.tensor(grid.values, dtype=torch.float32)
        if config.learn_values:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    def read(self, backbone: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ask the language model: (B, G) log p(number | prompt), fp32."""
        return grid_log_probs(backbone, input_ids, mask, self.trie).to(self.values.device)

    def read_labels(
        self, backbone: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Ask for one number of each row: (B, 1) log p(the number nearest to its label | prompt), fp32."""
        nearest = nearest_number(self.values, check_labels(labels.to(self.values.device), len(input_ids), 1))
        return own_log_probs(backbone, input_ids, mask, [self.trie.sequences[i] for i in nearest[:, 0].tolist()])

    def forward(self, log_probs: torch.Tensor, output_attentions: bool = False) -> tuple[torch.Tensor, None]:
        """Return (B, 1) expected numbers in label units, fp32; there is no attention to return."""
        del output_attentions
        return grid_probs(log_probs, self.normalize) @ self.values[:, None], None


def grid_output(
    head: NumberGridHead,
    log_probs: torch.Tensor,
    config: RelishConfig,
    labels: torch.Tensor | None = None,
    sample_weight: torch.Tensor | None = None,
) -> NumberGridOutput:
    """Return the expected numbers in label units, and the loss of the config's objective where labels are given."""
    with maybe_autocast(log_probs.device.type, enabled=False):  # products in bf16 would keep three digits of the answer
        logits, _ = head(log_probs)
        loss = None
        if labels is not None:
            targets = check_labels(labels.to(logits.device), len(logits), 1)
            loss = grid_loss(
                log_probs, head.values, targets, config.objective, scale=config.label_std[0] if config.label_std else 1.0,
                huber_delta=config.huber_delta, normalize=head.normalize, sample_weight=sample_weight,
            )  # fmt: skip
    return NumberGridOutput(loss=loss, logits=logits, log_probs=log_probs)


class LogitsLinear(nn.Linear):
    """A linear layer on (..., V) logits, which it standardises and divides by the root of V.

    Raw logits share a large offset, and there are tens of thousands. Adam moves all their weights by the learning rate at once:
    after one step every sigmoid behind them is saturated, and nothing is learnt. So scaled, a step moves a unit as far as in a
    small layer.
    """

    def reset_parameters(self) -> None:
        """Draw N(0, 1): a unit's variance is then one."""
        init.normal_(self.weight)
        init.zeros_(self.bias)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return (..., d) units."""
        return super().forward(functional.layer_norm(logits, logits.shape[-1:]) * logits.shape[-1] ** -0.5)


class FinalLogitsHead(nn.Module):
    """A two-layer MLP with a sigmoid between, on the last token's standardised logits over the vocabulary (RAFT, section 5)."""

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        self.regressor = nn.Sequential(
            LogitsLinear(config.vocab_size, config.head_hidden_size),
            nn.Sigmoid(),
            nn.Dropout(config.head_dropout),
            nn.Linear(config.head_hidden_size, len(config.target_names)),
        )

    def read(self, backbone: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ask the language model: (B, V) logits after the prompt's last token."""
        weight = next(self.parameters())
        return last_logits(backbone, input_ids, mask).to(weight.device, weight.dtype)

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (B, K) standardised predictions, and nothing else."""
        return self.regressor(logits), None


def build_lm_head(config: RelishConfig) -> NumberGridHead | FinalLogitsHead:
    """Build the head over the language model's distribution that `config.head_type` names."""
    return NumberGridHead(config) if config.head_type == "number_grid" else FinalLogitsHead(config)
