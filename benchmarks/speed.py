"""Speed and memory, as ratios: A and B alternate in one process, medians of at least five runs after a warm-up.

    python benchmarks/speed.py head                      # attention forms of the head, synthetic states
    python benchmarks/speed.py epoch --data stsb_folder  # one head epoch on cached states of real lengths
    python benchmarks/speed.py end-to-end --data ...     # training with the cache against the backbone in every epoch
    python benchmarks/speed.py predict --data ...        # predict against a bare AutoModel forward
    python benchmarks/speed.py memory                    # peak anonymous memory, 8 GB of cache against 100 MB

Each writes `results/speed-<name>.json`.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from datasets import disable_progress_bars
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from modeling_relish import (
    FeatureCache,
    RelishConfig,
    RelishForSequenceRegression,
    RelishTrainer,
    RelishTrainingArguments,
)
from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, compute_dtype, write_json
from modeling_relish.data import Columns, load_split
from modeling_relish.data_collator import RelishCollator
from modeling_relish.feature_files import encode_states, save_shard, text_key
from modeling_relish.features import FeatureDataset
from modeling_relish.head_relish import build_head, cheapest_form
from modeling_relish.text_relish import PromptTemplate, encode_rows, pad_batch

TEMPLATE = "Sentence 1: {text_a}\nSentence 2: {text_b}\nScore:"
RESULTS = Path(__file__).parent / "results"
app = typer.Typer()


def alternate(functions, runs):
    """Median seconds of every function, run in turn; the first round warms up and does not count."""
    times = {name: [] for name in functions}
    for number in range(runs + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def keep(name, values, output):
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    machine = {"threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine()}
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"speed-{name}.json", {"versions": versions, "machine": machine, **values})
    print(json.dumps(values, indent=1))


def head_config(D, layer=None):
    sizes = {"num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 100, "num_attention_heads": 8}
    return RelishConfig(backbone_config=LlamaConfig(hidden_size=D, **sizes), backbone_layer=layer)


def head_step(head, states, mask, targets):
    head.zero_grad(set_to_none=True)
    torch.nn.functional.huber_loss(head(states, mask)[0], targets).backward()


@app.command()
def head(runs: int = 7, batch: int = 32, output: Path = RESULTS, small: bool = False):
    """Forward and backward of the head on bf16 states: the chosen form against explicit keys and values."""
    rows = []
    sizes = [(64, 16)] if small else [(D, T) for D in (576, 2048, 4096) for T in (16, 60, 256, 512, 1024)]
    for D, T in sizes:
        module = build_head(head_config(D))
        states = torch.randn(batch, T, D, dtype=torch.bfloat16)
        mask, targets = torch.ones(batch, T, dtype=torch.bool), torch.randn(batch, 1)

        def run(form, module=module, states=states, mask=mask, targets=targets):
            module.attention_form = form
            head_step(module, states, mask, targets)

        forms = ("explicit", "auto")
        seconds = alternate({form: lambda form=form: run(form) for form in forms}, runs)
        chosen = cheapest_form(T, D, 256, 8, 3)
        ratio = {form: round(seconds["explicit"] / seconds[form], 2) for form in forms[1:]}
        rows.append(
            {"D": D, "T": T, "chosen": chosen, "explicit_ms": round(1e3 * seconds["explicit"], 1), "speedup": ratio}
        )
        print(rows[-1], flush=True)
    keep("head", {"batch": batch, "runs": runs, "rows": rows}, output)


def prepared(data, rows, layer, features, dtype=None):
    """A model, its tokenizer, the rows' token ids, and a filled cache."""
    split = load_split(data, Columns(text=("text_a", "text_b"), label=("score",)), split="train")
    split = split.select(
        np.linspace(0, len(split) - 1, rows).astype(int)
    )  # the table is sorted by source, and so by length
    set_seed(0)
    model = RelishForSequenceRegression.from_backbone(
        DEFAULT_BACKBONE,
        backbone_layer=layer,
        prompt_template=TEMPLATE,
        dtype=dtype or compute_dtype(),
        label_mean=2.5,
        label_std=1.5,
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(DEFAULT_BACKBONE))
    texts = ({c: row[c] for c in ("text_a", "text_b")} for row in split)
    ids = list(encode_rows(texts, PromptTemplate(TEMPLATE), tokenizer, 1024))
    return model, tokenizer, split, ids, FeatureCache(model, features)


