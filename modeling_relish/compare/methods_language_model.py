"""Methods that let a language model say the number: decoding, RAIL, cross-entropy, RAFT, MBR."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import set_seed

from ..base_model_relish import bounded_length
from ..decoding import DecodedNumbers, decode_numbers
from ..modeling_relish import RelishForSequenceRegression
from ..number_grid_relish import NumberGrid, decimal_step
from ..text_relish import PromptTemplate, tokenize
from .method import Method, Options, Settings, lora, why_no_package
from .methods_heads import LORA_RATES
from .tasks import CompareError, Task
from .training import Outcome, fit, validated
from .workbench import Workbench

NEW_TOKENS = 6
BATCH = 32
_TRAINED_COST = 3.5
_SAMPLED_ROWS = 128  # continuations at once


def written_grid(task: Task) -> NumberGrid:
    """Return the numbers that cross-entropy learns to write, each ended by a line's end."""
    return NumberGrid.between(*task.label_range, decimal_step(*task.label_range), terminator="\n")


def new_tokens(bench: Workbench) -> int:
    """Return how many tokens an answer may have: enough for the longest number of the scale and what ends it."""
    tokens = written_grid(bench.task).resolve(bench.tokenizer, bench.prompt).tokens or ()
    return max(NEW_TOKENS, *map(len, tokens))


class LanguageModelMethod(Method):
    """A method that needs a causal language model and a prompt that ends in words."""

    def why_not(self, bench: Workbench, regime: str) -> str | None:
        """Say whether LoRA or the language model is missing."""
        if regime == "lora" and (reason := why_no_package("peft", "peft", "peft")):
            return reason
        return bench.why_no_language_model


class Decoding(LanguageModelMethod):
    """Numbers written as text, by the model as it is.

    Args:
        key: As in [`Method`].
        title: Of its row.
        kind: `"zero"`, `"many"` (examples of the training rows in the prompt) or `"samples"` (RAIL by sampling).
    """

    def __init__(self, key: str, title: str, kind: str) -> None:
        super().__init__(key, title)
        self.kind, self.has_seeds = kind, kind != "zero"

    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return the number of examples or samples."""
        own = {"many": {"shots": options.shots}, "samples": {"samples": options.samples}}.get(self.kind, {})
        return {"validation_rows": options.decoded_validation_rows, "max_new_tokens": new_tokens(bench), **own}

    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate by tokens read, and by tokens written, which are slow."""
        rows = len(bench.task.splits["test"]) + min(
            options.decoded_validation_rows, len(bench.task.splits["validation"])
        )
        read = bench.tokens("test") * rows / len(bench.task.splits["test"])
        reading, writing = {"zero": (1, 4), "many": (6, 24), "samples": (1, 2 * options.samples)}[self.kind]
        return 10 + (reading * read + writing * NEW_TOKENS * rows) / bench.tokens_per_second

    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Decode the test rows, and some of the validation rows."""
        model = bench.language_model()
        more: dict[str, Any] = {"batch_size": BATCH, "seed": seed, "max_new_tokens": settings["max_new_tokens"]}
        notes = []
        if self.kind == "many":
            more["examples"] = _examples(bench, settings["shots"], seed)
            more["batch_size"] = 8
            if not more["examples"]:
                raise CompareError(f"no example fits into the context of {bench.name} before the longest prompt.")
            if len(more["examples"]) < settings["shots"]:
                notes.append(
                    f"{len(more['examples'])} examples fit into the context or the data, of {settings['shots']}"
                )
        if self.kind == "samples":
            more |= {"num_samples": settings["samples"], "batch_size": max(1, _SAMPLED_ROWS // settings["samples"])}
        return [decoded(bench, model, settings["validation_rows"], notes, **more)]


class RailGrid(LanguageModelMethod):
    """The expected number of a grid under the model as it is (RAIL)."""

    has_seeds = False

    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return the grid."""
        return {"number_grid": _digits(bench)}

    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate by tokens."""
        return 10 + 1.2 * (bench.tokens("test") + bench.tokens("validation")) / bench.tokens_per_second

    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Score validation and test rows."""
        grid = NumberGrid.from_setting(settings["number_grid"]).resolve(bench.tokenizer, bench.prompt)
        model = RelishForSequenceRegression.from_backbone(
            bench.language_model(), head_type="number_grid", number_grid=grid, prompt_template=bench.prompt,
            max_length=bench.max_length,
        )  # fmt: skip
        validation = model.predict(bench.task.texts("validation"), bench.tokenizer, batch_size=BATCH)
        started = time.monotonic()
        predictions = model.predict(bench.task.texts("test"), bench.tokenizer, batch_size=BATCH)
        seconds = round(time.monotonic() - started, 4)
        return [Outcome(predictions.astype(np.float64), validated(bench.task, validation), predict_seconds=seconds)]


