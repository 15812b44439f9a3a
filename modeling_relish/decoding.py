"""Numbers decoded as text: greedy, or sampled and averaged (RAIL by sampling), with no or many examples in the prompt."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from .number_grid_relish import number_strings
from .text_relish import PromptTemplate, encode_rows, tokenize

logger = logging.get_logger(__name__)

BETWEEN_EXAMPLES = "\n\n"


@dataclass(frozen=True)
class DecodedNumbers:
    """What a language model wrote where a number was asked for.

    Args:
        values: (N,) float64; the mean over samples where several were drawn.
        texts: N lists of the decoded texts, one for each sample.
        not_numbers: How many of all texts were no number, and were counted as 0.0 (RAFT, section 5).
    """

    values: np.ndarray
    texts: list[list[str]]
    not_numbers: int


def parse_number(text: str) -> float | None:
    """Read the first line of a decoded text as a finite number; `None` where it is not one."""
    line = text.strip().split("\n")[0].strip()
    try:
        value = float(line)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in line else None


@torch.no_grad()
def decode_numbers(
    language_model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    prompt_template: str,
    examples: Sequence[tuple[Any, float]] = (),
    num_samples: int = 0,
    temperature: float = 1.0,
    max_length: int = 1024,
    truncation: str = "longest_first",
    max_new_tokens: int = 8,
    batch_size: int = 16,
    seed: int = 0,
    show_progress_bar: bool = False,
) -> DecodedNumbers:
    """Let a causal language model write its answers, and read them as numbers.

    Args:
        language_model: The model.
        tokenizer: Its tokenizer.
        texts: Strings, pairs, or dicts with the template's fields.
        prompt_template: The prompt, ending in words that ask for the number.
        examples: (text, label) pairs to show first (many-shot); their keys and values are computed once.
        num_samples: 0 decodes greedily; k > 0 draws k texts a row and averages them (RAIL by sampling).
        temperature: Of the samples; 1 is the model's own distribution, as RAIL has it.
        max_length: Longest prompt in tokens, the examples not counted.
        truncation: Of longer ones, as in [`encode_rows`].
        max_new_tokens: Tokens to write at most.
        batch_size: Prompts at once.
        seed: Of the samples; torch's own random state is left as it was.
        show_progress_bar: A bar over batches.
    """
    template = PromptTemplate(prompt_template)
    ids = list(encode_rows(texts, template, tokenizer, max_length, truncation))
    prefix = _examples_prefix(examples, template, tokenizer)
    if prefix and tokenizer.bos_token_id is not None:  # once, at the very beginning
        ids = [row[1:] if row[:1] == [tokenizer.bos_token_id] else row for row in ids]
    cache = _run_prefix(language_model, prefix)
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    written: list[list[str]] = [[] for _ in ids]
    was_training = language_model.training
    language_model.eval()
    with torch.random.fork_rng(enabled=num_samples > 0):
        torch.manual_seed(seed) if num_samples else None
        starts = range(0, len(order), batch_size)
        for start in logging.tqdm(starts, desc="decode", unit="batch", disable=not show_progress_bar):
            rows = order[start : start + batch_size]
            for row, found in zip(
                rows,
                _write(
                    language_model,
                    tokenizer,
                    [ids[i] for i in rows],
                    prefix,
                    cache,
                    num_samples,
                    temperature,
                    max_new_tokens,
                ),
                strict=True,
            ):
                written[row] = found
    language_model.train(was_training)
    numbers = [[parse_number(text) for text in row] for row in written]
    values = np.array([np.mean([0.0 if v is None else v for v in row]) for row in numbers], dtype=np.float64)
    return DecodedNumbers(values, written, sum(v is None for row in numbers for v in row))


def _examples_prefix(examples: Sequence[tuple[Any, float]], template: PromptTemplate, tokenizer: Any) -> list[int]:
    if not examples:
        return []
    labels = number_strings([round(float(label), 2) for _, label in examples])
    shown = [
        template.render(template.row(text, i)) + ("" if template.template[-1].isspace() else " ") + label
        for i, ((text, _), label) in enumerate(zip(examples, labels, strict=True))
    ]
    return tokenize(BETWEEN_EXAMPLES.join(shown) + BETWEEN_EXAMPLES, tokenizer)


def _run_prefix(model: PreTrainedModel, prefix: list[int]) -> DynamicCache | None:
    if not prefix:
        return None
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=torch.tensor([prefix], device=model.device), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def _write(
    model: Any,
    tokenizer: Any,
    rows: list[list[int]],
    prefix: list[int],
    cache: DynamicCache | None,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
) -> list[list[str]]:
    """Generate after the prompts of one batch, padded on the left; return the texts of every row."""
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    ids = torch.tensor([prefix + [pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(prefix) + [0] * (longest - len(row)) + [1] * len(row) for row in rows])
    copies = max(1, num_samples)
    kwargs: dict[str, Any] = {}
    if cache is not None:
        shared = copy.deepcopy(cache)
        shared.batch_repeat_interleave(len(rows) * copies)
        kwargs["cache"] = shared
    if num_samples:
        kwargs |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
    else:
        kwargs |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    written = model.generate(
        input_ids=ids, attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens, pad_token_id=pad, **kwargs
    )
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    return [texts[i * copies : (i + 1) * copies] for i in range(len(rows))]
