"""Numbers as a language model says them: a grid of values, their tokens after a prompt, and a trie of those tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers.utils.generic import maybe_autocast

from .backbone_relish import check_finite
from .text_relish import PromptTemplate, TemplateError, tokenize

AUTO = "auto"
EOS = "eos"
LINE_END = "\n"
# Stands in for the row's text where a prompt's end is tokenized. Only what follows the last field is looked at.
_SAMPLE_TEXT = "A text."


class NumberGridError(ValueError):
    """A grid of numbers that cannot be used; the message names the value, the prompt or the tokenizer."""


@dataclass(frozen=True)
class NumberGrid:
    """The numbers that a language model may answer with (RAIL and RAFT: the grid G).

    Args:
        values: G finite numbers, in label units, all different.
        strings: How each is written; `None` writes the numbers themselves, with as many decimals as the finest needs.
        separator: Text between the prompt and the number; `"auto"` is a space, and nothing after a prompt that ends in white
            space.
        terminator: What ends a number. `"auto"` is nothing where no number's tokens begin another's, else the line's end:
            without an end, the probability of "1" would hold that of "10". (`"eos"`, the tokenizer's end of text, is what
            `"auto"` takes where the tokenizer drops a line's end; after a number, few untrained models expect it.) `None`
            takes that mass as it is: p("1") is then the probability of everything that begins with "1". Any other text
            stands for itself.
        tokens: Token ids after the prompt, one sequence for each value; found by [`resolve`].

    Raises:
        NumberGridError: for an empty grid, a value that is no finite number, two that are equal, or tokens that do not fit.
    """

    values: tuple[float, ...]
    strings: tuple[str, ...] | None = None
    separator: str = AUTO
    terminator: str | None = AUTO
    tokens: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        values = tuple(_number(v) + 0.0 for v in self.values)  # + 0.0: what is -0.0 would be written "-0"
        if not values:
            raise NumberGridError("the number grid is empty: give at least one value.")
        if bad := [v for v in values if not math.isfinite(v)]:
            raise NumberGridError(f"the number grid holds {bad}: its values must be finite.")
        if repeated := sorted({v for v in values if values.count(v) > 1}):
            raise NumberGridError(f"the number grid holds {repeated} more than once.")
        strings = number_strings(values) if self.strings is None else tuple(map(str, self.strings))
        if len(strings) != len(values):
            raise NumberGridError(f"the number grid has {len(values)} values and {len(strings)} strings: one for each.")
        if empty := [v for v, s in zip(values, strings, strict=True) if not s.strip()]:
            raise NumberGridError(f"the number grid writes {empty} as nothing.")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "strings", strings)
        if self.tokens is not None:
            self._check_tokens(self.tokens)

    # ------------------------------------------------------------------ ways to write one

    @classmethod
    def between(cls, start: float, stop: float, step: float = 1.0, **kwargs: Any) -> NumberGrid:
        """Return start, start + step, ... stop, written with the decimals of `step` and `start`: `between(0, 5, 0.1)`."""
        if not (0 < step < math.inf and -math.inf < start <= stop < math.inf):
            raise NumberGridError(
                f"a grid runs upwards in steps above 0 between finite ends, got from {start} to {stop} by {step}."
            )
        decimals = max(decimals_of(start), decimals_of(step))
        count = math.floor((stop - start) / step + 1e-9) + 1
        values = [round(start + i * step, decimals) + 0.0 for i in range(count)]
        return cls(tuple(values), tuple(f"{v:.{decimals}f}" for v in values), **kwargs)

    @classmethod
    def covering(cls, low: float, high: float, **kwargs: Any) -> NumberGrid:
        """Return a grid for a label's scale, both ends in it: every number between is then an expected value (RAFT, section 4).

        Whole steps up to 20 of them; else twenty round steps.
        """
        if not -math.inf < low < high < math.inf:
            raise NumberGridError(f"the label's scale must have a lower and a higher end, got {low} and {high}.")
        span = high - low
        step = 1.0 if 1 <= span <= 20 and span == round(span) else float(f"{span / 20:.6g}")
        inner = [v for v in cls.between(low, high, step).values[1:] if high - v > step / 2]
        return cls((low, *inner, high), **kwargs)  # the ends as they are, whatever the steps were rounded to

    @classmethod
    def words(cls, words: Mapping[str, float], **kwargs: Any) -> NumberGrid:
        """Return a grid of words, letters or added tokens that stand for numbers: `words({"bad": 1, "good": 2})`."""
        return cls(tuple(words.values()), tuple(words), **kwargs)

    @classmethod
    def from_setting(cls, setting: Any) -> NumberGrid:
        """Read a grid from a configuration's dict, a mapping word -> value, or a sequence of numbers."""
        if isinstance(setting, NumberGrid):
            return setting
        if isinstance(setting, Mapping) and "values" in setting:
            known, tokens = [f.name for f in fields(cls)], setting.get("tokens")
            if unknown := sorted(set(setting) - set(known)):
                raise NumberGridError(f"a number grid has no {unknown}; it has {known}.")
            tokens = None if tokens is None else tuple(tuple(map(int, t)) for t in tokens)
            return cls(**{**setting, "values": tuple(setting["values"]), "tokens": tokens})
        if isinstance(setting, Mapping):
            return cls.words(setting)
        if isinstance(setting, Iterable) and not isinstance(setting, str):
            return cls(tuple(setting))
        raise NumberGridError(f"a number grid is a sequence of numbers or a mapping word -> number, got {setting!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return what a configuration keeps, as JSON has it."""
        tokens = None if self.tokens is None else [list(t) for t in self.tokens]
        return {"values": list(self.values), "strings": list(self.strings or ()), "separator": self.separator,
                "terminator": self.terminator, "tokens": tokens}  # fmt: skip

    # ------------------------------------------------------------------ tokens

    @property
    def num_appended_tokens(self) -> int:
        """How many positions after the prompt the longest number takes: its last token is only looked up."""
        return max(map(len, self.tokens or ((0,),))) - 1

    def resolve(self, tokenizer: Any, prompt_template: str) -> NumberGrid:
        """Find every value's tokens as they follow the prompt's end.

        A leading space counts, and digits may merge with it or with each other; so prompt and number are tokenized
        together, and the number's tokens are what comes after the prompt's own.

        Args:
            tokenizer: The language model's.
            prompt_template: As [`PromptTemplate`]; it must end in words of its own, after the last field.

        Raises:
            NumberGridError: if the number's tokens cannot be told from the prompt's, one is unknown to the tokenizer, or two
                values share a sequence (their names are in the message).
        """
        if self.tokens is not None:
            self.check_resolved(tokenizer, prompt_template)
            return self
        prompt = _sample_prompt(prompt_template)
        start = tokenize(prompt, tokenizer)
        separator = self.separator
        if separator == AUTO:
            separator = "" if prompt[-1].isspace() else " "

        def ended(end: str | None) -> list[tuple[int, ...]]:
            text = "" if end in (None, EOS) else end
            found = [self._continuation(tokenizer, prompt, start, f"{separator}{s}{text}") for s in self.strings or ()]
            if end == EOS and tokenizer.eos_token_id is None:
                raise NumberGridError("the tokenizer has no end-of-text token; name the grid's terminator.")
            return [(*t, tokenizer.eos_token_id) for t in found] if end == EOS else found

        terminator = self.terminator
        if terminator == AUTO:
            terminator = None
            if _prefix_pair(ended(None)) is not None:
                terminator = LINE_END if self._is_told_apart(ended, LINE_END) else EOS
        tokens = ended(terminator)
        if self.terminator not in (AUTO, None) and (pair := _prefix_pair(tokens)) is not None:
            raise NumberGridError(
                f"the terminator {self.terminator!r} does not end the numbers: the tokens {list(pair[0])} of one begin those "
                f"of another, {list(pair[1])}. Name another, {EOS!r} or {AUTO!r}; terminator=None counts them together."
            )
        return replace(self, separator=separator, terminator=terminator, tokens=tuple(tokens))

    def check_resolved(self, tokenizer: Any, prompt_template: str) -> None:
        """Compare the tokens that [`resolve`] found with those of a tokenizer and a prompt; tokens given by hand are left.

        Raises:
            NumberGridError: where they differ: probabilities of other tokens would be a wrong number that looks right.
        """
        if tokenizer is None or self.tokens is None or self.separator == AUTO:  # there is nothing to compare
            return
        anew = replace(self, tokens=None).resolve(tokenizer, prompt_template).tokens or ()
        for text, then, now in zip(self.strings or (), self.tokens, anew, strict=True):
            if then != now:
                raise NumberGridError(
                    f"the number grid's tokens are those of another tokenizer or another end of the prompt: {text!r} has "
                    f"{list(then)} in the grid, and {list(now)} here. Use the tokenizer and the prompt that the grid was "
                    "resolved for, or start from a grid without tokens."
                )

    @staticmethod
    def _is_told_apart(ended: Callable[[str], list[tuple[int, ...]]], end: str) -> bool:
        """Whether the tokenizer keeps an end, so that no number begins another."""
        try:
            return _prefix_pair(ended(end)) is None
        except NumberGridError:
            return False

    def _continuation(self, tokenizer: Any, prompt: str, start: list[int], text: str) -> tuple[int, ...]:
        whole = tokenize(prompt + text, tokenizer)
        if whole[: len(start)] != start or len(whole) <= len(start):
            tail = prompt[-12:]
            raise NumberGridError(
                f"the tokens of {text!r} cannot be told from those of the prompt's end {tail!r}: they merge, or the tokenizer "
                "ends every text with a token of its own. End the template without white space and let separator=' ' write "
                "it, or choose other strings."
            )
        tokens = tuple(whole[len(start) :])
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is not None and unknown in tokens:
            raise NumberGridError(f"the tokenizer does not know {text!r}: it has only {tokenizer.unk_token!r} for it.")
        return tokens

    def _check_tokens(self, tokens: Sequence[tuple[int, ...]]) -> None:
        if len(tokens) != len(self.values):
            raise NumberGridError(f"{len(self.values)} values and {len(tokens)} token sequences: one for each.")
        seen: dict[tuple[int, ...], int] = {}
        for index, sequence in enumerate(tokens):
            if not sequence or min(sequence) < 0:
                wrong = list(sequence) or "no token"
                raise NumberGridError(f"{(self.strings or ())[index]!r} has {wrong}; token ids are 0 or more.")
            if sequence in seen:
                first = seen[sequence]
                raise NumberGridError(
                    f"the values {self.values[first]} ({(self.strings or ())[first]!r}) and {self.values[index]} "
                    f"({(self.strings or ())[index]!r}) have the same tokens {list(sequence)} in this tokenizer."
                )
            seen[sequence] = index


@dataclass(frozen=True)
class TrieTables:
    """A trie as tensors on one device; E edges, N rows after the root, G sequences."""

    tokens: torch.Tensor  # (N,) token ids of the rows
    depths: torch.Tensor  # (N,) 1 = follows the prompt
    ancestors: torch.Tensor  # (N, N) true where the second is on the way to the first, itself included
    edge_rows: torch.Tensor  # (E,)
    edge_tokens: torch.Tensor  # (E,)
    paths: torch.Tensor  # (G, E) 1 where the edge is on the sequence's way


class TokenTrie:
    """Token sequences of a grid with their common beginnings shared.

    Row 0 is the prompt's last token; rows 1 .. N are the tokens that others follow. An edge leads from a row to a token that
    may come next; a sequence is the edges on its way. Only rows are run through a model; the last token of a sequence is
    only looked up in the distribution before it.

    Its tables are no buffers of a module: they follow from the sequences, and a model built on the meta device would lose them.

    Args:
        sequences: G token sequences, all different.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = [tuple(s) for s in sequences]
        self._rows = sorted({s[:i] for s in self.sequences for i in range(len(s))}, key=lambda p: (len(p), p))
        self._tables: dict[torch.device, TrieTables] = {}

    def __len__(self) -> int:
        """Return N, the number of tokens that are run after the prompt."""
        return len(self._rows) - 1

    def tables(self, device: torch.device) -> TrieTables:
        """Return the trie as tensors on a device."""
        if device not in self._tables:
            # Kept for training too, whatever mode the first call is in.
            with torch.device("cpu"), torch.inference_mode(False):
                made = self._make_tables()
                self._tables[device] = TrieTables(*(getattr(made, f.name).to(device) for f in fields(made)))
        return self._tables[device]

    def _make_tables(self) -> TrieTables:
        row_of = {prefix: row for row, prefix in enumerate(self._rows)}
        edges = sorted({(row_of[s[:i]], s[i]) for s in self.sequences for i in range(len(s))})
        edge_of = {edge: index for index, edge in enumerate(edges)}
        nodes = self._rows[1:]
        ancestors = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for row, prefix in enumerate(nodes):
            for length in range(1, len(prefix) + 1):
                ancestors[row, row_of[prefix[:length]] - 1] = True
        paths = torch.zeros(len(self.sequences), len(edges))
        for index, sequence in enumerate(self.sequences):
            for i in range(len(sequence)):
                paths[index, edge_of[row_of[sequence[:i]], sequence[i]]] = 1.0
        return TrieTables(
            tokens=torch.tensor([p[-1] for p in nodes], dtype=torch.long),
            depths=torch.tensor([len(p) for p in nodes], dtype=torch.long),
            ancestors=ancestors,
            edge_rows=torch.tensor([row for row, _ in edges], dtype=torch.long),
            edge_tokens=torch.tensor([token for _, token in edges], dtype=torch.long),
            paths=paths,
        )

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return (B, G) log-probabilities of the sequences from (B, N + 1, V) logits of the rows, in fp32.

        The softmax runs over the whole vocabulary, as in RAIL (RAFT, section 3).

        Raises:
            NonFiniteStatesError: where the logits of a row have no finite sum, or one of a number's own is infinite.
        """
        tables = self.tables(logits.device)
        dtype = logits.dtype
        logits = logits.float()
        log_total = logits.logsumexp(-1)
        said = logits[:, tables.edge_rows, tables.edge_tokens]
        # Minus infinity at a number is an overflow too; times the zeros of other paths it would be NaN.
        for values in (log_total, said):
            check_finite(values.to(dtype)[..., None], torch.ones_like(values), "the language model's logits")
        chosen = said - log_total[:, tables.edge_rows]
        with maybe_autocast(logits.device.type, enabled=False):  # a product in bf16 would keep three digits
            return chosen @ tables.paths.T


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise NumberGridError(f"the number grid holds {value!r}, which is no number.") from None


def number_strings(values: Sequence[float]) -> tuple[str, ...]:
    """Write numbers with as many decimals as the finest of them needs: (0, 0.5) -> "0.0", "0.5"; (1, 10) -> "1", "10"."""
    decimals = max(map(decimals_of, values))
    return tuple(f"{v + 0.0:.{decimals}f}" for v in values)


def decimal_step(low: float, high: float) -> float:
    """Return the step of numbers as people would write them on a scale: 0.1 on 0 to 5, 1 on 0 to 100, 0.01 on 0 to 1."""
    return round(10.0 ** (math.floor(math.log10((high - low) / 2)) - 1), 10)


def decimals_of(value: float) -> int:
    """Return how many decimals a number is written with, ten at most."""
    text = f"{float(value):.10f}".rstrip("0")
    return len(text.split(".")[1])


def _sample_prompt(prompt_template: str) -> str:
    template = PromptTemplate(prompt_template)
    if not template.parts or template.parts[-1][1] is not None:
        raise TemplateError(
            f"prompt template {prompt_template!r} ends in a field: the number would follow the row's own text, and its tokens "
            "would depend on it. End the template with words that ask for the number, as 'Score:'."
        )
    return template.render(dict.fromkeys(template.fields, _SAMPLE_TEXT))


def _prefix_pair(tokens: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    known = set(tokens)
    for sequence in tokens:
        for length in range(1, len(sequence)):
            if sequence[:length] in known:
                return sequence[:length], sequence
    return None
