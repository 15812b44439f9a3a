"""What the tests of comparisons share: a table, tiny backbones on disk, options that take seconds."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import torch
from tiny import BACKBONES, SCORES, TEXTS, TOKENIZERS, save_backbone
from transformers import AutoModelForCausalLM

from modeling_relish.compare import Options, compare

OPTIONS = Options(
    epochs=2, backbone_epochs=1, candidates=2, batch_size=8, backbone_batch_size=8, lora_rank=2, shots=2, samples=2,
    decoded_validation_rows=4,
)  # fmt: skip
SCALE = {"label_min": 0.0, "label_max": 5.0}
LAYERS = {"layers": [2, 4], "epochs": 1}


def save_language_model(folder, kind="qwen3"):
    """Save a tiny causal language model with its tokenizer; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BACKBONES[kind]()
        config.max_position_embeddings = 512  # room for examples in the prompt
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZERS[kind]().save_pretrained(folder)
    return folder


def save_table(folder, copies=2):
    """Write train, validation and test tables of two texts and a score; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = [min(5.0, max(0.0, score)) for score in SCORES]
    rows = [(f"{a} ({c})", b, s) for c in range(copies) for a, b, s in zip(TEXTS, TEXTS[1:] + TEXTS[:1], scores)]  # noqa: B905
    parts = {
        "train": rows[: len(rows) // 2],
        "validation": rows[len(rows) // 2 :: 2],
        "test": rows[len(rows) // 2 + 1 :: 2],
    }
    for name, part in parts.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text_a", "text_b", "score"), *part])
    return folder


def save_everything(folder):
    """Return the table's folder, and the names of a language model and an encoder on disk."""
    encoder = save_backbone("bert", folder / "tiny-bert")
    return save_table(folder / "words"), str(save_language_model(folder / "tiny-qwen")), str(encoder)


def compare_on(places, features):
    """Return `compare` on what `save_everything` saved, with options that take seconds; features are shared by all calls."""
    data, backbone, encoder = places

    def call(output, data=data, **changed):
        given = {
            "backbones": backbone, "encoder": encoder, "seeds": 1, "options": OPTIONS, "features_dir": features,
            "layer_settings": LAYERS, "write_reports": False, "log": lambda line: None, **SCALE,
        }  # fmt: skip
        return compare(str(data), output, **given | changed)

    return call


class MeasuredRow:
    """A row of a table of results with these test Pearsons, one for each seed."""

    def __init__(self, method, *pearsons, name=None, **settings):
        self.name, self.regime, self.values = name or method, "frozen", pearsons
        self.runs = [SimpleNamespace(method=method, settings=settings, trainable_parameters=1) for _ in pearsons]

    def mean(self, metric, part="test"):
        return float(np.mean(self.values))

    def spread(self, metric):
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan
