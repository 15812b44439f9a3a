"""Heads on a frozen backbone, one data set, three seeds: JSON of every run and its mean and spread.

    python benchmarks/heads.py DATA_FOLDER --label-min 0 --label-max 5 --name stsb

Every run trains on `train`, keeps the epoch with the best validation Pearson and reports `test` once. Settings are the same for
all heads but for the learning rate (3e-4 for RELISH, 1e-3 for linear and MLP heads, as in the prototype they came from).
"""

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from transformers import AutoTokenizer, set_seed

from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments, __version__
from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, METRICS, compute_dtype, write_json
from modeling_relish.data import Columns, label_matrix, load_splits
from modeling_relish.metrics import regression_metrics

TEMPLATE = "Sentence 1: {text_a}\nSentence 2: {text_b}\nScore:"
# row name -> (model settings, learning rate)
ROWS = {
    "linear, mean, last layer": ({"head_type": "linear"}, 1e-3),
    "MLP, mean, last layer": ({"head_type": "mlp"}, 1e-3),
    "RELISH, last layer (paper)": ({}, 3e-4),
    "linear, mean, layer 16": ({"head_type": "linear", "backbone_layer": 16}, 1e-3),
    "MLP, mean, layer 16": ({"head_type": "mlp", "backbone_layer": 16}, 1e-3),
    "RELISH, layer 16": ({"backbone_layer": 16}, 3e-4),
}


def run(splits, settings, learning_rate, epochs, seed, backbone, template, label_range, features_dtype="bfloat16"):
    set_seed(seed)
    model = RelishForSequenceRegression.from_backbone(
        backbone,
        prompt_template=template,
        label_min=label_range[0],
        label_max=label_range[1],
        dtype=compute_dtype(),
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(backbone))
    with tempfile.TemporaryDirectory() as folder:
        args = RelishTrainingArguments(
            output_dir=folder, num_train_epochs=epochs, learning_rate=learning_rate, warmup_steps=0.1, seed=seed,
            eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, logging_strategy="epoch", disable_tqdm=True,
            load_best_model_at_end=True, metric_for_best_model="pearson", greater_is_better=True, report_to="none",
            features_dtype=features_dtype,
        )  # fmt: skip
        trainer = RelishTrainer(
            model, args, train_dataset=splits["train"], eval_dataset=splits["validation"], processing_class=tokenizer
        )
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        predictions = trainer.predict(splits["test"]).predictions
    validation = [entry["eval_pearson"] for entry in trainer.state.log_history if "eval_pearson" in entry]
    return {
        "seed": seed,
        "validation_pearson": validation,
        "test": regression_metrics(predictions, label_matrix(splits["test"]), label_range=label_range),
        "head_training_seconds": round(seconds, 1),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def main(
    data: str,
    name: Annotated[str, typer.Option()],
    label_min: Annotated[float, typer.Option()],
    label_max: Annotated[float, typer.Option()],
    epochs: float = 8.0,
    seeds: int = 3,
    backbone: str = DEFAULT_BACKBONE,
    template: str = TEMPLATE,
    only: Annotated[list[str] | None, typer.Option(help="Rows to run.")] = None,
    features_dtype: Annotated[str, typer.Option(help="Of the cached states; int8 to see what it costs.")] = "bfloat16",
    output: Path = Path(__file__).parent / "results",
):
    splits = load_splits(data, Columns(text=("text_a", "text_b"), label=("score",)))
    rows = {}
    for row, (settings, learning_rate) in ROWS.items():
        if only and row not in only:
            continue
        runs = [
            run(
                splits,
                settings,
                learning_rate,
                epochs,
                seed,
                backbone,
                template,
                (label_min, label_max),
                features_dtype,
            )
            for seed in range(seeds)
        ]
        summary = {
            metric: {
                "mean": round(float(np.mean([r["test"][metric] for r in runs])), 4),
                "std": round(float(np.std([r["test"][metric] for r in runs], ddof=1)), 4) if seeds > 1 else 0.0,
            }
            for metric in METRICS
        }
        rows[row] = {"settings": settings, "learning_rate": learning_rate, "summary": summary, "runs": runs}
        print(row, json.dumps(summary), flush=True)
    write_json(
        output / f"heads-{name}.json",
        {
            "data": {"name": name, **{split: len(splits[split]) for split in splits}},
            "backbone": backbone,
            "template": template,
            "epochs": epochs,
            "batch_size": 32,
            "objective": "huber",
            "features_dtype": features_dtype,
            "chosen_by": "validation Pearson, best epoch",
            "versions": {
                "modeling_relish": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "rows": rows,
        },
    )


if __name__ == "__main__":
    typer.run(main)
