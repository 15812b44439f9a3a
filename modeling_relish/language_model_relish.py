"""A causal language model's probabilities of numbers: every candidate of a grid in one forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.utils import logging

from .backbone_relish import check_finite, check_rows, first_position
from .number_grid_relish import TokenTrie

logger = logging.get_logger(__name__)

# Attention kernels that take any mask. Flash attention takes none but padding.
_MASKED_KERNELS = ("sdpa", "eager")
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def grid_log_probs(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, trie: TokenTrie
) -> torch.Tensor:
    """Return (B, G) log p(number | prompt), fp32, differentiable.

    The candidates' tokens are laid out after the prompt as one trie: each sees the prompt and its own ancestors, at the position
    it would have alone. So the prompt runs once, and logits are computed for its last token and the trie's alone.

    Args:
        model: A causal language model, maybe in PEFT's or a distributed wrapper.
        input_ids: (B, T), padded on any side.
        attention_mask: (B, T), 1 = token.
        trie: The grid's tokens.

    Raises:
        EmptyRowError, NonFiniteStatesError: for a row without a token, and for logits that are not finite.
    """
    if len(trie) == 0:
        return trie.log_probs(last_logits(model, input_ids, attention_mask)[:, None])
    check_rows(attention_mask)
    ids, mask = pad_left(input_ids, attention_mask)
    if (reason := no_tree_mask(model)) is None:
        logits = _tree_logits(model, ids, mask, trie)
    else:
        logger.warning_once(f"{reason}; every number is run by itself, which is slower.")
        return _one_by_one(model, ids, mask, trie)
    return trie.log_probs(logits)


def own_log_probs(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return (B, 1) log p(sequence | prompt), fp32, differentiable, of one token sequence for each row.

    Each row runs its own sequence alone behind its prompt, as in standard fine-tuning; other arguments and errors as
    [`grid_log_probs`], which gives the same number for a sequence of the grid.
    """
    check_rows(attention_mask)
    length = max(map(len, sequences))
    device = input_ids.device
    targets = torch.tensor([[0] * (length - len(s)) + list(s) for s in sequences], device=device)
    real = torch.tensor([[0] * (length - len(s)) + [1] * len(s) for s in sequences], device=device).bool()
    # A row's last token is only looked up. What is run before it moves to the right end, behind its prompt.
    ids, mask = pad_left(
        torch.cat([input_ids, targets[:, :-1]], dim=1), torch.cat([attention_mask.bool(), real[:, :-1]], dim=1)
    )
    if odd_layers(model) is None:
        logits = run_masked(model, ids, mask.long(), mask.long().cumsum(1).sub(1).clamp(min=0), length)
    else:
        logits = _without_padding(ids, mask, lambda rows: _last(run_masked(model, *_all_tokens(rows), length), length))
    dtype, logits = logits.dtype, logits.float()
    log_total = logits.logsumexp(-1)
    check_finite(log_total.to(dtype)[..., None], real, "the language model's logits")
    said = logits.gather(-1, targets[..., None])[..., 0]
    check_finite(said.to(dtype)[..., None], real, "the language model's logits")
    found = said - log_total
    return found.masked_fill(~real, 0.0).sum(1, keepdim=True)


