"""`relish push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_shared import say

# What a checkpoint's folder may hold beside the model: pickles, training state, and what the trainers leave.
_STAYS_HERE = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.tmp", "trainer_state.json", "checkpoint-*/*", "checkpoints/*",
               "runs/*", ".*", "__pycache__/*"]  # fmt: skip


def push(
    folder: Annotated[Path, typer.Argument(help="A trained model, as `relish train` and save_pretrained write it.")],
    repo: Annotated[str, typer.Argument(help="user/name on the Hub; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; created if missing.")] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the weights for the model card, as apache-2.0.")
    ] = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "Upload RELISH model",
) -> None:
    """Push a trained model to the Hub, with its code and its model card; log in with `hf auth login` or HF_TOKEN."""
    from huggingface_hub import HfApi

    from .hub_relish import CARD_NAME, HubError, check_no_adapter_there, is_own_card, remote_card, write_card

    if not folder.is_dir():
        raise HubError(f"{folder} is no folder; `relish push` takes a trained model's folder.")
    text, has_adapter = None, (folder / "adapter_config.json").is_file()
    if has_adapter:
        _check_adapter(folder)
    else:
        text = _prepared_card(folder, repo, license)
    api = HfApi()
    repo_id = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
    if not has_adapter:
        check_no_adapter_there(repo_id, revision=revision)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    theirs = remote_card(repo_id)
    edited = theirs is not None and not is_own_card(theirs)
    ignored = [*_STAYS_HERE, CARD_NAME] if edited and (text is None or not _is_edited(folder)) else _STAYS_HERE
    if text is not None:
        write_card(folder, text)
    done = api.upload_folder(
        repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message, ignore_patterns=ignored
    )
    if edited and CARD_NAME in ignored:
        say(f"{repo_id} has a {CARD_NAME} that was edited; it stays as it is.")
    say(f"pushed to {done.commit_url}")


def _prepared_card(folder: Path, repo: str, license: str | None) -> str:
    """Check that others can load a checkpoint, write its code files, and return its card's text."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    from .configuration_relish import RelishConfig
    from .hub_relish import HubError, check_base_for_others, write_code
    from .model_card import model_card

    values: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        values, _ = RelishConfig.get_config_dict(folder)
    if values.get("model_type") != RelishConfig.model_type:
        raise HubError(
            f"{folder} holds no RELISH model: its config.json is missing or says {values.get('model_type')!r}."
        )
    if not any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        raise HubError(f"{folder} has no {SAFE_WEIGHTS_NAME}; only safetensors is pushed.")
    config = RelishConfig.from_pretrained(folder)
    check_base_for_others(config, head_only=not config.backbone_in_checkpoint)
    if "auto_map" not in values:  # saved by an older version: others would not find the code
        config.save_pretrained(folder)
    write_code(folder)
    return model_card(config, repo_id=repo, license=license)


def _check_adapter(folder: Path) -> None:
    """Check that an adapter names a base that others have; its card is PEFT's own."""
    import json

    from .base_model_relish import is_local_name
    from .hub_relish import HubError

    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or is_local_name(base):
        raise HubError(
            f"{folder} is an adapter whose base is {base!r}, which others do not have. Push the base model first, and "
            "name it by its Hub id in adapter_config.json (base_model_name_or_path), or merge the adapter and push the whole."
        )


def _is_edited(folder: Path) -> bool:
    from .hub_relish import CARD_NAME, is_own_card

    card = folder / CARD_NAME
    return card.is_file() and not is_own_card(card.read_text(encoding="utf-8"))
