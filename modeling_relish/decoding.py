"""Numbers decoded as text: greedy, or sampled and averaged (RAIL by sampling), with no or many examples in the prompt."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from .backbone_relish import BackboneError, first_position
from .language_model_relish import no_tree_mask, odd_layers, unwrapped, whole_states_for_the_output
from .number_grid_relish import decimal_step, decimals_of, number_strings
from .packed_decoding import SharedPrefix
from .text_relish import PromptTemplate, encode_rows, prompt_row, tokenize

logger = logging.get_logger(__name__)

BETWEEN_EXAMPLES = "\n\n"
_LABEL = " 1"  # how examples end


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
        examples: (text, label) pairs to show first (many-shot); their keys and values are computed once. Labels are
            written with two decimals at most, with more where they lie closer together.
        num_samples: 0 decodes greedily; k > 0 draws k texts a row and averages them (RAIL by sampling).
        temperature: Of the samples; 1 is the model's own distribution, as RAIL has it.
        max_length: Longest prompt in tokens, the examples not counted.
        truncation: Of longer ones, as in [`encode_rows`].
        max_new_tokens: Tokens to write at most.
        batch_size: Prompts at once.
        seed: Of the samples; torch's own random state is left as it was.
        show_progress_bar: A bar over batches.

    Raises:
        BackboneError: for decoders of the RoBERTa family, whose positions transformers' `generate` begins at another place.
    """
    if first_position(unwrapped(language_model)):
        raise BackboneError(
            f"{type(language_model).__name__} counts its positions from behind the padding index, and transformers' generate "
            "from 0: what it writes would be wrong. Its expected number (RAIL over a grid) is right."
        )
    ids = _prompts(texts, prompt_template, tokenizer, max_length, truncation, after_examples=bool(examples))
    prefix = _examples_prefix(examples, prompt_template, tokenizer)
    written: list[list[str]] = [[] for _ in ids]
    devices = range(torch.cuda.device_count())
    with _as_it_is(language_model), torch.random.fork_rng(devices, enabled=num_samples > 0):
        packed = None
        if prefix and not num_samples and no_tree_mask(language_model) is None:
            packed = SharedPrefix(language_model, prefix)
        cache = None if packed else _run_prefix(language_model, prefix)
        if cache is None and packed is None:
            ids, prefix = [prefix + row for row in ids], []
        if num_samples:
            torch.manual_seed(seed)
        may_pad = cache is None or _counts_no_padding(language_model, cache)
        batches = _batches([len(row) for row in ids], batch_size, may_pad=may_pad)
        for rows in logging.tqdm(batches, desc="decode", unit="batch", disable=not show_progress_bar):
            prompts = [ids[i] for i in rows]
            if packed is not None:
                tokens = packed.write(prompts, max_new_tokens, _ends(language_model))
                found = [[text] for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
            else:
                found = _write(
                    language_model, tokenizer, prompts, prefix, cache, num_samples, temperature, max_new_tokens
                )
            for row, answers in zip(rows, found, strict=True):
                written[row] = answers
    numbers = [[parse_number(text) for text in row] for row in written]
    values = np.array([np.mean([0.0 if v is None else v for v in row]) for row in numbers], dtype=np.float64)
    return DecodedNumbers(values, written, sum(v is None for row in numbers for v in row))


def _prompts(
    texts: Sequence[Any],
    prompt_template: str,
    tokenizer: Any,
    max_length: int,
    truncation: str,
    *,
    after_examples: bool,
) -> list[list[int]]:
    """Return the rows' token ids, as they follow the examples where there are some, the gap between them first; no BOS."""
    template = PromptTemplate(prompt_template)
    if not after_examples:
        return list(encode_rows(texts, template, tokenizer, max_length, truncation))
    # Cut behind a label, where running text is cut too: two line ends alone are one token of many vocabularies, and before
    # words they are two.
    before = tokenize(_LABEL, tokenizer)
    behind = PromptTemplate(_LABEL + BETWEEN_EXAMPLES + prompt_template)
    short, shorter = (tokenize(t.render(dict.fromkeys(t.fields, "a")), tokenizer) for t in (behind, template))
    together = encode_rows(texts, behind, tokenizer, max_length + len(short) - len(shorter), truncation)
    rows = []
    for whole, text in zip(together, texts, strict=True):
        if whole[: len(before)] == before:
            rows.append(whole[len(before) :])
            continue
        # The label merges with what follows it: there is no such place, and the row stands as it would alone.
        (row,) = encode_rows([text], template, tokenizer, max_length, truncation)
        alone = row[1:] if row[0] == tokenizer.bos_token_id else row
        rows.append(tokenize(BETWEEN_EXAMPLES, tokenizer, False) + alone)
    return rows


def _examples_prefix(examples: Sequence[tuple[Any, float]], prompt_template: str, tokenizer: Any) -> list[int]:
    if not examples:
        return []
    values = [float(label) for _, label in examples]
    low, high = min(values), max(values)
    decimals = max(2, decimals_of(decimal_step(low, high))) if low < high else 2
    labels = number_strings([round(value, decimals) for value in values])
    separator = "" if prompt_template[-1].isspace() else " "
    shown, with_special_tokens = "", True
    for i, ((example, _), label) in enumerate(zip(examples, labels, strict=True)):
        template = PromptTemplate(BETWEEN_EXAMPLES + prompt_template if i else prompt_template)
        row, special = prompt_row(example, template, tokenizer, i)
        with_special_tokens = with_special_tokens if i else special
        shown += template.render(row) + separator + label
    return tokenize(shown, tokenizer, with_special_tokens)


@contextmanager
def _as_it_is(model: PreTrainedModel) -> Iterator[None]:
    """Let a model say what it says: no dropout, and no repetition penalty or the like from its checkpoint."""
    owners = [model] if unwrapped(model) is model else [model, unwrapped(model)]
    kept = [owner.generation_config for owner in owners]
    ends = {name: getattr(kept[-1], name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    was_training = model.training
    model.eval()
    try:
        for owner in owners:
            owner.generation_config = GenerationConfig(**ends)
        with whole_states_for_the_output(model):
            yield
    finally:
        for owner, config in zip(owners, kept, strict=True):
            owner.generation_config = config
        model.train(was_training)


def _ends(model: Any) -> set[int]:
    """Return the tokens that end a text."""
    ends = unwrapped(model).generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, (list, tuple)) else {ends}


def _new_cache(model: PreTrainedModel) -> DynamicCache | None:
    """Return an empty cache of keys and values; `None` for a model that keeps more than these."""
    cache = DynamicCache(config=model.config.get_text_config())
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return cache if cache.layers and all(type(layer) in kinds for layer in cache.layers) else None


def _run_prefix(model: PreTrainedModel, prefix: list[int]) -> DynamicCache | None:
    """Return the examples' keys and values; `None` where there are none, or the model keeps more than these."""
    if not prefix:
        return None
    cache = _new_cache(model)
    if cache is None:
        logger.warning_once(
            f"{type(model).__name__} has states that cannot be shared; the examples run with every row."
        )
        return None
    model(input_ids=torch.tensor([prefix], device=model.device), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def _read_prompts(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, start: int, cache: DynamicCache | None
) -> DynamicCache | None:
    """Run all of the prompts but their last token, once for all of their answers; `None` where states cannot be shared."""
    if ids.shape[1] < start + 2:
        return cache
    if cache is None:
        cache = _new_cache(model)
    if cache is not None:
        places = {}
        if "position_ids" in inspect.signature(unwrapped(model).forward).parameters:
            places["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:-1].to(model.device)
        model(
            input_ids=ids[:, start:-1], attention_mask=mask[:, :-1].to(model.device), cache=cache, use_cache=True,
            logits_to_keep=1, **places,
        )  # fmt: skip
    return cache


def _counts_no_padding(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether padding may lie between the examples and a shorter row: a sliding window would count it.

    So may an attention that makes its own mask (GPT-Neo's local layers).
    """
    return all(type(layer) is DynamicLayer for layer in cache.layers) and odd_layers(model) is None


def _batches(lengths: list[int], batch_size: int, *, may_pad: bool) -> list[list[int]]:
    """Return row numbers, the longest rows first; those of one length alone go together where none may be padded."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        last = batches[-1] if batches else []
        if last and len(last) < batch_size and (may_pad or lengths[last[0]] == lengths[row]):
            last.append(row)
        else:
            batches.append([row])
    return batches


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
    shared = copy.deepcopy(cache)
    if shared is not None:
        shared.batch_repeat_interleave(len(rows))
    if copies > 1:
        shared = _read_prompts(model, ids, mask, len(prefix), shared)
    if shared is not None:
        shared.batch_repeat_interleave(copies)
        kwargs["cache"] = shared
    if num_samples:
        kwargs |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
    written = model.generate(
        input_ids=ids, attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens, pad_token_id=pad, **kwargs
    )
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    return [texts[i * copies : (i + 1) * copies] for i in range(len(rows))]