def last_logits(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return (B, V) logits after the prompt's last token; arguments and errors as [`grid_log_probs`]."""
    check_rows(attention_mask)
    ids, mask = pad_left(input_ids, attention_mask)
    if odd_layers(model) is None:
        logits = run_masked(model, ids, mask.long(), mask.long().cumsum(1).sub(1).clamp(min=0), 1)
    else:
        logits = _without_padding(ids, mask, lambda rows: run_masked(model, *_all_tokens(rows), 1))
    check_finite(logits, torch.ones_like(logits[..., 0]), "the language model's logits")
    return logits[:, 0]


def pad_left(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every row's tokens to the right end, in their order; (B, T) ids and boolean mask."""
    mask = attention_mask.bool()
    order = torch.argsort(mask.to(torch.uint8), dim=1, stable=True)
    return input_ids.gather(1, order), mask.gather(1, order)


def no_tree_mask(model: nn.Module) -> str | None:
    """Say why a model cannot take the trie's mask; `None` where it can."""
    causal = unwrapped(model)
    config = causal.config.get_text_config()
    name = type(causal).__name__
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in _MASKED_KERNELS:
        return f"{name} runs under attn_implementation={kernel!r}, which takes no mask but padding (sdpa and eager do)"
    if (reason := odd_layers(model)) is not None:
        return reason
    types = set(getattr(config, "layer_types", None) or ())
    if len(types) > 1 and not _decoder_says(causal, "causal_mask_mapping := attention_mask"):
        return f"{name} mixes full and sliding attention and takes no mask for each"
    if not types and _window(config) and not _decoder_says(causal, "create_sliding_window_causal_mask"):
        return f"{name} has a sliding window of its own kind"
    return None


def odd_layers(model: nn.Module) -> str | None:
    """Say why a model's layers may read padding, or take no mask of ours; `None` for transformers' common attention."""
    causal = unwrapped(model)
    name = type(causal).__name__
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        return f"{name} takes no position_ids"
    types = set(getattr(causal.config.get_text_config(), "layer_types", None) or ())
    if getattr(causal, "_is_stateful", False) or not types <= _KNOWN_LAYER_TYPES:
        return f"{name} has layers without a plain attention mask ({sorted(types)})"
    if not getattr(causal, "_supports_attention_backend", False):
        return f"{name} has an attention of its own kind"
    return None


def _window(config: Any) -> int | None:
    """Return the length of the sliding window that is in use."""
    window = getattr(config, "sliding_window", None)
    return None if getattr(config, "use_sliding_window", True) is False else window


def _decoder_says(causal: Any, words: str) -> bool:
    try:
        return words in inspect.getsource(type(causal.get_decoder()))
    except (OSError, TypeError):  # no source at hand: not known, so no
        return False


def unwrapped(model: Any) -> Any:
    """Return the causal language model inside wrappers of distributed training, compilation and PEFT."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "config"):
            model = model.module
        else:
            return model


def _tree_logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, trie: TokenTrie) -> torch.Tensor:
    """Return (B, N + 1, V) logits of the prompt's last token and the trie's tokens."""
    B, T = ids.shape
    N = len(trie)
    tables = trie.tables(ids.device)
    length = mask.sum(1, keepdim=True)
    prompt_positions = mask.long().cumsum(1).sub(1).clamp(min=0)
    positions = torch.cat([prompt_positions, length + tables.depths - 1], dim=1)
    allowed = torch.zeros(B, T + N, T + N, dtype=torch.bool, device=ids.device)
    allowed[:, :T, :T] = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril() & mask[:, None, :]
    allowed[:, T:, :T] = mask[:, None, :]
    allowed[:, T:, T:] = tables.ancestors
    allowed |= torch.eye(T + N, dtype=torch.bool, device=ids.device)  # padding sees itself: a row of nothing is NaN
    everything = torch.cat([ids, tables.tokens.expand(B, N)], dim=1)
    return run_masked(model, everything, layer_masks(model, allowed, positions, positions), positions, N + 1)


def layer_masks(model: nn.Module, allowed: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> Any:
    """Bring a boolean (B, Q, K) mask into the form that the model's layers take; (B, Q) positions look at (B, K) ones."""
    config = unwrapped(model).config.get_text_config()
    window = _window(config)
    types = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
    masks = {}
    for kind in types:
        part = allowed
        if kind == "sliding_attention" and window is not None:
            part = allowed & (positions[:, :, None] - seen[:, None, :] < window)
        masks[kind] = _for_kernel(part[:, None], model, config._attn_implementation)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _for_kernel(mask: torch.Tensor, model: nn.Module, kernel: str) -> torch.Tensor:
    if kernel != "eager":
        return mask
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())  # eager attention adds its mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def run_masked(
    model: nn.Module, ids: torch.Tensor, mask: Any, positions: torch.Tensor, keep: int, cache: Any = None
) -> torch.Tensor:
    """Return the last `keep` positions' logits; positions count from 0, wherever the model's own begin.

    The vocabulary is not multiplied with the others' states, except by the few classes without `logits_to_keep`.
    """
    accepted = inspect.signature(unwrapped(model).forward).parameters
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in accepted:
        kwargs["position_ids"] = positions + first_position(unwrapped(model))
    kwargs |= {"use_cache": cache is not None} if "use_cache" in accepted else {}
    kwargs |= {"cache": cache} if cache is not None else {}
    kwargs |= {"logits_to_keep": keep} if "logits_to_keep" in accepted else {}
    with whole_states_for_the_output(model):
        return model(**kwargs).logits[:, -keep:]


@contextmanager
def whole_states_for_the_output(model: nn.Module) -> Iterator[None]:
    """Hand the output layer the last states in one piece.

    transformers hands it a view into all states. Where the layer is frozen, torch multiplies such a view row by row, with a
    copy of the weights for each row: with a vocabulary of 49,152 and 32 rows it then takes 200 times as long.
    """
    output = unwrapped(model).get_output_embeddings() if hasattr(unwrapped(model), "get_output_embeddings") else None
    if output is None or torch.compiler.is_compiling():
        yield
        return
    hook = output.register_forward_pre_hook(lambda _, states: (states[0].contiguous(), *states[1:]))
    try:
        yield
    finally:
        hook.remove()


def _one_by_one(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, trie: TokenTrie) -> torch.Tensor:
    """The slow and plain way: every candidate behind the prompt, without padding, which not every model can ignore."""

    def score(rows: torch.Tensor) -> torch.Tensor:
        found = []
        for sequence in trie.sequences:
            tokens = torch.tensor(sequence[:-1], dtype=torch.long, device=ids.device).expand(len(rows), -1)
            logits = run_masked(model, *_all_tokens(torch.cat([rows, tokens], dim=1)), len(sequence))
            found.append(TokenTrie([sequence]).log_probs(logits))
        return torch.cat(found, dim=1)

    return _without_padding(ids, mask, score)


def _without_padding(
    ids: torch.Tensor, mask: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run rows of one length together; `ids` and `mask` are padded on the left, results come in the rows' order."""
    lengths = mask.sum(1)
    groups = [(lengths == length).nonzero()[:, 0] for length in lengths.unique()]
    found = torch.cat([run(ids[rows, -int(lengths[rows[0]]) :]) for rows in groups])
    return found[torch.cat(groups).argsort()]


def _last(logits: torch.Tensor, length: int) -> torch.Tensor:
    """Bring (B, at most `length`, V) logits to `length` positions, with zeros in front."""
    return functional.pad(logits, (0, 0, length - logits.shape[1], 0))


def _all_tokens(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, mask and positions of rows without padding."""
    return ids, torch.ones_like(ids), torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
