"""What the commands of `relish` share: defaults, scoring a chunk, tables on the screen, JSON on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()

DEFAULT_BACKBONE = "embedded:SmolLM2-135M-Instruct"
METRICS = ("pearson", "spearman", "nrmse", "rmse", "mae")


def default_template(columns: tuple[str, ...]) -> str:
    """Return the prompt for a table without a template: the columns by name, then what asks for the score."""
    if len(columns) == 1:
        return f"Text: {{{columns[0]}}}\nScore:"
    return "\n".join(f"{name}: {{{name}}}" for name in columns) + "\nScore:"


def choose_layer(backbone: str, layer: str, revision: str | None = None) -> int | None:
    """Turn 'last', 'middle' or a number into a layer; 'middle' is just over half way, where states were read best.

    The backbone is looked up in any case, so that one that is missing is told by its name before anything else.
    """
    from .base_model_relish import whole_config

    total = whole_config(backbone, {"revision": revision} if revision else {}).num_hidden_layers
    if layer in ("last", "auto"):
        return None
    if layer == "middle":
        return max(1, round(total * 8 / 15))
    if not layer.isdigit():
        raise ValueError(f"--backbone-layer is a layer's number, 'middle', 'last' or 'auto', got {layer!r}.")
    return int(layer)


def find_layer(
    start: Callable[..., Any], splits: Any, tokenizer: Any, args: Any, work: Path, *, resume: bool
) -> tuple[int, dict[str, float]]:
    """Search the layer, print what was found, and keep it for a run that is resumed."""
    from .layer_search import best_layer, layer_table
    from .trainer import RelishTrainer

    kept = work / "layer_search.json"
    if resume and kept.exists():
        found = {int(layer): score for layer, score in json.loads(kept.read_text()).items()}
    else:
        found = RelishTrainer.search_layer(start(None), splits["train"], splits["validation"], tokenizer, args=args)
        work.mkdir(parents=True, exist_ok=True)
        write_json(kept, {str(layer): score for layer, score in found.items()})
    best = best_layer(found)
    say(layer_table(found))
    return best, {str(layer): score for layer, score in found.items()}


def compute_dtype() -> str:
    """Return bfloat16 where the processor computes in it, else float32: emulated, it is slower than float32."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def load_model(name: str) -> Any:
    """Load a trained model for scoring, on the GPU where there is one."""
    from .modeling_relish import RelishForSequenceRegression

    return to_own_gpu(RelishForSequenceRegression.from_pretrained(name))


def to_own_gpu(model: Any) -> Any:
    """Move a model to this process's GPU where there is one."""
    import torch

    own_gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # set by accelerate launch and torchrun
    return model.to(own_gpu) if torch.cuda.is_available() else model


def score_rows(scorer: Any, texts: list[dict[str, str]], source: str, done: int = 0, **kwargs: Any) -> Any:
    """Predict; a text that is too long is told with its table and its row there, `done` rows after the first."""
    with too_long_in(source, done):
        return scorer.predict(texts, **kwargs)


def check_lengths(scorer: Any, texts: list[dict[str, str]], source: str, done: int) -> None:
    """Raise for the first text that is too long, as [`score_rows`] does under `truncation="error"`, without scoring."""
    from .text_relish import PromptTemplate, encode_rows

    template, tokenizer = PromptTemplate(scorer.config.prompt_template), scorer._own_tokenizer()
    with too_long_in(source, done):
        for _ in encode_rows(texts, template, tokenizer, scorer.config.max_length, "error"):
            pass


@contextmanager
def too_long_in(source: str, done: int) -> Iterator[None]:
    """Tell a text that is too long with its table and its row there."""
    from .text_relish import TextTooLongError

    try:
        yield
    except TextTooLongError as error:
        place = re.sub(r"^row (\d+)", lambda found: f"{source}, row {done + int(found[1]) + 1}", str(error))
        raise TextTooLongError(place) from None


def target_columns(config: Any, column: str) -> list[str]:
    """Name the new columns: one for one target, with the targets' names for several."""
    return [column] if config.num_labels == 1 else [f"{column}_{name}" for name in config.target_names]


def check_columns(
    rows: list[dict[str, Any]], fields: tuple[str, ...], names: list[str], source: str, done: int
) -> None:
    """Refuse rows without the template's columns, or with a column that the prediction would overwrite."""
    from .data import TableError

    for number, row in enumerate(rows, start=done + 1):
        if missing := [f for f in fields if f not in row]:
            raise TableError(
                f"{source}, row {number}: there is no column {missing}; the model's template needs {list(fields)}, the table has "
                f"{list(row)}."
            )
        if taken := [n for n in names if n in row]:
            raise TableError(f"{source} has a column {taken} already; choose another name with --column.")


def chunks(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Cut a stream of rows into lists of at most `size`."""
    for first in rows:
        yield list(chain([first], islice(rows, size - 1)))


def strip_prefix(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Drop Trainer's prefix and its timings."""
    short = {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items()}
    return {k: v for k, v in short.items() if k.startswith(METRICS)}


def say(text: str) -> None:
    """Print as it is: names in brackets are no markup, and a path is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_metrics(rows: dict[str, dict[str, float]]) -> None:
    """Print one line of metrics per split."""
    table = Table("", *METRICS)
    for name, metrics in rows.items():
        table.add_row(escape(name), *(f"{metrics[m]:.4f}" for m in METRICS))
    console.print(table)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON to a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    temporary.replace(path)


def rows_digest(rows: Iterable[dict[str, Any]]) -> str:
    """Digest rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
