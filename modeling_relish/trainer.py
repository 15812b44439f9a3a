"""RelishTrainer: from raw text and labels to a trained head, with the backbone run once per text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from .adapter_relish import complete_adapter
from .adapter_training import check_adapted, wrap_model
from .configuration_checks_relish import AUTO_LAYER, GRID_OBJECTIVES, OBJECTIVES, RelishConfigError
from .data import TableError
from .data_collator import RelishCollator
from .features import FeatureCache, FeatureDataset
from .hub_relish import write_code
from .layer_search import best_layer, layer_table, search_layer, set_layer
from .lm_training import LanguageModelRegression, grid_diagnostics, relish_model
from .metrics import make_compute_metrics
from .modeling_relish import RelishForSequenceRegression
from .trainer_hub import HubTrainer
from .training_args import RelishTrainingArguments
from .training_data import (
    TokenDataset,
    check_pad_token,
    check_resolution,
    checked_weights,
    column_names,
    column_values,
    find_label_columns,
    find_weight_column,
    label_values,
    token_ids,
    warn_of_other_scale,
)

logger = logging.get_logger(__name__)


class RelishTrainer(HubTrainer):
    """`transformers.Trainer` for RELISH models.

    It takes data sets with the template's text columns (or `input_ids`), checks the labels, measures their mean, deviation and
    range on the training rows and writes them to the config, freezes the backbone unless told otherwise, runs a frozen backbone
    once per text, and reports Pearson, Spearman, NRMSE, RMSE and MAE in label units.

    Args:
        model: A [`RelishForSequenceRegression`], or a plain causal language model, which is then trained over `number_grid`
            and stays one; or a PEFT model around either.
        args: [`RelishTrainingArguments`].
        data_collator: As in `Trainer`; pads tokens or states where `None`.
        train_dataset: `datasets.Dataset` (or a list of dicts) with text columns or `input_ids`, and labels.
        eval_dataset: The same, or a dict of them.
        processing_class: The tokenizer; needed for text columns.
        compute_metrics: Replaces the metrics above.
        peft_config: A `peft.LoraConfig` or another PEFT config: the adapter is put on the backbone and trained with the head.
        number_grid: For a causal language model: a `NumberGrid`, numbers, or a mapping word -> number.
        prompt_template: For a causal language model: the prompt; its end asks for the number.
        **kwargs: As in `Trainer`.

    Raises:
        TableError: for a missing column, a label that is not a number, or a bad weight, with column and row.
        AdapterError: for a `peft_config` that does not fit, or an adapter that leaves the head out.
    """

    args: RelishTrainingArguments

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | None = None,
        args: RelishTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        peft_config: Any = None,
        number_grid: Any = None,
        prompt_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = RelishTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, RelishTrainingArguments):
            raise ValueError(f"RelishTrainer takes RelishTrainingArguments, got {type(args).__name__}.")
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,union-attr]
        self.relish = relish_model(inner, args, number_grid, processing_class, prompt_template)
        if peft_config is not None and not args.freeze_backbone:
            raise ValueError("freeze_backbone=False trains every weight, peft_config an adapter: choose one of them.")
        if self.relish.config.backbone_layer == AUTO_LAYER:  # before an adapter is on: the search freezes the backbone
            self._choose_layer(args, train_dataset, eval_dataset, processing_class)
        if peft_config is not None:
            model = wrap_model(model, peft_config)
        check_adapted(model, self.relish, trains=train_dataset is not None)
        self._own_collator = data_collator is None or isinstance(data_collator, RelishCollator)
        self._weight_scale = 1.0
        self._prepared: dict[
            tuple[int, bool], tuple[Any, Any]
        ] = {}  # id -> (the data set itself, kept alive; what it became)
        _apply_settings(self.relish, args, adapted=model is not inner)
        check_pad_token(processing_class, self.relish.config.vocab_size)
        if args.ddp_find_unused_parameters is None and self.relish.backbone_is_frozen:
            args.ddp_find_unused_parameters = False  # the head uses all of its own; looking for others costs every step
        self.args = args
        if train_dataset is not None:
            self._measure_labels(train_dataset)
        config = self.relish.config
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or RelishCollator(config.pad_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics or make_compute_metrics(config.label_range),
            **kwargs,
        )
        if isinstance(self.relish, LanguageModelRegression):
            self.model_accepts_loss_kwargs = False  # the loss is a mean of ours, whatever the model's own would be
        if train_dataset is not None and not any(p.requires_grad for p in inner.parameters()):
            raise RelishConfigError(
                f"nothing would be trained: a frozen {config.head_type} head has no weights of its own. Train the backbone "
                "(freeze_backbone=False), or an adapter in it, or learn_values=True."
            )
        self.train_dataset = self._prepare(train_dataset, "train", is_train=True)
        if isinstance(eval_dataset, dict):
            self.eval_dataset = {name: self._prepare(split, name) for name, split in eval_dataset.items()}
        else:
            self.eval_dataset = self._prepare(eval_dataset, "eval")

    # ------------------------------------------------------------------ the layer

    @classmethod
    def search_layer(cls, *args: Any, **kwargs: Any) -> dict[int, float]:
        """Fit a head on every candidate layer of a sample; see [`layer_search.search_layer`]."""
        return search_layer(*args, trainer_class=cls, **kwargs)

    def _choose_layer(self, args: RelishTrainingArguments, train: Any, evaluation: Any, tokenizer: Any) -> None:
        """Search the layer of a model with `backbone_layer="auto"`, and cut its backbone there."""
        if train is None or evaluation is None or isinstance(evaluation, dict) or args.world_size > 1:
            raise RelishConfigError(
                'backbone_layer="auto" is searched on train_dataset and one eval_dataset, in one process; give both, or a layer.'
            )
        found = self.search_layer(self.relish, train, evaluation, tokenizer, args=args)
        if not args.disable_tqdm:
            print(layer_table(found))
        set_layer(self.relish, best_layer(found))  # type: ignore[arg-type]
        self.relish.config.layer_search = {str(layer): score for layer, score in found.items()}

    # ------------------------------------------------------------------ a language model's numbers

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, and the outputs where they are asked for; as in `Trainer`."""
        if isinstance(self.relish, LanguageModelRegression):
            outputs = self.relish.outputs(model, inputs)
            loss = outputs.loss
        else:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        log_probs = getattr(outputs, "log_probs", None)
        if not model.training and self.args.grid_diagnostics and log_probs is not None:
            found = grid_diagnostics(log_probs.detach())
            self._diagnostics.append(self.accelerator.gather_for_metrics(found).cpu())
        if log_probs is not None:  # what follows are predictions, and they are numbers alone
            return (loss, {"loss": loss, "logits": outputs["logits"]}) if return_outputs else loss
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return loss, predictions in label units and labels; as in `Trainer`."""
        if isinstance(self.relish, LanguageModelRegression) and inputs.get("labels") is None:
            with torch.no_grad():
                return None, self.relish.outputs(model, self._prepare_inputs(inputs)).logits, None
        return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; `grid_diagnostics` adds the mean probability mass on the grid and the mean entropy over it."""
        self._diagnostics: list[torch.Tensor] = []
        output = super().evaluation_loop(*args, **kwargs)
        if self._diagnostics and output.metrics is not None:
            prefix = kwargs.get("metric_key_prefix", "eval")
            mass, entropy = torch.cat(self._diagnostics).double().mean(0).tolist()
            output.metrics.update({f"{prefix}_grid_mass": mass, f"{prefix}_grid_entropy": entropy})
        return output

    # ------------------------------------------------------------------ loaders, samplers, saving

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        # The one door through which every data set comes, those given to evaluate() and predict() too.
        return super()._get_dataloader(self._prepare(dataset, description), description, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = getattr(dataset, "lengths", None)
        if lengths is not None and self.args.train_sampling_strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthGroupedSampler(size, lengths=lengths)
        return super()._get_train_sampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        # Trainer would group these by length too, and predict() would not answer in the order of the rows.
        if self.args.train_sampling_strategy == "group_by_length" and not isinstance(eval_dataset, IterableDataset):
            return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None
        return super()._get_eval_sampler(eval_dataset)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if getattr(self.relish, "has_adapter", False) and self.args.should_save:
            complete_adapter(self.relish, output_dir or self.args.output_dir or ".")
            write_code(output_dir or self.args.output_dir or ".")
        # Trainer pickles its arguments beside the weights: machine paths that nothing reads, in a format that runs code.
        (Path(output_dir or self.args.output_dir or ".") / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    # ------------------------------------------------------------------ labels

    def _measure_labels(self, dataset: Any) -> None:
        """Write the training labels' mean, deviation and range to the config, where it has none."""
        if isinstance(dataset, IterableDataset):
            if self.relish.config.label_mean is None and self.args.standardize_labels:
                raise TableError(
                    "the labels of streamed rows cannot be measured: give the config label_mean and label_std, or train on raw "
                    "labels with standardize_labels=False."
                )
            return
        if not len(dataset):
            raise TableError("the train data has no row.")
        columns = find_label_columns(dataset, "train", self.args.label_columns, required=False)
        weight_column = find_weight_column(dataset, "train", self.args.weight_column, required=True)
        weights = column_values(dataset, weight_column)
        counts: Any = slice(None)
        if weights is not None:
            checked = checked_weights(weights, weight_column, "train", minimum=0.0)
            counts, mean = checked > 0, float(np.mean(checked))
            if mean <= 0:
                raise TableError("the weights of the train data are all zero: no row would count.")
            self._weight_scale = 1.0 / mean
        if not columns:
            return
        config, named = self.relish.config, self.args.label_columns
        labels = label_values(dataset, columns, "train", config, named)[counts]  # of rows without weight, nothing
        check_resolution(labels)
        warn_of_other_scale(labels, config)
        if config.label_mean is None and self.args.standardize_labels:
            std = labels.std(axis=0)
            if (std == 0).any():
                logger.warning(f"the training labels are all equal ({labels[0].tolist()}): there is nothing to learn.")
            config.label_mean = labels.mean(axis=0).tolist()
            config.label_std = np.where(std > 0, std, 1.0).tolist()
        if config.label_min is None and (labels.max(axis=0) > labels.min(axis=0)).all():
            config.label_min, config.label_max = labels.min(axis=0).tolist(), labels.max(axis=0).tolist()
        if named and len(named) == config.num_labels:
            if set(named) != set(config.target_names):  # else the targets keep the order that the head has
                config.id2label = dict(enumerate(named))
            config.label2id = {name: i for i, name in config.id2label.items()}

    # ------------------------------------------------------------------ data sets

    def _prepare(self, dataset: Any, name: str, *, is_train: bool = False) -> Any:
        """Turn rows of text or tokens into rows of states (frozen backbone, cached) or tokens; others pass as they are."""
        if dataset is None or isinstance(dataset, (TokenDataset, FeatureDataset)):
            return dataset
        key = id(dataset), name == "test"  # rows to predict may lack the label that evaluation needs
        if key in self._prepared:
            return self._prepared[key][1]
        if isinstance(dataset, IterableDataset):
            present = getattr(dataset, "column_names", None)
            if present and not {"input_ids", "inputs_embeds", "hidden_states"} & set(present):
                raise TableError(
                    f"streamed {name} data needs token columns (input_ids, labels); its columns are {present}."
                )
            return dataset
        if {"hidden_states", "inputs_embeds"} & set(column_names(dataset)):
            return dataset
        ids = token_ids(dataset, name, self.relish.config, self.processing_class)
        columns = self._columns(dataset, name, is_train)
        prepared: Any = (
            FeatureDataset(self._cached(ids), ids, columns) if self._caches() else TokenDataset(ids, columns)
        )
        self._prepared[key] = (dataset, prepared)
        return prepared

    def _columns(self, dataset: Any, name: str, is_train: bool) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {}
        named, to_predict = self.args.label_columns, name == "test"  # as Trainer.predict calls them
        label_columns = find_label_columns(dataset, name, named, required=is_train, optional=to_predict)
        if label_columns:
            labels = label_values(dataset, label_columns, name, self.relish.config, named)
            columns["labels"] = labels.astype(np.float32)
        weight_column = find_weight_column(dataset, name, self.args.weight_column, required=is_train)
        weights = column_values(dataset, weight_column)
        if weights is not None:
            checked = checked_weights(weights, weight_column, name, minimum=0.0)
            columns["sample_weight"] = (checked * self._weight_scale).astype(np.float32)
        return columns

    def _caches(self) -> bool:
        wanted = self.args.cache_features
        if self.relish.config.reads_language_model:
            if wanted:
                raise ValueError(
                    "cache_features=True keeps hidden states; this head reads the language model's output."
                )
            return False
        possible = self.relish.backbone_is_frozen and not getattr(self.relish, "has_adapter", False)
        if wanted and not possible:
            raise ValueError("cache_features=True needs a frozen backbone: one that is trained changes its states.")
        if wanted is None and possible and not self._own_collator:
            logger.warning_once(
                "the data_collator given pads tokens, so no features are cached: the backbone runs every epoch."
            )
            return False
        return possible if wanted is None else wanted

    def _cached(self, ids: list[list[int]]) -> FeatureCache:
        if not hasattr(self, "_cache"):
            assert isinstance(self.relish, RelishForSequenceRegression)
            self._cache = FeatureCache(self.relish, self.args.features_dir, self.args.features_dtype)
        rank, world = self.args.process_index, self.args.world_size
        self._cache.add(ids, show_progress=not self.args.disable_tqdm and rank == 0, rank=rank, world=world)
        if world > 1:  # every process has written its shards; the first closes the request, then all read it
            self.accelerator.wait_for_everyone()
            if rank == 0:
                self._cache.refresh(ids)
            self.accelerator.wait_for_everyone()
            self._cache.refresh(ids, is_main=False)
        return self._cache


def _apply_settings(
    model: RelishForSequenceRegression | LanguageModelRegression, args: RelishTrainingArguments, *, adapted: bool
) -> None:
    if args.objective is not None:
        if args.objective not in OBJECTIVES:
            raise RelishConfigError(f"objective must be one of {list(OBJECTIVES)}, got {args.objective!r}.")
        if args.objective in GRID_OBJECTIVES and model.config.head_type != "number_grid":
            raise RelishConfigError(
                f"objective {args.objective!r} is about the probabilities of numbers: it needs a number_grid head or a causal "
                f"language model with number_grid=, got head_type={model.config.head_type!r}."
            )
        if args.objective == "mbr" and not model.config.normalize_grid:
            raise RelishConfigError('objective "mbr" needs a model with normalize_grid=True.')
        model.config.objective = args.objective
    if args.huber_delta is not None:
        if not args.huber_delta > 0:
            raise RelishConfigError(f"huber_delta must be a positive number, got {args.huber_delta}.")
        model.config.huber_delta = args.huber_delta
    if adapted or isinstance(model, LanguageModelRegression):  # what is trained was chosen before
        return
    if args.freeze_backbone:
        model.freeze_backbone()
    else:
        model.unfreeze_backbone()
