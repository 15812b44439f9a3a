"""What `relish train` and `relish predict` need for a language model's own numbers: grids as options, decoding as a scorer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from .base_model_relish import base_path, reading
from .cli_shared import compute_dtype, say, to_own_gpu
from .decoding import decode_numbers
from .modeling_relish import RelishForSequenceRegression
from .number_grid_relish import NumberGrid, NumberGridError


class Method(str, Enum):
    """How `relish predict` gets a number out of a language model."""

    model = "model"
    rail = "rail"
    decode = "decode"
    rail_sample = "rail-sample"


def parse_grid(text: str) -> NumberGrid:
    """Read `--grid`: "0:5", "0:5:0.5", "1,2.5,4", or words that stand for numbers, "bad=1,good=2"."""
    try:
        if ":" in text:
            return NumberGrid.between(*(float(part) for part in text.split(":")))
        parts = [part.strip() for part in text.split(",")]
        if all("=" in part for part in parts):
            pairs = [part.rsplit("=", 1) for part in parts]
            return NumberGrid(tuple(float(value) for _, value in pairs), tuple(word for word, _ in pairs))
        return NumberGrid(tuple(float(part) for part in parts))
    except (ValueError, TypeError) as error:
        if isinstance(error, NumberGridError):
            raise
        raise NumberGridError(
            f"--grid is FROM:TO, FROM:TO:STEP, numbers with commas, or WORD=NUMBER with commas, got {text!r}."
        ) from None


def grid_of_labels(text: str | None, labels: Sequence[float], scale: tuple[float, float] | None) -> NumberGrid:
    """Return the grid that is named, else one that covers the label's scale, or the training labels' range."""
    if text is not None:
        return parse_grid(text)
    low, high = scale or (float(np.min(labels)), float(np.max(labels)))
    grid = NumberGrid.covering(low, high)
    say(f"number grid: {', '.join(grid.strings or ())} (choose another with --grid)")
    return grid


class Decoder:
    """A scorer, as `relish predict` takes one, that lets the language model write its number.

    After `predict`, `answers` is how many texts the model wrote in that call, `not_numbers` how many of them were no number.
    """

    def __init__(self, model: RelishForSequenceRegression, num_samples: int, seed: int) -> None:
        self.model = model
        self.config = model.config
        self.num_samples = num_samples
        self.seed = seed
        self.not_numbers = self.answers = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, for the digest that tells one run's parts from another's."""
        return self.model.state_dict()

    def _own_tokenizer(self) -> Any:
        return self.model._own_tokenizer()

    def predict(self, texts: Sequence[Any], *, batch_size: int = 32, truncation: str | None = None) -> np.ndarray:
        """Return (N,) numbers; what is no number counts as 0.0."""
        # Of the texts, so that a part that is computed again draws the same.
        seed = self.seed + zlib.crc32(repr(texts[0]).encode())
        found = decode_numbers(
            self.model.backbone, self._own_tokenizer(), texts, prompt_template=self.config.prompt_template,
            max_length=self.config.max_length, truncation=truncation or self.config.truncation, batch_size=batch_size,
            num_samples=self.num_samples, seed=seed,
        )  # fmt: skip
        self.not_numbers = found.not_numbers
        self.answers = sum(map(len, found.texts))
        return found.values.astype(np.float32)


def load_scorer(
    load_model: Any, name: str, method: Method, template: str | None, grid: str | None, samples: int, seed: int
) -> Any:
    """Load what `relish predict` scores with: a RELISH model, or a language model and how it is asked.

    Args:
        load_model: Loads a RELISH model by its name.
        name: A RELISH checkpoint, or a causal language model.
        method: How the number is got.
        template: Prompt, for a language model that is no RELISH checkpoint.
        grid: The numbers it may answer with, likewise.
        samples: Numbers drawn for each text by rail-sample.
        seed: Of the draws.

    Raises:
        ValueError: for a method that the model cannot answer by, or a prompt or grid that is missing or cannot be changed.
    """
    if whole_config_type(name) == "relish":
        if template is not None or grid is not None:
            raise ValueError("--template and --grid are for a plain language model; a RELISH model has its own.")
        model = load_model(name)
    else:
        if method is Method.model:
            raise ValueError(
                f"{name} is a plain language model: choose how it is asked with --method rail, decode or rail-sample."
            )
        if template is None or (grid is None and method is Method.rail):
            raise ValueError(
                "a plain language model needs --template, and --method rail the numbers it may say: --grid 0:5."
            )
        model = to_own_gpu(RelishForSequenceRegression.from_backbone(
            name, head_type="number_grid", number_grid=parse_grid(grid or "0,1"), dtype=compute_dtype(),
            prompt_template=template.replace("\\n", "\n"),
        ))  # fmt: skip
    if method is Method.model:
        return model
    if model.config.head_type != "number_grid":
        raise ValueError(
            f"--method {method.value} asks the language model itself; this model reads its states ({model.config.head_type})."
        )
    return model if method is Method.rail else Decoder(model, samples if method is Method.rail_sample else 0, seed)


def whole_config_type(name: str) -> str:
    """Return the model type of a checkpoint by its name; the folder of an adapter with a config is a RELISH model's."""
    if (Path(name) / "adapter_config.json").exists():
        if not (Path(name) / "config.json").exists():
            raise ValueError(
                f"{name} has an adapter of a language model alone: put it on its base model, save what merge_and_unload() of it "
                "returns with the tokenizer, and ask that."
            )
        return "relish"
    with reading(f"the model {name!r}"):
        return AutoConfig.from_pretrained(base_path(name), trust_remote_code=False).model_type
