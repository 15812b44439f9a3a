"""A grid of numbers in one pass, as ratios: A and B alternate in one process, medians of at least five runs after a warm-up.

    python benchmarks/grid_speed.py DATA_FOLDER

51 values 0.0 .. 5.0 on STS-B prompts: the trie against one batched forward for every value, and against one plain forward
of the same prompts. Then one RAFT step (forward and backward, LoRA of rank 8) against one cross-entropy step on str(y) of the
same batch, whose logits are computed for the answer's tokens alone too. Writes `results/speed-grid.json`.
"""

from pathlib import Path

import numpy as np
import torch
import typer
from heads import TEMPLATE
from peft import LoraConfig, get_peft_model
from speed import RESULTS, alternate, keep
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_relish.base_model_relish import resolve_backbone
from modeling_relish.cli_shared import DEFAULT_BACKBONE, compute_dtype
from modeling_relish.data import Columns, load_split
from modeling_relish.language_model_relish import grid_log_probs, last_logits, pad_left
from modeling_relish.number_grid_relish import NumberGrid, TokenTrie
from modeling_relish.objectives_relish import grid_loss
from modeling_relish.text_relish import PromptTemplate, encode_rows, pad_batch


def batches_of(data, tokenizer, rows, batch):
    split = load_split(data, Columns(text=("text_a", "text_b"), label=("score",)), split="train")
    split = split.select(np.linspace(0, len(split) - 1, rows).astype(int))
    texts = ({c: row[c] for c in ("text_a", "text_b")} for row in split)
    ids = list(encode_rows(texts, PromptTemplate(TEMPLATE), tokenizer, 1024))
    order = sorted(range(rows), key=lambda i: len(ids[i]))
    for start in range(0, rows, batch):
        chosen = order[start : start + batch]
        padded, mask = pad_batch([ids[i] for i in chosen], tokenizer.pad_token_id)
        labels = torch.tensor([split[i]["labels"] for i in chosen]).view(-1, 1)
        yield torch.tensor(padded), torch.tensor(mask), labels


@torch.no_grad()
def one_by_one(model, ids, mask, sequences):
    """The plain way: the prompts with one value's tokens behind, as often as there are values."""
    ids, mask = pad_left(ids, mask)
    found = []
    for sequence in sequences:
        tokens = torch.tensor(sequence).expand(len(ids), -1)
        everything, seen = (
            torch.cat([ids, tokens[:, :-1]], 1),
            torch.cat([mask, torch.ones_like(tokens[:, :-1]).bool()], 1),
        )
        positions = seen.long().cumsum(1).sub(1).clamp(min=0)
        logits = model(
            input_ids=everything,
            attention_mask=seen.long(),
            position_ids=positions,
            logits_to_keep=len(sequence),
            use_cache=False,
        ).logits.float()
        found.append(logits.log_softmax(-1).gather(-1, tokens[..., None]).sum((1, 2)))
    return torch.stack(found, 1)


def cross_entropy_step(model, ids, mask, answers, pad):
    """-log p(str(y) | x), summed over an answer's tokens; logits of the answers' positions alone."""
    ids, mask = pad_left(ids, mask)
    targets, seen = pad_batch(answers, pad)
    targets, seen = torch.tensor(targets), torch.tensor(seen)
    everything, whole = torch.cat([ids, targets[:, :-1]], 1), torch.cat([mask.long(), seen[:, :-1]], 1)
    positions = whole.cumsum(1).sub(1).clamp(min=0)
    keep_last = targets.shape[1]
    logits = model(
        input_ids=everything, attention_mask=whole, position_ids=positions, logits_to_keep=keep_last, use_cache=False
    ).logits.float()
    loss = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0] * seen
    loss.sum(1).mean().backward()


def main(data: str, rows: int = 64, batch: int = 16, runs: int = 5, output: Path = RESULTS):
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone(DEFAULT_BACKBONE))
    model = AutoModelForCausalLM.from_pretrained(resolve_backbone(DEFAULT_BACKBONE), dtype=compute_dtype()).eval()
    decimals = NumberGrid.between(0, 5, 0.1).resolve(tokenizer, TEMPLATE)
    digits = NumberGrid.between(0, 5).resolve(tokenizer, TEMPLATE)
    trie, digit_trie = TokenTrie(decimals.tokens), TokenTrie(digits.tokens)
    parts = list(batches_of(data, tokenizer, rows, batch))

    @torch.no_grad()
    def each(function):
        for ids, mask, _ in parts:
            function(ids, mask)

    scoring = {
        "one_pass": lambda: each(lambda ids, mask: grid_log_probs(model, ids, mask, trie)),
        "plain_forward": lambda: each(lambda ids, mask: last_logits(model, ids, mask)),
        "one_by_one": lambda: each(lambda ids, mask: one_by_one(model, ids, mask, decimals.tokens)),
    }
    seconds = alternate(scoring, runs)
    tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    tuned.train()

    def raft(grid, trie):
        for ids, mask, labels in parts[:2]:
            tuned.zero_grad()
            grid_loss(grid_log_probs(tuned, ids, mask, trie), torch.tensor(grid.values), labels, "raft").backward()

    def cross_entropy():
        for ids, mask, labels in parts[:2]:
            tuned.zero_grad()
            answers = [decimals.tokens[round(10 * float(y))] for y in labels[:, 0]]
            cross_entropy_step(tuned, ids, mask, [list(a) for a in answers], tokenizer.pad_token_id)

    steps = {"raft_digits": lambda: raft(digits, digit_trie), "raft_51": lambda: raft(decimals, trie),
             "cross_entropy": cross_entropy}  # fmt: skip
    seconds |= alternate(steps, runs)
    keep(
        "grid",
        {
            "rows": rows, "batch": batch, "runs": runs, "values": len(decimals.values), "extra_tokens": len(trie),
            "seconds": seconds,
            "faster_than_one_by_one": round(seconds["one_by_one"] / seconds["one_pass"], 2),
            "cost_over_plain_forward": round(seconds["one_pass"] / seconds["plain_forward"], 2),
            "raft_step_over_cross_entropy": round(seconds["raft_digits"] / seconds["cross_entropy"], 2),
            "raft_51_step_over_cross_entropy": round(seconds["raft_51"] / seconds["cross_entropy"], 2),
        },
        output,
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
