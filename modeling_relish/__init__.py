"""RELISH: regression with a latent state that reads a frozen language model (Su and Lease, COLM 2026)."""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from .configuration_relish import RelishConfig
from .modeling_relish import RelishForSequenceRegression

if TYPE_CHECKING:
    from .features import FeatureCache
    from .metrics import regression_metrics
    from .reward import RelishRewardTrainer, as_reward_model
    from .trainer import RelishTrainer
    from .training_args import RelishTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "FeatureCache",
    "RelishConfig",
    "RelishForSequenceRegression",
    "RelishRewardTrainer",
    "RelishTrainer",
    "RelishTrainingArguments",
    "as_reward_model",
    "regression_metrics",
]

# What training needs takes seconds to import; who only predicts does not wait for it.
_LAZY = {
    "FeatureCache": "features",
    "RelishRewardTrainer": "reward",
    "RelishTrainer": "trainer",
    "RelishTrainingArguments": "training_args",
    "as_reward_model": "reward",
    "regression_metrics": "metrics",
}


def _write_card(config: RelishConfig, **kwargs: Any) -> str:
    from .model_card import model_card

    return model_card(config, **kwargs)


AutoConfig.register(RelishConfig.model_type, RelishConfig, exist_ok=True)
AutoModel.register(RelishConfig, RelishForSequenceRegression, exist_ok=True)
AutoModelForSequenceClassification.register(RelishConfig, RelishForSequenceRegression, exist_ok=True)
RelishForSequenceRegression.card_writer = staticmethod(_write_card)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
