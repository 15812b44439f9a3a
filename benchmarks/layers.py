"""Does the layer search find a good layer? The search's choice against every candidate trained in full.

    python benchmarks/layers.py DATA_FOLDER --name stsb --label-min 0 --label-max 5

The search sees a sample of train and validation. Then each candidate whose short fit came within `--margin` of the best one is
trained on all training rows, keeps its epoch with the best validation Pearson, and is tested once. What is done is kept in
`layers-NAME.progress.json`, and a run that was stopped goes on.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from heads import TEMPLATE, run
from transformers import AutoTokenizer

from modeling_relish import FeatureCache, RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, compute_dtype, write_json
from modeling_relish.data import Columns, load_splits
from modeling_relish.features import fill_layers
from modeling_relish.layer_search import at_layer, best_layer, candidate_layers
from modeling_relish.training_data import token_ids


def main(
    data: str,
    name: Annotated[str, typer.Option()],
    label_min: Annotated[float, typer.Option()],
    label_max: Annotated[float, typer.Option()],
    epochs: float = 8.0,
    seed: int = 0,
    margin: float = 0.06,
    backbone: str = DEFAULT_BACKBONE,
    output: Path = Path(__file__).parent / "results",
):
    splits = load_splits(data, Columns(text=("text_a", "text_b"), label=("score",)))
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(backbone))
    whole = RelishForSequenceRegression.from_backbone(
        backbone, prompt_template=TEMPLATE, label_min=label_min, label_max=label_max, dtype=compute_dtype()
    )
    kept = output / f"layers-{name}.progress.json"
    done = json.loads(kept.read_text()) if kept.exists() else {"search": None, "test": {}}
    if done["search"] is None:
        done |= search(whole, splits, tokenizer, seed)
        write_json(kept, done)
    found = {int(layer): score for layer, score in done["search"].items()}
    print("search", found, best_layer(found), flush=True)

    best_score = max(found.values())
    layers = [layer for layer in candidate_layers(whole.config.num_hidden_layers) if found[layer] > best_score - margin]
    caches = [FeatureCache(at_layer(whole, layer)) for layer in layers]
    for split in splits.values():
        fill_layers(caches, at_layer(whole, layers=layers), token_ids(split, "all", whole.config, tokenizer))
    tested = {int(layer): values for layer, values in done["test"].items()}
    for layer in layers:
        if layer in tested:
            continue
        result = run(splits, {"backbone_layer": layer}, 3e-4, epochs, seed, backbone, TEMPLATE, (label_min, label_max))
        tested[layer] = {**result["test"], "validation_pearson": max(result["validation_pearson"])}
        write_json(kept, {**done, "test": tested})
        print(layer, tested[layer], flush=True)
    chosen, best = best_layer(found), max(tested, key=lambda layer: tested[layer]["pearson"])
    write_json(
        output / f"layers-{name}.json",
        {
            "data": name, "backbone": backbone, "epochs": epochs, "seed": seed, "margin": margin,
            "search_seconds": done["search_seconds"], "search": found, "chosen": chosen, "best_by_test": best, "test": tested,
            "lost": round(tested[best]["pearson"] - tested[chosen]["pearson"], 4),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
    )  # fmt: skip
    kept.unlink()


def search(whole, splits, tokenizer, seed):
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        args = RelishTrainingArguments(output_dir=folder, disable_tqdm=True, seed=seed)
        found = RelishTrainer.search_layer(whole, splits["train"], splits["validation"], tokenizer, args=args)
    seconds = round(time.monotonic() - started, 1)
    return {"search": {str(layer): score for layer, score in found.items()}, "search_seconds": seconds}


if __name__ == "__main__":
    typer.run(main)
