"""Scores of a table in parts on disk: shared among processes, and taken up again after a kill.

The parts lie beside the output, in a hidden folder whose name is a digest of the model's weights and settings, of its tokenizer,
of every text and of the part's size: another model or another table has another folder, so nothing of it can be mixed in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

FULL_DIGEST_SIZE = 1 << 22
SAMPLED_VALUES = 4096
POLL_SECONDS = 0.1


class ScorePartError(ValueError):
    """A part of a table's scores does not belong to the rows that it is for."""


def process_rank() -> tuple[int, int]:
    """Return this process's number and how many there are, as `accelerate launch` and `torchrun` tell them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@torch.no_grad()
def model_digest(model: Any) -> str:
    """Digest what decides a model's scores: its configuration, and its weights, large ones by 4096 spread values."""
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "_name_or_path": None, "name_or_path": None}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        if flat.numel() > FULL_DIGEST_SIZE:
            where = torch.linspace(0, flat.numel() - 1, SAMPLED_VALUES, dtype=torch.float64).long()
            flat = flat[where.to(flat.device)]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest what decides a text's tokens: the vocabulary with its rules, the special tokens and the greatest length."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = json.dumps(tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str()
    beside = json.dumps([tokenizer.special_tokens_map, tokenizer.model_max_length], sort_keys=True, default=str)
    return hashlib.sha256(f"{words}\n{beside}".encode()).hexdigest()


class Part(NamedTuple):
    """The scores of a part's rows, and how many answers they were read from.

    Args:
        scores: (N, K) fp32.
        not_numbers: How many answers were no number.
        answers: How many answers a language model wrote; 0 where it wrote none.
    """

    scores: np.ndarray
    not_numbers: int = 0
    answers: int = 0


class ScoreParts:
    """The scores of a table's parts, each in a file that is there whole or not at all.

    Args:
        output: The table that will be written.
        identity: Everything that decides the scores.
    """

    def __init__(self, output: Path, identity: Iterable[str]) -> None:
        digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
        self.folder = output.parent / f".{output.name}.{digest}.parts"
        self._all = f".{output.name}.*.parts"

    def write(self, number: int, texts: str, part: Part) -> None:
        """Keep a part, whose texts have the digest `texts`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"texts": texts, **part._asdict(), "scores": part.scores.tolist()})
        path = self._path(number)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}")
        temporary.replace(path)

    def read(self, number: int, texts: str) -> Part | None:
        """Return a part; `None` where it is missing or damaged.

        Raises:
            ScorePartError: if it is of other texts, for then the table has changed while it was scored.
        """
        try:
            check, content = self._path(number).read_text().split("\n", 1)
        except (OSError, ValueError):
            return None
        if check != hashlib.sha256(content.encode()).hexdigest():
            return None
        kept = json.loads(content)
        if kept.pop("texts") != texts:
            raise ScorePartError(
                f"part {number} in {self.folder} is of other texts: the table changed while it was scored."
            )
        return Part(**{**kept, "scores": np.asarray(kept["scores"], dtype=np.float32)})

    def wait(self, number: int, texts: str) -> Part:
        """Return a part as soon as the process that computes it has written it."""
        while (part := self.read(number, texts)) is None:
            time.sleep(POLL_SECONDS)
        return part

    def remove(self) -> None:
        """Remove the parts, and those of earlier runs for the same output that nobody took up."""
        for folder in self.folder.parent.glob(self._all):
            with suppress(OSError):
                shutil.rmtree(folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"