class TunedLanguageModel(LanguageModelMethod):
    """A language model trained by LoRA over a number grid: RAFT, MBR, or cross-entropy of the number as it is written.

    Args:
        key: As in [`Method`].
        *titles: Of its rows; cross-entropy is read by decoding, and by the expected number.
        objective: raft, mbr or cross_entropy.
    """

    regimes = ("lora",)

    def __init__(self, key: str, *titles: str, objective: str) -> None:
        super().__init__(key, *titles)
        self.objective = objective

    def grid(self, regime: str) -> Sequence[Settings]:
        """Return learning rates."""
        return [{"learning_rate": rate} for rate in LORA_RATES]

    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return epochs, batch size, rank and grid: any setting that [`NumberGrid.from_setting`] reads takes its place."""
        writes = self.objective == "cross_entropy"
        return {
            "epochs": options.backbone_epochs, "batch_size": options.backbone_batch_size, "lora_rank": options.lora_rank,
            "number_grid": written_grid(bench.task).to_dict() if writes else _digits(bench),
            **(
                {"validation_rows": options.decoded_validation_rows, "max_new_tokens": new_tokens(bench)} if writes else {}
            ),
        }  # fmt: skip

    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate by tokens."""
        trained = _TRAINED_COST * bench.tokens("train") + bench.tokens("validation")
        tokens = 1.3 * options.backbone_epochs * trained + bench.tokens("test") * (3 if len(self.titles) > 1 else 1)
        return 10 + tokens / bench.tokens_per_second

    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Train, and read the answers in one way or two."""
        grid = NumberGrid.from_setting(settings["number_grid"])
        set_seed(seed)
        model, outcome = fit(
            bench, bench.language_model(), settings, seed, peft_config=lora("CAUSAL_LM", settings["lora_rank"]),
            number_grid=grid, prompt_template=bench.prompt, objective=self.objective,
            train_sampling_strategy="group_by_length",
        )  # fmt: skip
        if self.objective != "cross_entropy":
            return [outcome]
        read = decoded(
            bench, model, settings["validation_rows"], [], batch_size=BATCH, trained=outcome,
            max_new_tokens=settings["max_new_tokens"],
        )  # fmt: skip
        return [read, outcome]


def decoded(
    bench: Workbench,
    model: Any,
    validation_rows: int,
    notes: Sequence[str],
    *,
    trained: Outcome | None = None,
    **settings: Any,
) -> Outcome:
    """Decode the test rows and a sample of the validation rows; `trained` is what the model's training took."""
    texts = bench.task.texts("validation")
    chosen = sorted(np.random.default_rng(0).permutation(len(texts))[:validation_rows].tolist())
    if len(chosen) < len(texts):
        notes = [*notes, f"its validation metrics are of {len(chosen)} of {len(texts)} rows"]
    longest = bounded_length(bench.max_length, bench.config, settings["max_new_tokens"])
    settings |= {"prompt_template": bench.prompt, "max_length": longest}
    validation = decode_numbers(model, bench.tokenizer, [texts[i] for i in chosen], **settings)
    started = time.monotonic()
    found = decode_numbers(model, bench.tokenizer, bench.task.texts("test"), **settings)
    costs: dict[str, Any] = {"predict_seconds": round(time.monotonic() - started, 4)}
    if trained is not None:
        names = ("trainable_parameters", "train_seconds", "curve")
        costs |= {name: getattr(trained, name) for name in names}
    return Outcome(
        found.values, validated(bench.task, validation.values, chosen), notes=[*notes, *_not_numbers(found)], **costs
    )


def _digits(bench: Workbench) -> list[float]:
    return list(NumberGrid.covering(*bench.task.label_range).values)


def _not_numbers(found: DecodedNumbers) -> list[str]:
    answers = sum(map(len, found.texts))
    share = found.not_numbers / answers
    return [f"{share:.1%} of {answers} answers were no number, and count as 0"] if found.not_numbers else []


def _examples(bench: Workbench, shots: int, seed: int) -> list[tuple[dict[str, str], float]]:
    """Draw training rows to show, as many as fit into the context before the longest prompt."""
    texts, labels = bench.task.texts("train"), bench.task.labels("train")
    template = PromptTemplate(bench.prompt)
    context = getattr(bench.config, "max_position_embeddings", None) or math.inf
    longest = max(len(row) for split in ("validation", "test") for row in bench.ids[split])
    room = context - longest - new_tokens(bench)
    chosen: list[tuple[dict[str, str], float]] = []
    step = decimal_step(*bench.task.label_range)
    for index in np.random.default_rng(seed).permutation(len(texts))[:shots]:
        label = float(f"{round(float(labels[index]) / step) * step:.6g}")
        room -= len(tokenize(f"{template.render(texts[index])} {label:.6g}\n\n", bench.tokenizer)) + 2
        if room < 0:
            break
        chosen.append((texts[index], label))
    return chosen
