"""Heads over token states: RELISH, linear, MLP, RAFT's other predictors, and encoders under an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from transformers import set_seed
from transformers.pytorch_utils import Conv1D

from ..configuration_relish import HEAD_SETTINGS
from .method import Method, Options, Settings, lora, why_no_package
from .training import Outcome, fit, fit_on_logits
from .workbench import Workbench

# Learning rates: the usual one, then those around it. Small heads on a language model have their best at or above the usual
# one, on an encoder around it.
HEAD_RATES, ENCODER_RATES, RELISH_RATES = (3e-3, 1e-2, 3e-2), (3e-3, 1e-3, 1e-2), (3e-4, 1e-3, 1e-4)
LORA_RATES, FULL_RATES = (6e-4, 2e-3, 2e-4), (3e-5, 1e-4, 1e-5)
# Seconds per row and epoch on cached states, two cores; runs that are done correct them.
_ROW_SECONDS = {"relish": 3e-3, "linear": 5e-4, "mlp": 8e-4, "special_token": 5e-4, "final_logits_mlp": 4e-3}
_TRAINED_COST = 3.5  # of a training step, in forward passes
ABLATIONS = (*HEAD_SETTINGS, "objective", "pooling")
_LOGITS_MLP_WIDTH = 64  # over a whole vocabulary of logits, each unit has as many weights as there are tokens


class Head(Method):
    """A head on a backbone, which is frozen or trained by LoRA.

    Args:
        key: As in [`Method`].
        title: Of its row.
        head_type: As in `RelishConfig`.
        searched: Whether it reads the layer that the search found, else the last.
        regimes: Where it makes sense.
        **config: For the model's config.
    """

    def __init__(
        self,
        key: str,
        title: str,
        head_type: str,
        *,
        searched: bool = False,
        regimes: tuple[str, ...] = ("frozen", "lora"),
        **config: Any,
    ) -> None:
        super().__init__(key, title)
        self.head_type, self.searched, self.config = head_type, searched, config
        self.more_settings = ABLATIONS if head_type in ("relish", "linear", "mlp") else ()
        self.regimes = regimes

    def why_not(self, bench: Workbench, regime: str) -> str | None:
        """Say whether LoRA or a language model is missing."""
        if regime == "lora" and (reason := why_no_package("peft", "peft", "peft")):
            return reason
        return bench.why_no_language_model if self.head_type in ("special_token", "final_logits_mlp") else None

    @property
    def _short_fit(self) -> tuple[str, float]:
        """Kind of head and its usual rate, by which layers are compared."""
        return self.head_type, self._rates("frozen")[0]

    def needs_layer_search(self, bench: Workbench) -> bool:
        """Whether its layer is searched, and is not known yet."""
        return self.searched and not bench.layer_is_known(*self._short_fit)

    def layers(self, bench: Workbench, regime: str) -> list[int | None]:
        """Return the layer that it reads, where states are kept."""
        return [self._layer(bench)] if regime == "frozen" else []

    def _layer(self, bench: Workbench) -> int | None:
        if not self.searched:
            return None
        best = bench.layer_search(*self._short_fit)["best"]
        return None if best == bench.config.num_hidden_layers else best

    def grid(self, regime: str) -> Sequence[Settings]:
        """Return learning rates."""
        return [{"learning_rate": rate} for rate in self._rates(regime)]

    def _rates(self, regime: str) -> tuple[float, ...]:
        usual = RELISH_RATES if self.head_type == "relish" else HEAD_RATES
        return {"lora": LORA_RATES, "full": FULL_RATES}.get(regime, usual)

    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return epochs, batch size, the layer and what the head is made of."""
        frozen = regime == "frozen"
        found: dict[str, Any] = {
            "epochs": options.epochs if frozen else options.backbone_epochs,
            "batch_size": options.batch_size if frozen else options.backbone_batch_size,
            "backbone_layer": self._layer(bench),
            **self.config,
        }
        if self.head_type == "final_logits_mlp":
            found["hidden_size"] = _LOGITS_MLP_WIDTH
        return found | ({"lora_rank": options.lora_rank} if regime == "lora" else {})

    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate by rows on cached states, by tokens where the backbone runs."""
        if regime == "frozen":
            return 5 + options.epochs * len(bench.task.splits["train"]) * _ROW_SECONDS[self.head_type]
        per_epoch = _TRAINED_COST * bench.tokens("train") + bench.tokens("validation")
        tokens = options.backbone_epochs * per_epoch + bench.tokens("test")
        share = 0.6 if self.searched else 1.0
        return 10 + share * tokens / bench.tokens_per_second

    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Train the head, alone or with the backbone."""
        mixes = "backbone_layers" in settings
        layer = None if mixes else settings["backbone_layer"]
        if regime == "frozen" and not mixes:
            bench.extract([layer])
        if regime == "frozen" and self.head_type == "final_logits_mlp":
            return [fit_on_logits(bench, settings, seed).with_extraction(bench, None)]
        set_seed(seed)
        own = {"head_hidden_size": settings["hidden_size"]} if "hidden_size" in settings else {}
        model = bench.model(layer, trained=regime == "full", head_type=self.head_type, **own, **self._shape(settings))
        mixing = bench.fill(model) if regime == "frozen" and mixes else 0.0
        adapter = None
        if regime == "lora":
            targets = _inner_linear(model.backbone) if self.head_type == "final_logits_mlp" else "all-linear"
            adapter = lora("SEQ_CLS", settings["lora_rank"], targets)
        _, outcome = fit(
            bench, model, settings, seed, peft_config=adapter, freeze_backbone=regime != "full",
            train_sampling_strategy="random" if regime == "frozen" else "group_by_length",
        )  # fmt: skip
        if mixes:
            outcome = replace(outcome, extraction_seconds=mixing)
        elif regime == "frozen":
            outcome = outcome.with_extraction(bench, layer)
        return [self._with_notes(bench, outcome)]

    def _shape(self, settings: Settings) -> dict[str, Any]:
        return {name: settings[name] for name in (*self.config, *self.more_settings) if name in settings}

    def _with_notes(self, bench: Workbench, outcome: Outcome) -> Outcome:
        if not self.searched:
            return outcome
        search = bench.layer_search(*self._short_fit)
        note = (
            f"layer {search['best']} of {search['of']} by validation; the search, once for this head and data set, took "
            f"{search['seconds']:.0f} s and counts under extraction"
        )
        return replace(outcome, notes=[*outcome.notes, note]).with_seconds(search["seconds"])


def _inner_linear(language_model: Any) -> list[str]:
    """Return the last names of all linear layers but the output layer, which PEFT leaves out only where it is at the top."""
    output = language_model.get_output_embeddings()
    found = (n for n, m in language_model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not output)
    return sorted({name.rpartition(".")[2] for name in found})


class Encoder(Head):
    """An encoder under the MLP head, frozen or trained whole."""

    backbone_kind: ClassVar[str] = "encoder"

    def __init__(self, key: str, pooling: str, pooling_name: str) -> None:
        super().__init__(key, pooling_name, "mlp", regimes=("frozen", "full"), pooling=pooling)

    def _rates(self, regime: str) -> tuple[float, ...]:
        return ENCODER_RATES if regime == "frozen" else super()._rates(regime)

    def rows(self, bench: Workbench) -> tuple[str, ...]:
        """Return its row, by the encoder's name."""
        return (f"{bench.name}, {self.titles[0]}",)
