"""What a method is: its names, where it makes sense, what is searched for it, what it costs, and how it is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .tasks import CompareError
from .training import Outcome
from .workbench import Workbench

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What is the same for all methods.

    Args:
        epochs: Passes over the training rows where the backbone is frozen; the one with the best validation Pearson is kept.
        backbone_epochs: The same where the backbone is trained too, by LoRA or whole.
        candidates: How many settings are tried for every method that is trained or fitted, on validation rows: 1 to 3.
        batch_size: Rows per step where the backbone is frozen.
        backbone_batch_size: The same where it is trained.
        lora_rank: Of LoRA on all linear layers; alpha is twice that.
        shots: Examples in the prompt of many-shot decoding, fewer where the backbone's context is shorter.
        samples: Answers drawn for RAIL by sampling.
        decoded_validation_rows: Validation rows that are measured for what decodes and is not trained.
    """

    epochs: float = 8
    backbone_epochs: float = 3
    candidates: int = 3
    batch_size: int = 32
    backbone_batch_size: int = 16
    lora_rank: int = 8
    shots: int = 128
    samples: int = 16
    decoded_validation_rows: int = 250

    def __post_init__(self) -> None:
        if self.candidates not in (1, 2, 3):
            raise CompareError(
                f"candidates is how many settings are tried for each method, 1 to 3, got {self.candidates!r}."
            )
        # 3 and 3.0 are one run, and it is known by how its settings are written.
        for name in ("epochs", "backbone_epochs"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if min(self.epochs, self.backbone_epochs, self.batch_size, self.lora_rank, self.shots, self.samples) <= 0:
            raise CompareError(f"epochs, sizes and counts are above 0, got {self}.")


class Method(ABC):
    """One method. Subclasses say the rest.

    Args:
        key: Its name on the command line.
        titles: Names of its rows in tables: one training may be read in several ways.
    """

    regimes: tuple[str, ...] = ("frozen",)
    has_seeds = True  # else every seed gives the same numbers, and one is run
    # Settings that may be given (an ablation), and are otherwise left to the model's defaults.
    more_settings: tuple[str, ...] = ()
    backbone_kind: ClassVar[str] = "backbone"  # or "encoder", or "none": then its rows stand beside every backbone's

    def __init__(self, key: str, *titles: str) -> None:
        self.key = key
        self.titles = titles

    def rows(self, bench: Workbench) -> tuple[str, ...]:
        """Return the names of its rows."""
        del bench
        return self.titles

    def why_not(self, bench: Workbench, regime: str) -> str | None:
        """Say why it cannot be run here; `None` where it can."""
        del bench, regime
        return None

    def needs_layer_search(self, bench: Workbench) -> bool:
        """Whether its layer has to be searched first, which has not been done."""
        del bench
        return False

    def layers(self, bench: Workbench, regime: str) -> list[int | None]:
        """Return the layers whose cached states it reads; `None` is the last."""
        del bench, regime
        return []

    def grid(self, regime: str) -> Sequence[Settings]:
        """Return up to three settings to choose from, the usual one first; one where nothing is trained."""
        del regime
        return [{}]

    @abstractmethod
    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return every other setting that decides its numbers."""

    @abstractmethod
    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate the seconds of one run, without what is shared; nothing is searched or extracted for it."""

    @abstractmethod
    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Run it; one outcome for each of its rows."""


def lora(task_type: str, rank: int, targets: Any = "all-linear") -> Any:
    """Return LoRA on linear layers, alpha = 2 x rank."""
    from peft import LoraConfig

    return LoraConfig(task_type=task_type, r=rank, lora_alpha=2 * rank, target_modules=targets)


def why_no_package(module: str, package: str, extra: str) -> str | None:
    """Say that an optional package is missing; `None` where it is there."""
    from importlib.util import find_spec

    if find_spec(module) is not None:
        return None
    return f"{package} is not installed: pip install modeling-relish[{extra}]"
