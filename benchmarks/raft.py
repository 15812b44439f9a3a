"""The regression-aware family on one data set: decoding, RAIL, cross-entropy and RAFT, over one language model.

    python benchmarks/raft.py DATA_FOLDER --name stsb --label-min 0 --label-max 5            # everything that is not there yet
    python benchmarks/raft.py DATA_FOLDER --name stsb --label-min 0 --label-max 5 --only raft-1000-0

Every run is kept as soon as it ends, in `results/raft-NAME/RUN.json`, and not repeated. LoRA of rank 8 on all linear
layers, learning rate 2e-4, batches of 16, the epoch with the best Pearson on 500 validation rows.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from heads import TEMPLATE
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments, regression_metrics
from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, METRICS, compute_dtype, write_json
from modeling_relish.data import Columns, load_splits
from modeling_relish.decoding import decode_numbers
from modeling_relish.number_grid_relish import NumberGrid

SAMPLES, SHOTS, VALIDATION_ROWS = 16, 128, 500
app = typer.Typer()


class Bench:
    def __init__(self, data, name, scale, backbone, output):
        self.splits = load_splits(data, Columns(text=("text_a", "text_b"), label=("score",)))
        self.scale, self.backbone, self.folder = scale, backbone, output / f"raft-{name}"
        self.tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(backbone))
        low, high = (int(x) for x in scale)
        # Digits for RAIL and RAFT. Cross-entropy learns str(y) with one decimal, which RAIL then reads too.
        self.digits = NumberGrid.between(low, high).resolve(self.tokenizer, TEMPLATE)
        self.decimals = NumberGrid.between(low, high, 0.1, terminator="\n").resolve(self.tokenizer, TEMPLATE)

    def model(self):
        return AutoModelForCausalLM.from_pretrained(resolve_backbone(self.backbone), dtype=compute_dtype())

    def texts(self, split):
        return [{c: row[c] for c in ("text_a", "text_b")} for row in self.splits[split]]

    def labels(self, split):
        return np.array(self.splits[split]["labels"][:], dtype=np.float64).reshape(-1)

    def metrics(self, predictions, split="test"):
        found = regression_metrics(predictions, self.labels(split), label_range=[self.scale])
        return {m: round(float(found[m]), 4) for m in METRICS}

    def rail(self, language_model, grid):
        model = RelishForSequenceRegression.from_backbone(
            language_model, head_type="number_grid", number_grid=grid, prompt_template=TEMPLATE
        )
        return model.predict(self.texts("test"), self.tokenizer, batch_size=32)

    def decode(self, language_model, **kwargs):
        found = decode_numbers(
            language_model, self.tokenizer, self.texts("test"), prompt_template=TEMPLATE, max_new_tokens=5, **kwargs
        )
        share = found.not_numbers / sum(map(len, found.texts))
        return {"test": self.metrics(found.values), "not_numbers_share": round(share, 4)}

    # ---------------------------------------------------------------- runs

    def zero_shot(self):
        return self.decode(self.model(), batch_size=32)

    def many_shot(self, seed):
        rows = np.random.default_rng(seed).permutation(len(self.splits["train"]))[:SHOTS]
        texts, labels = self.texts("train"), np.round(self.labels("train"), 1)
        return self.decode(self.model(), examples=[(texts[i], labels[i]) for i in rows], batch_size=8)

    def rail_grid(self):
        return {"test": self.metrics(self.rail(self.model(), self.digits))}

    def rail_decimals(self):
        return {"test": self.metrics(self.rail(self.model(), self.decimals))}

    def rail_sample(self, seed):
        return {**self.decode(self.model(), num_samples=SAMPLES, batch_size=8, seed=seed), "samples": SAMPLES}

    def tune(self, objective, grid, rows, epochs, seed):
        train = self.splits["train"]
        if rows is not None:
            train = train.select(sorted(np.random.default_rng(seed).permutation(len(train))[:rows].tolist()))
        validation = self.splits["validation"]
        chosen = np.random.default_rng(0).permutation(len(validation))[:VALIDATION_ROWS]
        validation = validation.select(sorted(chosen.tolist()))
        set_seed(seed)
        adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(self.model(), adapter)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            args = RelishTrainingArguments(
                output_dir=folder, objective=objective, num_train_epochs=epochs, learning_rate=2e-4, warmup_steps=0.1,
                per_device_train_batch_size=16, per_device_eval_batch_size=32, eval_strategy="epoch", save_strategy="epoch",
                save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="pearson", logging_strategy="no",
                report_to="none", disable_tqdm=True, seed=seed, train_sampling_strategy="group_by_length", grid_diagnostics=True,
            )  # fmt: skip
            trainer = RelishTrainer(
                model, args, train_dataset=train, eval_dataset=validation,
                processing_class=self.tokenizer, number_grid=grid, prompt_template=TEMPLATE,
            )  # fmt: skip
            before = trainer.evaluate()
            trainer.train()
        seconds = time.monotonic() - started
        keys = ("eval_pearson", "eval_grid_mass", "eval_grid_entropy")
        curve = [{k: e[k] for k in keys} for e in [before, *trainer.state.log_history] if "eval_pearson" in e]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return model.merge_and_unload(), {
            "rows": len(train), "epochs": epochs, "seed": seed, "train_seconds": round(seconds, 1),
            "trainable_parameters": trained, "validation": curve,
        }  # fmt: skip

    def raft(self, rows, epochs, seed, grid=None):
        model, facts = self.tune("raft", grid or self.digits, rows, epochs, seed)
        return {**facts, "test": self.metrics(self.rail(model, grid or self.digits))}

    def cross_entropy(self, rows, epochs, seed):
        model, facts = self.tune("cross_entropy", self.decimals, rows, epochs, seed)
        decoded = self.decode(model, batch_size=32)
        return {**facts, "decode": decoded, "rail": {"test": self.metrics(self.rail(model, self.decimals))}}

    def plan(self, epochs_small, epochs_whole):
        runs = {}
        for seed in (0, 1, 2):
            runs[f"raft-1000-{seed}"] = lambda s=seed: self.raft(1000, epochs_small, s)
            runs[f"ce-1000-{seed}"] = lambda s=seed: self.cross_entropy(1000, epochs_small, s)
            if seed == 0:
                runs |= {
                    "zero-shot": self.zero_shot,
                    "rail-digits": self.rail_grid,
                    "rail-decimals": self.rail_decimals,
                }
        runs["raft-whole-0"] = lambda: self.raft(None, epochs_whole, 0)
        runs["ce-whole-0"] = lambda: self.cross_entropy(None, epochs_whole, 0)
        for seed in (0, 1, 2):
            runs[f"rail-sample-{seed}"] = lambda s=seed: self.rail_sample(s)
        for seed in (0, 1, 2):
            runs[f"many-shot-{seed}"] = lambda s=seed: self.many_shot(s)
        top = NumberGrid((self.scale[1],), (str(int(self.scale[1])),)).resolve(self.tokenizer, TEMPLATE)
        runs["raft-top-digit-1000-0"] = lambda: self.raft(1000, epochs_small, 0, top)
        return runs


@app.command()
def main(
    data: str,
    name: Annotated[str, typer.Option()],
    label_min: Annotated[float, typer.Option()],
    label_max: Annotated[float, typer.Option()],
    backbone: str = DEFAULT_BACKBONE,
    epochs_small: int = 2,
    epochs_whole: int = 1,
    only: list[str] | None = None,
    output: Path = Path(__file__).parent / "results",
):
    transformers.logging.set_verbosity_error()
    bench = Bench(data, name, (label_min, label_max), backbone, output)
    for key, run in bench.plan(epochs_small, epochs_whole).items():
        kept = bench.folder / f"{key}.json"
        if kept.exists() or (only and key not in only):
            continue
        started = time.monotonic()
        found = run()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        seconds = round(time.monotonic() - started, 1)
        write_json(kept, {"run": key, "backbone": backbone, "seconds": seconds, **found, "versions": versions})
        print(key, json.dumps(found), f"{seconds} s", flush=True)


if __name__ == "__main__":
    app()
