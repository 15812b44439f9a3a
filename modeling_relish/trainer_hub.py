"""What RelishTrainer adds to Trainer for the Hub: figures that belong to the weights, a card with them, nothing pickled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME, HubStrategy, PushInProgress
from transformers.utils import logging

from .configuration_relish import RelishConfig
from .hub_relish import (
    CARD_NAME,
    HubMixin,
    check_base_for_others,
    check_no_adapter_there,
    is_own_card,
    remote_card,
    write_card,
)
from .model_card import model_card, note_evaluation

logger = logging.get_logger(__name__)

# What of a checkpoint is the model; the rest (optimizer, scheduler, random states) is for resuming, and pickled.
_MODEL_SUFFIXES = {".json", ".safetensors", ".py", ".md", ".txt", ".model", ".jinja"}


class HubTrainer(Trainer):
    """`Trainer` that remembers what it measured, for which weights, and pushes model and card without a pickle."""

    relish: Any
    args: Any
    push_in_progress: Any
    _card_of_hub: str | None = None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as Trainer does, and remember the metrics for these weights."""
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = {k.removeprefix(f"{metric_key_prefix}_"): v for k, v in (output.metrics or {}).items()}
        weights = self.relish.weights_name() if "pearson" in metrics and isinstance(self.relish, HubMixin) else None
        if weights is not None:
            split = "validation" if metric_key_prefix == "eval" else metric_key_prefix.removeprefix("eval_")
            measured = self._measurements()
            measured[weights] = note_evaluation(
                measured.get(weights), split, metrics, output.num_samples or 0,
                weights=weights, dataset=self.args.dataset_name, train_rows=self._train_rows(),
            )  # fmt: skip
            self.relish.config.evaluation = measured[weights]
        return output

    def _measurements(self) -> dict[str, dict[str, Any]]:
        """Weights -> what was measured with them: the best ones may come back after others were measured."""
        if not hasattr(self, "_measured"):
            self._measured: dict[str, dict[str, Any]] = {}
        return self._measured

    def _train_rows(self) -> int | None:
        try:
            return len(self.train_dataset)  # type: ignore[arg-type]
        except TypeError:  # none, or a stream
            return None

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if isinstance(self.relish, HubMixin):
            self.relish.config.evaluation = self._measurements().get(self.relish.weights_name() or "")

    # ------------------------------------------------------------------ push

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, after a look at whether others could load what will be pushed to it."""
        if not self._is_adapted():
            head_only = self.args.freeze_backbone and self.relish.backbone_is_untouched()
            check_base_for_others(self.relish.config, head_only=head_only)
        super().init_hf_repo(token, private)
        if not self._is_adapted() and self.hub_model_id is not None:
            check_no_adapter_there(self.hub_model_id, token or self.args.hub_token, self.args.hub_revision)

    def create_model_card(self, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the card of the output folder, unless a user wrote or edited it; arguments as in Trainer.

        A card that was edited on the Hub is taken from there, so that the push leaves it as it is.
        """
        if self._is_adapted():  # an adapter's card is PEFT's, a plain language model's is Trainer's
            return super().create_model_card(**kwargs)
        if not self.is_world_process_zero():
            return None
        config: RelishConfig = self.relish.config
        tags = kwargs.get("tags") or []
        text = model_card(
            config, repo_id=self.hub_model_id, license=kwargs.get("license"), language=kwargs.get("language"),
            tags=[tags] if isinstance(tags, str) else tags, base_model=kwargs.get("finetuned_from"),
        )  # fmt: skip
        card = Path(self.args.output_dir) / CARD_NAME
        theirs = remote_card(self.hub_model_id, self.args.hub_token) if self.hub_model_id else None
        if card.exists() and card.read_text(encoding="utf-8") == self._card_of_hub:
            card.unlink()  # put here by an earlier push; it may have been edited again since
        if theirs is not None and not is_own_card(theirs):
            logger.warning(f"{self.hub_model_id} has a {CARD_NAME} that was edited; it stays as it is.")
            text = self._card_of_hub = theirs
        write_card(self.args.output_dir, text)
        return None

    def _is_adapted(self) -> bool:
        """Whether what is trained is not the RELISH model itself: an adapter over it, or a plain language model."""
        return self.model is not self.relish

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint while training goes on, as Trainer does, but not its pickled arguments with the token in them."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if running and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        output = Path(self.args.output_dir)
        # Copied, for the checkpoint may be deleted while the upload runs.
        for file in Path(checkpoint_folder).iterdir():
            if file.suffix in _MODEL_SUFFIXES and file.name not in (TRAINER_STATE_NAME, CARD_NAME):
                shutil.copyfile(file, output / file.name)
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        api = HfApi()
        common: dict[str, Any] = {"repo_id": self.hub_model_id, "token": self.args.hub_token, "run_as_future": True,
                                  "revision": self.args.hub_revision}  # fmt: skip
        jobs = [
            api.upload_folder(
                folder_path=output, commit_message=message,
                ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"], **common,
            )
        ]  # fmt: skip
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            where = "last-checkpoint" if last else Path(checkpoint_folder).name
            jobs.append(
                api.upload_folder(
                    folder_path=checkpoint_folder, path_in_repo=where, commit_message=f"{message}, checkpoint", **common
                )
            )
        if running and self.push_in_progress is not None:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)  # type: ignore[arg-type]
