"""Training with adapters (PEFT): a model wrapped for LoRA and its relatives, and checked to train its head too."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from .adapter_relish import HEAD, AdapterError
from .modeling_relish import RelishForSequenceRegression

LORA_ALPHA_PER_RANK = 2


def lora_config(rank: int) -> Any:
    """Return the LoRA that the command line trains: on every linear layer of the backbone, alpha = 2 x rank."""
    if rank < 1:
        raise AdapterError(f"the rank of LoRA is an integer of at least 1, got {rank}.")
    if not is_peft_available():
        raise AdapterError("LoRA needs the package peft: pip install peft.")
    from peft import LoraConfig

    return LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=LORA_ALPHA_PER_RANK * rank, target_modules="all-linear")


def wrap_model(model: Any, peft_config: Any) -> Any:
    """Put a fresh adapter on a model, for training.

    Args:
        model: A RELISH model, or any `PreTrainedModel` as a causal language model; changed in place.
        peft_config: A `peft.PeftConfig`, which is not changed. Its task type follows the model where it is `None`: SEQ_CLS,
            by which PEFT trains and saves the RELISH head too, or CAUSAL_LM.

    Returns:
        The `PeftModel` around it.

    Raises:
        AdapterError: if PEFT is not installed, `peft_config` is none of its, the model has an adapter, or the task is another.
    """
    if not is_peft_available():
        raise AdapterError("peft_config needs the package peft: pip install peft.")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise AdapterError(f"peft_config is a peft.PeftConfig, as LoraConfig(r=8), got {type(peft_config).__name__}.")
    if not isinstance(model, PreTrainedModel) or getattr(model, "peft_config", None):
        raise AdapterError(
            f"peft_config puts an adapter on a plain model, got {type(model).__name__} with one on it: leave peft_config out, or "
            "merge_and_unload() the first."
        )
    task = "CAUSAL_LM" if model.can_generate() else None
    if isinstance(model, RelishForSequenceRegression):
        task = "SEQ_CLS"
    if peft_config.task_type not in (None, task):
        raise AdapterError(
            f"{type(model).__name__} is trained with task_type={task!r}, got {str(peft_config.task_type)!r}."
        )
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = task
    # PEFT has a default for every language model, and none for one inside RELISH.
    if task == "SEQ_CLS" and getattr(peft_config, "target_modules", True) is None:
        peft_config.target_modules = "all-linear"
    backbone: Any = model.backbone if task == "SEQ_CLS" else None
    output_layer = backbone.get_output_embeddings() if backbone is not None else None
    if output_layer is not None and getattr(peft_config, "exclude_modules", "") is None:
        # PEFT leaves a language model's output layer alone, and does not know the one inside RELISH.
        peft_config.exclude_modules = [name for name, module in model.named_modules() if module is output_layer]
    return get_peft_model(model, peft_config)


def check_adapted(model: Any, relish: Any, *, trains: bool = True) -> None:
    """Raise where an adapter would be trained without the head, or inside it, or the head without the adapter.

    Args:
        model: What the trainer was given.
        relish: The RELISH model inside it, or itself.
        trains: Whether there is anything to train on; an adapter may be frozen where it is only evaluated.

    Raises:
        AdapterError: if the head would not be saved with the adapter, or has adapter layers in it, or no weight of the adapter
            would be trained.
    """
    if not getattr(relish, "has_adapter", False):  # a causal language model has no head beside it
        return
    if model is relish:
        raise AdapterError(
            "the model was loaded with its adapter, for inference. To train on, give the trainer "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    inside = [name for name, module in getattr(relish, HEAD).named_modules() if hasattr(module, "base_layer")]
    if inside or not hasattr(getattr(relish, HEAD), "modules_to_save"):
        raise AdapterError(
            f"the head {HEAD!r} is trained and saved whole beside an adapter, but this one "
            f"{f'is on its layers {inside[:2]}' if inside else 'leaves it out'}: use task_type='SEQ_CLS' in the PEFT config."
        )
    if trains and relish.backbone_is_frozen:
        raise AdapterError(
            "no weight of the adapter would be trained, the head alone: all of them have requires_grad=False. Give the trainer "
            "an adapter that is to be trained, as PeftModel.from_pretrained(model, folder, is_trainable=True) loads it."
        )
