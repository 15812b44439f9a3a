"""Heads over a language model's distribution: the expected number of a grid, and an MLP on the last token's logits."""

from __future__ import annotations

import torch
from torch import nn

from .configuration_relish import RelishConfig, RelishConfigError
from .language_model_relish import grid_log_probs, last_logits
from .number_grid_relish import NumberGrid, TokenTrie
from .objectives_relish import grid_probs


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

    def forward(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, 1) expected numbers in label units, and the log-probabilities as they came, both fp32."""
        return grid_probs(log_probs, self.normalize) @ self.values[:, None], log_probs


class FinalLogitsHead(nn.Module):
    """A two-layer MLP with a sigmoid between, on the last token's logits over the vocabulary (RAFT, section 5)."""

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        self.regressor = nn.Sequential(
            nn.Linear(config.vocab_size, config.head_hidden_size),
            nn.Sigmoid(),
            nn.Dropout(config.head_dropout),
            nn.Linear(config.head_hidden_size, len(config.target_names)),
        )

    def read(self, backbone: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ask the language model: (B, V) logits after the prompt's last token."""
        weight = self.regressor[0].weight
        return last_logits(backbone, input_ids, mask).to(weight.device, weight.dtype)

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (B, K) standardised predictions, and nothing else."""
        return self.regressor(logits), None


def build_lm_head(config: RelishConfig) -> NumberGridHead | FinalLogitsHead:
    """Build the head over the language model's distribution that `config.head_type` names."""
    return NumberGridHead(config) if config.head_type == "number_grid" else FinalLogitsHead(config)
