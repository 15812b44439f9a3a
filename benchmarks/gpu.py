"""The head over a backbone of real size on one CUDA device: overhead, head epoch, memory. Random weights; under five minutes.

python benchmarks/gpu.py            # Llama 3.1 8B's shape in bf16, writes results/gpu.json with the card's name
python benchmarks/gpu.py --small    # tiny sizes on whatever device there is: what the tests run
"""

import statistics
import time
from pathlib import Path

import torch
import transformers
import typer
from transformers import LlamaConfig

from modeling_relish import RelishConfig, RelishForSequenceRegression
from modeling_relish.cli_shared import write_json
from modeling_relish.head_relish import build_head, cheapest_form

# Llama 3.1 8B
REAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 256}  # fmt: skip


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def alternate(functions, runs, device):
    times = {name: [] for name in functions}
    for number in range(runs + 1):
        for name, function in functions.items():
            synchronize(device)
            started = time.perf_counter()
            function()
            synchronize(device)
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def overhead(model, device, T, batch, runs):
    """Seconds of the bare backbone, and of the model with the head behind it."""
    ids = torch.randint(3, model.config.vocab_size, (batch, T), device=device)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def bare():
        model.backbone(input_ids=ids, attention_mask=mask, use_cache=False)

    @torch.no_grad()
    def whole():
        model(input_ids=ids, attention_mask=mask)

    seconds = alternate({"bare": bare, "whole": whole}, runs, device)
    return {"T": T, "batch": batch, "seconds": seconds, "head_share": round(1 - seconds["bare"] / seconds["whole"], 4)}


def head_steps(config, device, T, batch, runs):
    """Seconds of one training step of the head on states that are there, for every attention form."""
    head = build_head(config).to(device)
    states = torch.randn(batch, T, config.hidden_size, dtype=torch.bfloat16, device=device)
    mask, targets = torch.ones(batch, T, dtype=torch.bool, device=device), torch.randn(batch, 1, device=device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)

    def step(form):
        head.attention_form = form
        optimizer.zero_grad()
        torch.nn.functional.huber_loss(head(states, mask)[0], targets).backward()
        optimizer.step()

    forms = ("explicit", "auto", "absorbed_kv", "absorbed")
    seconds = alternate({form: lambda form=form: step(form) for form in forms}, runs, device)
    chosen = cheapest_form(T, config.hidden_size, 256, 8, 3)
    return {
        "T": T,
        "batch": batch,
        "seconds": seconds,
        "chosen": chosen,
        "speedup": round(seconds["explicit"] / seconds["auto"], 2),
    }


def main(small: bool = False, runs: int = 7, output: Path = Path(__file__).parent / "results"):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not small:
        raise SystemExit("no CUDA device here; --small runs tiny sizes on the CPU.")
    config = RelishConfig(backbone_config=LlamaConfig(**(SMALL if small else REAL)))
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = RelishForSequenceRegression(config).freeze_backbone().eval()
    torch.set_default_dtype(torch.float32)
    model.score.float()
    lengths = (16,) if small else (60, 256, 512)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "weights_bytes": weights,
        "head_parameters": sum(p.numel() for p in model.score.parameters()),
        "overhead": [overhead(model, device, T, 16, runs) for T in lengths],
        "head_step": [head_steps(config, device, T, 32, runs) for T in lengths],
    }
    if device.type == "cuda":
        report["peak_bytes"] = torch.cuda.max_memory_allocated()
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "gpu.json", report)
    print(report)


if __name__ == "__main__":
    typer.run(main)
