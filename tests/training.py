"""What the tests of trainer and features share: tiny models, rows with labels, trainers over them, one step by hand."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import SCORES, TEXTS, byte_bpe_tokenizer, tiny_backbone
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments

TOKENIZER = byte_bpe_tokenizer(add_bos=True)  # without a pad token
PADDED = byte_bpe_tokenizer(add_bos=True)
PADDED.pad_token = PADDED.eos_token
IDS = [TOKENIZER(text)["input_ids"] for text in TEXTS]
ROWS = Dataset.from_dict({"text": TEXTS, "label": SCORES})
TOKENS = Dataset.from_dict({"input_ids": IDS, "label": SCORES})
EIGHT = [3.0, -100.0, 2.5, 7.25, 0.0, 4.0, 12.0, -1.5]  # labels; -100 is what Trainer ignores among class labels
SCALE = {"label_mean": 2.0, "label_std": 3.0}
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def workbench() -> Iterator[None]:
    """Let Trainer collect no garbage; let pytest see what is logged."""
    gc.freeze()
    logging.enable_propagation()
    yield
    logging.disable_propagation()
    gc.unfreeze()


def tiny_model(backbone: str | PreTrainedModel | None = None, seed: int = 0, **kwargs) -> RelishForSequenceRegression:
    """Return a model with a small head, drawn from the seed, over the tiny Llama or what is given."""
    torch.manual_seed(seed)
    settings = {"head_hidden_size": 16, "head_num_attention_heads": 4, "head_intermediate_size": 32, **kwargs}
    return RelishForSequenceRegression.from_backbone(backbone or tiny_backbone("llama"), **settings)


def rows_of(labels, texts: Sequence[str] = TEXTS, **columns) -> Dataset:
    """Return the first texts with these labels and further columns."""
    return Dataset.from_dict({"text": texts[: len(labels)], "label": labels, **columns})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    """`make_trainer` in the test's own folder."""
    return partial(make_trainer, tmp_path)


def make_trainer(folder: Path, model=None, rows=None, kind=RelishTrainer, **kwargs) -> Trainer:
    """Return a trainer of any kind that writes into `folder`, over all texts or what is given.

    What is no argument of Trainer's goes into its training arguments.
    """
    names = ("eval_dataset", "processing_class", "compute_metrics", "data_collator", "peft_config")
    own = {name: kwargs.pop(name) for name in names if name in kwargs}
    fixed = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    fixed |= {"logging_steps": 1, "save_strategy": "no", "num_train_epochs": 1, "per_device_train_batch_size": 8}
    if kind is Trainer:
        own = {"data_collator": DataCollatorWithPadding(PADDED), **own}
        return Trainer(model, TrainingArguments(**fixed | kwargs), train_dataset=rows or TOKENS, **own)
    fixed |= {"features_dir": str(folder / "features"), "features_dtype": "float32"}
    own = {"processing_class": TOKENIZER, "train_dataset": ROWS if rows is None else rows, **own}
    return kind(model or tiny_model(), RelishTrainingArguments(**fixed | kwargs), **own)


def losses(trainer: Trainer, **kwargs) -> list[float]:
    """Train, and return the loss of every step."""
    trainer.train(**kwargs)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def head(model: RelishForSequenceRegression) -> dict[str, torch.Tensor]:
    """Return a copy of the head's weights, named as in a checkpoint."""
    return {f"score.{name}": tensor.clone() for name, tensor in model.score.state_dict().items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two state dicts are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], atol: float) -> None:
    """Raise where two state dicts differ by more than `atol`."""
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=atol, rtol=0)


def penalty(z, objective: str = "huber", delta: float = 1.0) -> torch.Tensor:
    """Return every value's share of a loss on standardised differences."""
    z = torch.as_tensor(z)
    return z**2 if objective == "mse" else torch.where(z.abs() <= delta, z**2 / 2, delta * (z.abs() - delta / 2))


def one_sgd_step(model, labels, objective: str = "huber", weights=1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of the first texts, run one by one, and the head after one step of `SGD`, by autograd."""
    logits = torch.cat([model(input_ids=torch.tensor([row])).logits for row in IDS[: len(labels)]])
    z = (logits - torch.tensor(labels, dtype=torch.float32).view(-1, 1)) / model.config.label_std[0]
    loss = (torch.as_tensor(weights, dtype=torch.float32).view(-1, 1) * penalty(z, objective)).mean()
    parameters = dict(model.score.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    stepped = {f"score.{n}": p.detach() - 0.1 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)}
    return float(loss.detach()), stepped
