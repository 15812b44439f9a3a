"""What is to be run: workbenches, settings that are held, and jobs in their order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .method import Method
from .methods import find_methods
from .tasks import CompareError, Task
from .workbench import Workbench, backbone_name

REGIMES = ("frozen", "lora", "full")
Chosen = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Job:
    """One method under one regime with one seed, on a workbench."""

    bench: Workbench
    method: Method
    regime: str
    seed: int

    @property
    def label(self) -> str:
        """The backbone's name in results; nothing for what stands beside every backbone."""
        return self.bench.name if self.method.backbone_kind == "backbone" else ""

    @property
    def owner(self) -> str:
        """Whose settings these are: a backbone's name, an encoder's, or nothing."""
        return self.bench.name if self.method.backbone_kind != "none" else ""

    @property
    def choice(self) -> str:
        """The settings' name: `method/regime`."""
        return f"{self.method.key}/{self.regime}"

    @property
    def name(self) -> str:
        """What the job is called on the screen and among what was left out."""
        parts = (" + ".join(self.method.rows(self.bench)), self.regime, self.label, f"seed {self.seed}")
        return ", ".join(part for part in parts if part)


def split_names(given: str | Sequence[str]) -> list[str]:
    """Return the names of a list, or of one string with commas between."""
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else list(given)


def read_settings(settings: Chosen | str | Path | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return settings that were chosen before: backbone -> `method/regime` -> settings, from a mapping or a JSON file.

    Raises:
        CompareError: for another form, or a method or regime that is not known.
    """
    if settings is None:
        return {}
    if isinstance(settings, (str, Path)):
        try:
            settings = json.loads(Path(settings).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CompareError(f"{settings} holds no settings of a comparison: {error}") from error
    try:
        found = {b: {name: dict(values) for name, values in of.items()} for b, of in settings.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError) as error:
        raise CompareError(f"settings are backbone -> method/regime -> settings, got {settings!r}.") from error
    for name in {name for of in found.values() for name in of}:
        method, _, regime = name.partition("/")
        (known,) = find_methods([method])
        if regime not in known.regimes:
            raise CompareError(
                f"settings are for method/regime, {method} has {', '.join(known.regimes)}; got {name!r}."
            )
    return found


def make_benches(
    task: Task, backbones: Sequence[str], encoder: str, folder: Path, features_dir: Any, max_length: int, layers: Any
) -> dict[str, list[Workbench]]:
    """Return the workbenches of every kind of method.

    Raises:
        CompareError: for two backbones with one name, or none.
        BackboneError, OSError: for a backbone that is not there.
    """
    names = [backbone_name(backbone) for backbone in backbones]
    if not names or len(set(names)) < len(names):
        raise CompareError(f"backbones must have different names, at least one; got {list(backbones)}.")
    root = None if features_dir is None else str(features_dir)

    def bench(backbone: str, **more: Any) -> Workbench:
        return Workbench(task, backbone, folder, root, max_length, dict(layers or {}), **more)

    every = [bench(backbone) for backbone in backbones]
    for one in every:
        _ = one.config, one.tokenizer  # one that is not there would fail in every job, and late
    return {"backbone": every, "encoder": [bench(encoder, plain_prompt=True)], "none": every[:1]}


def make_jobs(
    benches: Mapping[str, Sequence[Workbench]], methods: Sequence[Method], regimes: Sequence[str], seeds: Sequence[int]
) -> tuple[list[Job], dict[str, str]]:
    """Return jobs, those with the first seed first, and what cannot be run, with the reason."""
    jobs, left_out = [], {}
    for seed in seeds:
        for regime in ("none", *(r for r in REGIMES if r in regimes)):
            for method in methods:
                if regime not in method.regimes or (seed != seeds[0] and not method.has_seeds):
                    continue
                for bench in benches[method.backbone_kind]:
                    job = Job(bench, method, regime, seed)
                    try:
                        reason = method.why_not(bench, regime)
                        name = job.name
                    except (ValueError, OSError) as error:
                        reason, name = str(error), f"{method.key}, {regime}, {bench.name}, seed {seed}"
                    if reason is None:
                        jobs.append(job)
                    else:
                        left_out[name] = reason
    for method in methods:
        if not {"none", *regimes} & set(method.regimes):
            left_out[method.key] = f"it is run under {' or '.join(method.regimes)}, which was not asked for"
    return jobs, left_out
