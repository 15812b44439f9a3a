"""Run by `accelerate launch` in test_accelerate.py, and called there in one process: the same trainings, to be compared."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tiny import SCORES, TEXTS
from training import SCALE, losses, make_trainer, tiny_model

ROWS = Dataset.from_dict({"text": TEXTS, "label": SCORES, "sample_weight": [1.0, 2.0, 0.5] * 8})
MODES = {
    "cached": {},
    "frozen": {"cache_features": False},
    "lora": {"learning_rate": 1e-2},
    "whole": {"freeze_backbone": False, "learning_rate": 1e-3},
}


def train(mode: str, base: str, folder: Path, batch_size: int) -> tuple[list[float], dict[str, float]]:
    """Train two epochs, save into `folder`, and return the loss of every step and the last metrics."""
    kwargs = dict(MODES[mode])
    if mode == "lora":
        from peft import LoraConfig

        torch.manual_seed(0)
        kwargs["peft_config"] = LoraConfig(r=4)
    model = tiny_model(base, backbone_layer=3, prompt_template="Text: {text}\nScore:", **SCALE)
    trainer = make_trainer(
        folder / mode, model, rows=ROWS, eval_dataset=ROWS, per_device_train_batch_size=batch_size, num_train_epochs=2,
        per_device_eval_batch_size=4, eval_strategy="epoch", ddp_find_unused_parameters=False,
        **{"learning_rate": 1e-2, **kwargs},
    )  # fmt: skip
    run = losses(trainer)
    trainer.save_model(str(folder / mode / "saved"))
    metrics = [entry for entry in trainer.state.log_history if "eval_pearson" in entry][-1]
    trainer.accelerator.wait_for_everyone()
    return run, {name: metrics[name] for name in ("eval_pearson", "eval_rmse", "eval_loss")}


if __name__ == "__main__":
    base, out, *modes = sys.argv[1:]
    found = {mode: train(mode, base, Path(out), 4) for mode in modes}
    from accelerate import PartialState

    state = PartialState(cpu=True)
    assert state.num_processes == 2, state
    if state.is_main_process:
        (Path(out) / "found.json").write_text(json.dumps(found))
    state.destroy_process_group()
