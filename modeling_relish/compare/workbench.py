"""What methods share on one data set and backbone: models, hidden states and the layer search, each made once and timed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ..backbone_relish import BackboneError, check_architecture
from ..base_model_relish import EMBEDDED_PREFIX, load_backbone, resolve_backbone, whole_config
from ..cli_shared import compute_dtype, write_json
from ..feature_files import text_key
from ..features import FeatureCache, fill_layers
from ..layer_search import at_layer, best_layer
from ..modeling_relish import RelishForSequenceRegression
from ..number_grid_relish import NumberGrid
from ..text_relish import TemplateError
from ..trainer import RelishTrainer
from ..training_args import RelishTrainingArguments
from ..training_data import token_ids
from ..weights_relish import backbone_fingerprint
from .tasks import SPLITS, CompareError, Task


@dataclass
class Workbench:
    """One data set and one backbone.

    Args:
        task: The data set.
        backbone: Hub id, folder or `embedded:NAME`.
        folder: Of the comparison: what is found out once is kept here.
        features_dir: Root of the feature cache; `None` = the user's.
        max_length: Longest prompt in tokens.
        layer_settings: For [`search_layer`]: `layers`, `sample_rows`, `validation_rows`, `epochs`.
        upcoming: Layers that other methods will read too; a pass that is needed anyway keeps them as well.
        plain_prompt: Nothing around the texts but the tokenizer's separator between them: what an encoder reads.
    """

    task: Task
    backbone: str
    folder: Path
    features_dir: str | None = None
    max_length: int = 1024
    layer_settings: dict[str, Any] = field(default_factory=dict)
    plain_prompt: bool = False
    upcoming: list[int | None] = field(default_factory=list)
    _searches: dict[tuple[str, float], dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _seen: set[int] = field(default_factory=set, init=False, repr=False)  # layers that are in the cache for every text

    @property
    def name(self) -> str:
        """The backbone's name in results: never a path."""
        return backbone_name(self.backbone)

    @cached_property
    def prompt(self) -> str:
        """The prompt template."""
        if not self.plain_prompt:
            return self.task.template
        between = f" {self.tokenizer.sep_token} " if self.tokenizer.sep_token else "\n"
        return between.join(f"{{{name}}}" for name in self.task.fields)

    @cached_property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer."""
        return AutoTokenizer.from_pretrained(resolve_backbone(self.backbone), trust_remote_code=False)

    @cached_property
    def config(self) -> Any:
        """The backbone's text configuration."""
        return whole_config(self.backbone, {})

    @cached_property
    def fingerprint(self) -> str | None:
        """What tells the backbone's weights from others under the same name."""
        return backbone_fingerprint(load_backbone(self.backbone))

    @cached_property
    def why_no_language_model(self) -> str | None:
        """Say why nobody can ask this backbone for a number in words; `None` where one can."""
        try:
            check_architecture(self.config, causal_lm=True)
            NumberGrid.covering(*self.task.label_range).resolve(self.tokenizer, self.prompt)
        except (BackboneError, TemplateError, ValueError) as error:
            return str(error)
        return None

    @cached_property
    def _read(self) -> tuple[dict[str, list[list[int]]], int]:
        config, cut, found = self.model(1).config, 0, {}
        for split in SPLITS:
            rows: list[int] = []
            found[split] = token_ids(self.task.splits[split], split, config, self.tokenizer, rows)
            cut += len(rows)
        return found, cut

    @property
    def ids(self) -> dict[str, list[list[int]]]:
        """Token ids of every prompt, by split."""
        return self._read[0]

    @property
    def notes(self) -> list[str]:
        """What a reader of its figures has to know: how many texts were cut."""
        (ids, cut), longest = self._read, min(self.max_length, self.tokenizer.model_max_length)
        if not cut:
            return []
        rows = sum(map(len, ids.values()))
        return [f"{self.name} reads {cut} of {rows} texts without their end: they have more than {longest} tokens."]

    def tokens(self, split: str) -> int:
        """Return how many tokens a split's prompts have."""
        return sum(map(len, self.ids[split]))

    def model(self, layer: int | None = None, *, trained: bool = False, **settings: Any) -> RelishForSequenceRegression:
        """Start a model on the backbone; `trained` loads weights in fp32, for all of them will move."""
        low, high = self.task.label_range
        return RelishForSequenceRegression.from_backbone(
            self.backbone, backbone_layer=layer, prompt_template=self.prompt, max_length=self.max_length,
            label_min=low, label_max=high, dtype="float32" if trained else compute_dtype(), **settings,
        )  # fmt: skip

    def language_model(self) -> PreTrainedModel:
        """Load the causal language model, on the device that computes."""
        return on_device(load_backbone(self.backbone, causal_lm=True, dtype=compute_dtype())).eval()

    # ------------------------------------------------------------------ the layer

    def _search_file(self, head_type: str) -> Path:
        head = "" if head_type == "relish" else f"--{_slug(head_type)}"
        return self.folder / "shared" / f"layers--{_slug(self.task.name)}--{_slug(self.name)}{head}.json"

    def layer_is_known(self, head_type: str, learning_rate: float) -> bool:
        """Whether the search has been done for a kind of head, at its learning rate, on these rows and weights."""
        kept = self._kept(self._search_file(head_type), learning_rate=learning_rate)
        return (head_type, learning_rate) in self._searches or kept is not None

    def layer_search(self, head_type: str, learning_rate: float) -> dict[str, Any]:
        """Return which layer a kind of head reads best by validation: `found` (layer -> Pearson), `best`, `of`, `seconds`.

        Every kind has its own search, at its own usual rate: what one reads best need not be what another does.
        """
        which = (head_type, learning_rate)
        if which not in self._searches:
            kept = self._kept(self._search_file(head_type), learning_rate=learning_rate)
            self._searches[which] = kept or self._search(head_type, learning_rate)
        return self._searches[which]

    def _search(self, head_type: str, learning_rate: float) -> dict[str, Any]:
        model = on_device(self.model(head_type=head_type))
        args = RelishTrainingArguments(
            output_dir=str(self.folder), disable_tqdm=True, seed=0, features_dir=self.features_dir, report_to="none",
            learning_rate=learning_rate,
        )  # fmt: skip
        started = time.monotonic()
        train, validation = self.task.splits["train"], self.task.splits["validation"]
        found = RelishTrainer.search_layer(model, train, validation, self.tokenizer, args=args, **self.layer_settings)
        kept = {
            "found": {str(layer): score for layer, score in found.items()}, "best": best_layer(found),
            "of": self.config.num_hidden_layers, "learning_rate": learning_rate, "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        write_json(self._search_file(head_type), {**self._identity, **kept})
        return kept

    @cached_property
    def _identity(self) -> dict[str, Any]:
        settings = {name: value for name, value in self.layer_settings.items() if value is not None}
        return {
            "data": self.task.digest, "weights": self.fingerprint, "prompt": self.prompt, "max_length": self.max_length,
            "layer_settings": settings,
        }  # fmt: skip

    def _kept(self, file: Path, **more: Any) -> dict[str, Any] | None:
        """Read a note that was kept, where it is about these rows, these weights and these settings, and `more` of them."""
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(file.read_text(encoding="utf-8"))
            if all(values.get(name) == value for name, value in {**self._identity, **more}.items()):
                return values
        return None

    # ------------------------------------------------------------------ hidden states

    @property
    def _extraction_file(self) -> Path:
        return self.folder / "shared" / f"features--{_slug(self.task.name)}--{_slug(self.name)}.json"

    def extract(self, layers: Sequence[int | None]) -> None:
        """Run the backbone once over all texts for several layers, where that has not been done, and keep how long it took."""
        total = self.config.num_hidden_layers
        if {layer or total for layer in layers} <= self._seen:
            return
        asked = {layer or total for layer in (*layers, *self.upcoming)} - self._seen
        distinct = {text_key(row): row for split in SPLITS for row in self.ids[split]}
        whole = on_device(self.model())
        parts = {layer: at_layer(whole, None if layer == total else layer) for layer in sorted(asked)}
        caches = {layer: FeatureCache(part, self.features_dir) for layer, part in parts.items()}
        # The note outlives the states: a cache that was emptied is filled again, all its layers in one pass.
        missing = {layer: {key for key, row in distinct.items() if row not in cache} for layer, cache in caches.items()}
        numbers = [layer for layer, rows in missing.items() if rows]
        seconds: dict[str, float | None] = {**dict.fromkeys(map(str, asked)), **self._extraction_seconds()}
        if numbers:
            reader = at_layer(whole, layers=numbers) if len(numbers) > 1 else parts[numbers[0]]
            started = time.monotonic()
            fill_layers([caches[n] for n in numbers], reader, list(distinct.values()), show_progress=False)
            # What some earlier run left there is counted at this pass's speed.
            new = sum(len(distinct[key]) for key in set().union(*missing.values()))
            took = (time.monotonic() - started) * sum(map(len, distinct.values())) / new
            seconds |= {str(layer): round(took * layer / max(numbers), 1) for layer in numbers}
        write_json(self._extraction_file, {**self._identity, "seconds": seconds})
        self._seen |= asked

    def fill(self, model: RelishForSequenceRegression) -> float:
        """Keep what one model's head reads, where `extract` does not know it (a mix of layers); return the seconds it took."""
        started = time.monotonic()
        FeatureCache(model, self.features_dir).add([r for s in SPLITS for r in self.ids[s]], show_progress=False)
        return round(time.monotonic() - started, 4)

    def _extraction_seconds(self) -> dict[str, float | None]:
        return dict((self._kept(self._extraction_file) or {}).get("seconds", {}))

    def extraction_seconds(self, layer: int | None) -> float | None:
        """Return what the states of a layer took when they were made; `None` where an earlier run has made them all."""
        return self._extraction_seconds().get(str(layer or self.config.num_hidden_layers))

    def is_extracted(self, layer: int | None) -> bool:
        """Whether the states of a layer were made."""
        return str(layer or self.config.num_hidden_layers) in self._extraction_seconds()

    def last_states(self, split: str) -> torch.Tensor:
        """Return (N, D) states of every prompt's last token after the last layer, from the cache."""
        self.extract([None])
        cache = FeatureCache(self.model(), self.features_dir)
        cache.add(self.ids[split], show_progress=False)
        return torch.stack([cache.states(text_key(row))[-1] for row in self.ids[split]])

    # ------------------------------------------------------------------ speed

    @cached_property
    def tokens_per_second(self) -> float:
        """Measure how many tokens a second the whole backbone reads, on a batch of the training prompts."""
        model = on_device(self.model())
        rows = sorted(self.ids["train"], key=len)[-max(1, min(16, len(self.ids["train"]))) :]
        width = len(rows[-1])
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device())
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device())
        with torch.no_grad():
            model.token_states(ids[:1], mask[:1])
            started = time.monotonic()
            model.token_states(ids, mask)
        return ids.numel() / max(1e-6, time.monotonic() - started)


def backbone_name(backbone: str) -> str:
    """Return a backbone's name as results have it: the last part of an id or a folder."""
    name = backbone.removeprefix(EMBEDDED_PREFIX).rstrip("/").split("/")[-1]
    if not name or name in (".", ".."):
        raise CompareError(f"the backbone {backbone!r} has no name of its own; give the folder by its name.")
    return name


def device() -> str:
    """Return where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_device(model: Any) -> Any:
    """Move a model to where models run."""
    return model.to(device())


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-").lower()
