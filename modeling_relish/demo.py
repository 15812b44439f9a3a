"""`make demo`: train RELISH on 4,200 rated tweets, beside the heads and the lexicon that users pick today.

Everything comes from the package registry: SmolLM2-135M-Instruct, the tweets with the mean of 20 raters from -4 to 4 (Hutto and
Gilbert, ICWSM 2014), and the same authors' lexicon program. Numbers are on rows that no training has seen.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import typer
from datasets import DatasetDict
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, set_seed

from .cli_shared import DEFAULT_BACKBONE, compute_dtype, write_json
from .data import Columns, label_matrix, load_splits
from .embedded import fetch_backbone, fetch_lexicon, fetch_tweets
from .metrics import regression_metrics
from .modeling_relish import RelishForSequenceRegression
from .trainer import RelishTrainer
from .training_args import RelishTrainingArguments

TEMPLATE = "Rate the sentiment of the text from -4 (most negative) to 4 (most positive).\nText: {text}\nSentiment:"
LAYER = 16
# name, settings, learning rate
HEADS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("linear, mean of tokens", {"head_type": "linear"}, 1e-3),
    ("MLP, mean of tokens", {"head_type": "mlp"}, 1e-3),
    ("MLP, last token", {"head_type": "mlp", "pooling": "last"}, 1e-3),
    ("RELISH", {"head_type": "relish"}, 3e-4),
)
EXAMPLES = (
    "I love this, best day of the year!",
    "Not bad at all, but the ending could have been better.",
    "Stuck in the rain for two hours and nobody even said sorry.",
)
console = Console(width=100)


def main(
    output: Annotated[Path | None, typer.Option(help="Keep the RELISH model here.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of split, head and row order.")] = 0,
    epochs: Annotated[float, typer.Option(help="Passes over the training rows.")] = 6.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all metrics here.")] = None,
) -> None:
    """Fetch, train, compare and predict; one to three minutes on two cores after the downloads."""
    fetch_backbone(DEFAULT_BACKBONE.split(":")[1])
    lexicon = fetch_lexicon()
    started = time.monotonic()
    splits = load_splits(
        str(fetch_tweets()),
        Columns(text=("text",), label=("score",)),
        validation_fraction=0.15,
        test_fraction=0.15,
        seed=seed,
    )
    rows = ", ".join(f"{name} {len(split)}" for name, split in splits.items())
    console.print(f"rated tweets: {rows}; backbone {DEFAULT_BACKBONE}, layer {LAYER} of 30, frozen", highlight=False)

    results = {"lexicon (vaderSentiment 3.3.2)": lexicon_metrics(lexicon, splits)}
    for name, settings, learning_rate in HEADS:
        model, results[name] = train_head(splits, settings, learning_rate, epochs, seed)
    show(results)
    scores = model.predict(EXAMPLES, tokenizer())
    for text, score in zip(EXAMPLES, scores, strict=True):
        console.print(f"{score:+.2f}  {text}", highlight=False)
    console.print(f"{time.monotonic() - started:.0f} s after the downloads", highlight=False)
    if output is not None:
        model.save_pretrained(output)
        tokenizer().save_pretrained(output)
    if json_file is not None:
        write_json(json_file, {"seed": seed, "epochs": epochs, "test": results})


def tokenizer() -> Any:
    """Load the default backbone's tokenizer."""
    return AutoTokenizer.from_pretrained(str(fetch_backbone(DEFAULT_BACKBONE.split(":")[1])))


def train_head(
    splits: DatasetDict, settings: dict[str, Any], learning_rate: float, epochs: float, seed: int
) -> tuple[RelishForSequenceRegression, dict[str, float]]:
    """Train one head on the frozen backbone, keep its best epoch by validation Pearson, and return its test metrics."""
    set_seed(seed)
    model = RelishForSequenceRegression.from_backbone(
        DEFAULT_BACKBONE, backbone_layer=LAYER, prompt_template=TEMPLATE, label_min=-4.0, label_max=4.0,
        dtype=compute_dtype(), **settings,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = RelishTrainingArguments(
            output_dir=folder, num_train_epochs=epochs, learning_rate=learning_rate, warmup_steps=0.1, seed=seed,
            eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, logging_strategy="epoch",
            load_best_model_at_end=True, metric_for_best_model="pearson", greater_is_better=True, report_to="none",
            dataset_name="rated tweets (Hutto and Gilbert, ICWSM 2014)",
        )  # fmt: skip
        trainer = RelishTrainer(
            model, args, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=tokenizer()
        )
        trainer.train()
        predictions = trainer.predict(splits["test"]).predictions
    return model, regression_metrics(predictions, label_matrix(splits["test"]), label_range=model.config.label_range)


def lexicon_metrics(folder: Path, splits: DatasetDict) -> dict[str, float]:
    """Score the test rows with the lexicon; a line fitted on the training rows brings it to the raters' scale."""
    analyzer = _lexicon_module(folder).SentimentIntensityAnalyzer()
    compound = {
        name: [analyzer.polarity_scores(t)["compound"] for t in splits[name]["text"]] for name in ("train", "test")
    }
    slope, start = np.polyfit(compound["train"], label_matrix(splits["train"])[:, 0], 1)
    scores = slope * np.array(compound["test"]) + start
    return regression_metrics(scores, label_matrix(splits["test"]), label_range=(-4.0, 4.0))


def _lexicon_module(folder: Path) -> ModuleType:
    path = folder / "vaderSentiment" / "vaderSentiment.py"
    spec = importlib.util.spec_from_file_location("relish_demo_lexicon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def show(results: dict[str, dict[str, float]]) -> None:
    """Print the table of test metrics."""
    table = Table("test rows", "Pearson", "Spearman", "NRMSE")
    for name, metrics in results.items():
        table.add_row(name, *(f"{metrics[m]:.3f}" for m in ("pearson", "spearman", "nrmse")))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
