"""Does the layer search find a good layer? The search's choice against every candidate trained in full.

    python benchmarks/layers.py DATA_FOLDER --name stsb --label-min 0 --label-max 5

The search sees a sample of train and validation. Then each candidate is trained on all training rows, keeps its epoch with the
best validation Pearson, and is tested once.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from heads import TEMPLATE, run
from transformers import AutoTokenizer

from modeling_relish import FeatureCache, RelishForSequenceRegression, RelishTrainingArguments
from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, compute_dtype, write_json
from modeling_relish.data import Columns, load_splits
from modeling_relish.features import fill_layers
from modeling_relish.layer_search import at_layer, best_layer, candidate_layers, search_layer
from modeling_relish.training_data import token_ids


def main(
    data: str,
    name: Annotated[str, typer.Option()],
    label_min: Annotated[float, typer.Option()],
    label_max: Annotated[float, typer.Option()],
    epochs: float = 8.0,
    seed: int = 0,
    backbone: str = DEFAULT_BACKBONE,
    output: Path = Path(__file__).parent / "results",
):
    splits = load_splits(data, Columns(text=("text_a", "text_b"), label=("score",)))
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(backbone))
    whole = RelishForSequenceRegression.from_backbone(
        backbone, prompt_template=TEMPLATE, label_min=label_min, label_max=label_max, dtype=compute_dtype()
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        args = RelishTrainingArguments(output_dir=folder, disable_tqdm=True, seed=seed)
        found = search_layer(whole, splits["train"], splits["validation"], tokenizer, args=args)
    seconds = time.monotonic() - started
    print("search", found, best_layer(found), f"{seconds:.0f} s", flush=True)

    layers = candidate_layers(whole.config.num_hidden_layers)
    caches = [FeatureCache(at_layer(whole, layer)) for layer in layers]
    for split in splits.values():
        fill_layers(caches, at_layer(whole, layers=layers), token_ids(split, "all", whole.config, tokenizer))
    tested = {}
    for layer in layers:
        result = run(splits, {"backbone_layer": layer}, 3e-4, epochs, seed, backbone, TEMPLATE, (label_min, label_max))
        tested[layer] = {**result["test"], "validation_pearson": max(result["validation_pearson"])}
        print(layer, tested[layer], flush=True)
    chosen, best = best_layer(found), max(tested, key=lambda layer: tested[layer]["pearson"])
    write_json(
        output / f"layers-{name}.json",
        {
            "data": name, "backbone": backbone, "epochs": epochs, "seed": seed, "search_seconds": round(seconds, 1),
            "search": found, "chosen": chosen, "best_by_test": best, "test": tested,
            "lost": round(tested[best]["pearson"] - tested[chosen]["pearson"], 4),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
