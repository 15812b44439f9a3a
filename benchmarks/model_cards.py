"""The finished model cards of the demo's model and of one STS-B model: figures from benchmarks/results, text from model_card.

    python benchmarks/model_cards.py            # writes model_cards/*.md

Each card is of one run: the demo's, and for STS-B that of the three seeds which was best on the validation rows.
"""

import json
from math import isnan
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from modeling_relish import RelishConfig
from modeling_relish.cli_shared import DEFAULT_BACKBONE
from modeling_relish.compare.results import read_results
from modeling_relish.compare.summary import make_tables
from modeling_relish.demo import LAYER, TEMPLATE
from modeling_relish.model_card import model_card, note_evaluation

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CARDS = ROOT / "model_cards"
STSB_ROW = "RELISH, layer 16"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Row of the paper's table -> what a reader of the card is told.
LABELS = {
    "RELISH, layer search": "RELISH on the layer that a search finds",
    "MLP, mean, layer search": "an MLP over mean states, with a layer search of its own",
    "RELISH": "RELISH on the last layer",
    "MLP, mean": "the MLP on the last layer",
    "TF-IDF, ridge": "ridge regression on TF-IDF, without a language model",
}


def demo_card() -> str:
    """Card of the model that `make demo` trains."""
    found = json.loads((RESULTS / "demo.json").read_text())
    lexicon = found["test"]["lexicon (vaderSentiment 3.3.2)"]
    evaluation = note_evaluation(
        None,
        "test",
        found["test"]["RELISH"],
        630,
        dataset="rated tweets (Hutto and Gilbert, ICWSM 2014)",
        train_rows=2940,
    )
    config = _config(TEMPLATE, LAYER, "sentiment", (-4.0, 4.0), evaluation)
    return model_card(
        config, repo_id="user/relish-smollm2-135m-tweets", license="apache-2.0", language="en", base_model=BASE,
        data="Trained on 2,940 of the 4,200 rated tweets of Hutto and Gilbert (ICWSM 2014; MIT licence, from the package "
        "vaderSentiment 0.5): each label is the mean of 20 raters. 630 rows chose the epoch, and the 630 test rows were seen by "
        "no training. `make demo` trains it in a minute or two.",
        notes=[
            f"One run, seed {found['seed']}. On the same test rows the authors' own lexicon program, brought to the scale by a "
            f"line fitted on the training rows, has Pearson {lexicon['pearson']:.4f}.",
            "Short English posts of about 2014. The raters' agreement bounds what can be reached.",
        ],
    )  # fmt: skip


def stsb_card() -> str:
    """Card of the STS-B model: RELISH on layer 16, the seed that was best on the validation rows."""
    found = json.loads((RESULTS / "heads-stsb.json").read_text())
    row = found["rows"][STSB_ROW]
    run = max(row["runs"], key=lambda r: max(r["validation_pearson"]))
    rows: dict[str, Any] = found["data"]
    evaluation = note_evaluation(None, "validation", {"pearson": max(run["validation_pearson"])}, rows["validation"])
    evaluation = note_evaluation(
        evaluation,
        "test",
        run["test"],
        rows["test"],
        dataset="STS benchmark (Cer et al., 2017)",
        train_rows=rows["train"],
    )
    config = _config(found["template"], row["settings"]["backbone_layer"], "similarity", (0.0, 5.0), evaluation)
    spread = row["summary"]["pearson"]
    return model_card(
        config, repo_id="user/relish-smollm2-135m-stsb", license="apache-2.0", language="en", base_model=BASE,
        data=f"Trained on the {rows['train']:,} training pairs of the STS benchmark (Cer et al., 2017; CC BY-SA 4.0): how "
        f"similar two English sentences are, 0 to 5. The {rows['validation']:,} validation pairs chose the epoch "
        "and the seed of three.",
        notes=[
            f"Seed {run['seed']}; over three seeds the test Pearson is {spread['mean']:.4f} ± {spread['std']:.4f}.",
            f"All on the same test rows, mean Pearson of three seeds where a seed matters: {_others()}.",
            "The order of the two sentences is part of the prompt: swapping them can change the number.",
        ],
    )  # fmt: skip


def _others() -> str:
    """What the paper's table has of other methods on STS-B: mean and deviation over three seeds."""
    (table,) = [
        found
        for found in make_tables(read_results(RESULTS / "paper" / "frozen" / "results"))
        if found.dataset == "stsb" and found.backbone.startswith("SmolLM2")
    ]
    rows = {row.name: row for row in table.rows}
    found = [(label, rows[name].mean("pearson"), rows[name].spread("pearson")) for name, label in LABELS.items()]
    return "; ".join(
        f"{label} {mean:.3f}" + ("" if isnan(spread) else f" ± {spread:.3f}") for label, mean, spread in found
    )


def _config(
    template: str, layer: int, target: str, scale: tuple[float, float], evaluation: dict[str, Any]
) -> RelishConfig:
    # SmolLM2-135M-Instruct; a card needs no more of it than its layers, and no download.
    backbone = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152
    )
    return RelishConfig(
        backbone_name_or_path=DEFAULT_BACKBONE, backbone_config=backbone, backbone_layer=layer, backbone_in_checkpoint=False,
        prompt_template=template, label_min=scale[0], label_max=scale[1], id2label={0: target}, evaluation=evaluation,
    )  # fmt: skip


CARD_OF = {"relish-smollm2-135m-tweets.md": demo_card, "relish-smollm2-135m-stsb.md": stsb_card}


if __name__ == "__main__":
    CARDS.mkdir(exist_ok=True)
    for name, write in CARD_OF.items():
        (CARDS / name).write_text(write(), encoding="utf-8")
        print(CARDS / name)