@app.command()
def epoch(data: Annotated[str, typer.Option()], rows: int = 2048, runs: int = 5, output: Path = RESULTS):
    """One epoch of the head over cached states of real lengths: read, collate, forward, backward, AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        model, _, split, ids, cache = prepared(data, rows, 16, folder)
        cache.add(ids, show_progress=False)
        dataset = FeatureDataset(cache, ids, {"labels": np.array(split["labels"][:], dtype=np.float32)})

        def run(form):
            model.score.attention_form = form
            optimizer = torch.optim.AdamW(model.score.parameters(), lr=1e-4)
            loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, collate_fn=RelishCollator())
            for batch in loader:
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()

        seconds = alternate({form: lambda form=form: run(form) for form in ("explicit", "auto")}, runs)
    keep("epoch", {"rows": rows, "mean_tokens": round(float(np.mean([len(i) for i in ids])), 1), "runs": runs,
                   "seconds": seconds, "speedup": round(seconds["explicit"] / seconds["auto"], 2)}, output)  # fmt: skip


@app.command("end-to-end")
def end_to_end(
    data: Annotated[str, typer.Option()], rows: int = 256, epochs: int = 10, runs: int = 5, output: Path = RESULTS
):
    """Ten epochs with the cache, cache made included, against the backbone in every epoch, and against the authors' recipe.

    The last runs one epoch, times ten: every one of its epochs does the same work.
    """
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    train_args = {
        "per_device_train_batch_size": 32, "learning_rate": 3e-4, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cut, tokenizer, split, ids, _ = prepared(data, rows, 16, folder)
        whole = prepared(data, rows, None, folder)[0]
        labels = [row[0] for row in split["labels"]]
        tokens = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
        padded = [tokenizer.pad({"input_ids": i}, padding="max_length", max_length=256) for i in ids]
        padded = [
            {"input_ids": p["input_ids"], "attention_mask": p["attention_mask"], "labels": y}
            for p, y in zip(padded, labels, strict=True)
        ]

        def cached():
            features = tempfile.mkdtemp(dir=folder)
            args = RelishTrainingArguments(
                output_dir=folder, num_train_epochs=epochs, features_dir=features, **train_args
            )
            RelishTrainer(cut, args, train_dataset=split, processing_class=tokenizer).train()

        def plain(model, data, number):
            args = TrainingArguments(
                output_dir=folder, num_train_epochs=number, dataloader_pin_memory=False, **train_args
            )
            Trainer(model, args, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer)).train()

        seconds = alternate({"cached": cached, "every_epoch": lambda: plain(cut, tokens, epochs)}, runs)
        seconds["authors_recipe"] = (
            epochs * alternate({"one": lambda: plain(whole, padded, 1)}, max(2, runs // 2))["one"]
        )
    keep("end-to-end", {
        "rows": rows, "epochs": epochs, "runs": runs, "layer": 16, "seconds": seconds,
        "speedup_over_every_epoch": round(seconds["every_epoch"] / seconds["cached"], 2),
        "speedup_over_authors_recipe": round(seconds["authors_recipe"] / seconds["cached"], 2),
    }, output)  # fmt: skip


@app.command("second-run")
def second_run(data: Annotated[str, typer.Option()], rows: int = 1024, runs: int = 5, output: Path = RESULTS):
    """From nothing to the first metric: a first run, and a second one over the same rows with the cache warm."""
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, split, _, _ = prepared(data, rows, 16, folder)
        state = {"number": 0}

        def run(warm):
            state["number"] += not warm
            args = RelishTrainingArguments(
                output_dir=folder, features_dir=f"{folder}/{state['number']}", report_to="none", disable_tqdm=True
            )
            trainer = RelishTrainer(model, args, eval_dataset=split, processing_class=tokenizer)
            trainer.evaluate()

        seconds = alternate({"first": lambda: run(False), "second": lambda: run(True)}, runs)
    speedup = round(seconds["first"] / seconds["second"], 2)
    keep("second-run", {"rows": rows, "runs": runs, "seconds": seconds, "speedup": speedup}, output)


@app.command()
def predict(data: Annotated[str, typer.Option()], rows: int = 192, runs: int = 5, output: Path = RESULTS):
    """`predict` of the whole and of the cut backbone against a bare AutoModel forward of the same batches, same dtype."""
    with tempfile.TemporaryDirectory() as folder:
        whole, tokenizer, split, ids, _ = prepared(data, rows, None, folder)
        cut = prepared(data, rows, 16, folder)[0]
    bare = AutoModel.from_pretrained(resolve_backbone(DEFAULT_BACKBONE), dtype=compute_dtype()).eval()
    order = sorted(ids, key=lambda row: -len(row))
    batches = [pad_batch(order[i : i + 32], 0) for i in range(0, len(order), 32)]
    texts = [{c: row[c] for c in ("text_a", "text_b")} for row in split]

    @torch.no_grad()
    def forward():
        for batch, mask in batches:
            bare(input_ids=torch.tensor(batch), attention_mask=torch.tensor(mask), use_cache=False)

    seconds = alternate(
        {
            "bare": forward,
            "whole": lambda: whole.predict(texts, tokenizer),
            "layer_16": lambda: cut.predict(texts, tokenizer),
        },
        runs,
    )
    keep("predict", {"rows": rows, "runs": runs, "seconds": seconds,
                     "throughput_whole": round(seconds["bare"] / seconds["whole"], 3),
                     "throughput_layer_16": round(seconds["bare"] / seconds["layer_16"], 3)}, output)  # fmt: skip


@app.command()
def memory(gigabytes: float = 8.0, steps: int = 60, output: Path = RESULTS):
    """Peak anonymous memory (RssAnon) of training on a large and a small cache, each in a process of its own."""
    peaks = {}
    for name, size in (("small", 0.1), ("large", gigabytes)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            command = [
                sys.executable,
                __file__,
                "memory-run",
                "--folder",
                folder,
                "--gigabytes",
                str(size),
                "--steps",
                str(steps),
            ]
            subprocess.run([*command, "--fill"], check=True)
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peaks[name] = int(out.split()[-1])
            print(name, peaks[name], flush=True)
    keep("memory", {"gigabytes": gigabytes, "steps": steps, "D": 2048, "T": 256, "peak_rss_anon_bytes": peaks,
                    "growth": round(peaks["large"] / peaks["small"] - 1, 4)}, output)  # fmt: skip


@app.command("memory-run", hidden=True)
def memory_run(
    folder: Annotated[str, typer.Option()],
    gigabytes: Annotated[float, typer.Option()],
    steps: Annotated[int, typer.Option()],
    fill: bool = False,
):
    D, T = 2048, 256
    torch.manual_seed(0)
    model = RelishForSequenceRegression(head_config(D)).freeze_backbone()
    cache = FeatureCache(model, folder)
    texts = [[int(i) % 97, int(i) // 97] + [3] * (T - 2) for i in range(int(gigabytes * 1e9 / (2 * D * T)))]
    if fill:
        rows = [(T, text_key(t), t) for t in texts]
        request = cache.folder / "synthetic"
        request.mkdir()
        for number, start in enumerate(range(0, len(rows), 256)):
            part = rows[start : start + 256]
            states = torch.randn(len(part) * T, D, dtype=torch.bfloat16)
            save_shard(request / f"{number:05d}.safetensors", part, encode_states(states, torch.bfloat16))
        cache._finish(request, number + 1)
        return
    peak, stop = 0, threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak = max(peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")))

    thread = threading.Thread(target=watch)
    thread.start()
    dataset = FeatureDataset(
        cache, texts, {"labels": np.random.default_rng(0).normal(size=len(texts)).astype(np.float32)}
    )
    with tempfile.TemporaryDirectory() as run:
        args = RelishTrainingArguments(
            output_dir=run,
            max_steps=steps,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        RelishTrainer(model, args, train_dataset=dataset).train()
    stop.set()
    thread.join()
    print(peak)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
