"""Checkpoints: the head alone, completed from the base model that it names, or everything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from .backbone_relish import BackboneError, check_architecture, check_language_model, cut_backbone
from .base_model_relish import (
    BackboneMismatchError,
    backbone_fingerprint,
    bare_model,
    fingerprints_differ,
    load_backbone,
    resolve_backbone,
    whole_config,
    without_pooler,
)
from .configuration_checks_relish import LM_HEADS, RelishConfigError
from .configuration_relish import RelishConfig
from .number_grid_relish import NumberGrid
from .text_relish import PromptTemplate

_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_BACKBONE_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "attn_implementation", "device_map",
                    "dtype", "max_memory", "offload_folder", "quantization_config")  # fmt: skip


class RelishPreTrainedModel(PreTrainedModel):
    """`PreTrainedModel` whose checkpoint may hold the head alone."""

    config_class = RelishConfig
    base_model_prefix = "backbone"
    # The weights' digest when they came from the base model; None means they must be saved with the head.
    _base_fingerprint: str | None = None

    # Set by the subclass.
    backbone: PreTrainedModel
    score: torch.nn.Module

    @classmethod
    def from_backbone(
        cls, backbone: str | os.PathLike | PreTrainedModel, *, revision: str | None = None, **kwargs: Any
    ) -> Any:
        """Start a model with a fresh head.

        Args:
            backbone: Hub id, folder, `embedded:NAME`, or a loaded model (shared, not copied).
            revision: Of the backbone on the Hub.
            **kwargs: Settings of [`RelishConfig`] (backbone_layer, prompt_template, num_labels ...), and what
                `AutoModel.from_pretrained` takes (dtype, device_map, token ...). `number_grid` may be numbers, a mapping
                word -> number or a `NumberGrid`; `tokenizer` finds its tokens where the backbone's own is not to be loaded.

        Raises:
            BackboneError: if the backbone cannot be loaded or cut.
            RelishConfigError: for an unknown or impossible setting.
        """
        loading = {k: kwargs.pop(k) for k in _BACKBONE_KWARGS if k in kwargs}
        tokenizer = kwargs.pop("tokenizer", None)
        known = set(RelishConfig.__dataclass_fields__) | {"num_labels", "id2label", "label2id"}
        if unknown := sorted(set(kwargs) - known):
            raise RelishConfigError(f"unknown setting(s) {unknown}; RelishConfig knows {sorted(known)}.")
        layers = {k: kwargs[k] for k in ("backbone_layer", "backbone_layers") if k in kwargs}
        causal_lm = kwargs.get("head_type") in (*LM_HEADS, "special_token")
        if isinstance(backbone, PreTrainedModel):
            name = backbone.config._name_or_path or None
            loaded = backbone if causal_lm else without_pooler(bare_model(backbone))
            if causal_lm:
                check_language_model(loaded)
            else:
                check_architecture(loaded.config.get_text_config())
            backbone_config = loaded.config
            cut = RelishConfig(backbone_config=backbone_config, **layers).cut_layer  # checked before anything is cut
            loaded = cut_backbone(loaded, cut)
        else:
            name = os.fspath(backbone)
            if Path(name).is_dir():  # a relative folder would mean another one from another place
                name = str(Path(name).resolve())
            hub = {"revision": revision} if revision else {}
            backbone_config = whole_config(name, {**hub, **{k: loading[k] for k in _HUB_KWARGS if k in loading}})
            cut = RelishConfig(backbone_config=backbone_config, **layers).cut_layer
            loaded = load_backbone(name, cut, causal_lm=causal_lm, **hub, **loading)
        grid = None
        if kwargs.get("number_grid") is not None:
            grid = _resolved_grid(kwargs, tokenizer, name, revision)
            kwargs["number_grid"] = grid.to_dict()
        kwargs["max_length"] = bounded_length(kwargs.get("max_length", RelishConfig.max_length), backbone_config, grid)
        config = RelishConfig(
            backbone_name_or_path=name, backbone_revision=revision, backbone_config=backbone_config, **kwargs
        )
        # Where it lay on this machine is nobody else's business. Of the copy: a live model keeps its name.
        config.backbone_config._name_or_path = ""
        PromptTemplate(config.prompt_template)
        if config.head_type == "special_token":
            return cls._from_token_row(config, loaded)
        return cls(config, loaded)._adopt_base(loaded)

    @classmethod
    def _from_token_row(cls, config: RelishConfig, language_model: PreTrainedModel) -> Any:
        """Start a `special_token` head at that token's row of the language model's output layer."""
        output = language_model.get_output_embeddings()
        token = config.special_token_id
        if token is None:
            eos = language_model.config.eos_token_id
            token = eos[0] if isinstance(eos, (list, tuple)) else eos
        if output is None or token is None:
            raise BackboneError("a special_token head needs a causal language model and special_token_id.")
        config.special_token_id = token
        base = without_pooler(bare_model(language_model))
        model = cls(config, base)._adopt_base(base)
        with torch.no_grad():
            model.score.regressor.weight.copy_(output.weight[token].float().expand(len(config.target_names), -1))
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args: Any,
        config: RelishConfig | str | os.PathLike | None = None,
        backbone: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint: the head alone, completed from the base model it names, or everything.

        Args:
            pretrained_model_name_or_path: Hub id or folder.
            *model_args: For `PreTrainedModel.from_pretrained`.
            config: A configuration to use instead of the checkpoint's.
            backbone: A loaded base model to share with a head-only checkpoint; nothing of it is then read from disk.
            **kwargs: As for `PreTrainedModel.from_pretrained`; settings of [`RelishConfig`] override the checkpoint's.

        Raises:
            BackboneError: if the base model is missing or incomplete (the message names it), or `backbone` is given for a
                checkpoint that holds its own.
            BackboneMismatchError: if its weights are not those the head was trained on.
        """
        if not isinstance(config, RelishConfig):
            own = {k: kwargs.pop(k) for k in list(kwargs) if k in RelishConfig.__dataclass_fields__ and k != "dtype"}
            hub = {k: kwargs[k] for k in _HUB_KWARGS if k in kwargs}
            config = RelishConfig.from_pretrained(config or pretrained_model_name_or_path, **hub, **own)
        if config.backbone_in_checkpoint and backbone is not None:
            # The base model's fingerprint would fit, and its untrained weights would give another score.
            raise BackboneError(
                f"the checkpoint {os.fspath(pretrained_model_name_or_path)!r} holds its own backbone weights, "
                "which may be trained; leave backbone= out."
            )
        if config.backbone_in_checkpoint:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
            _realign(loaded[0].score if isinstance(loaded, tuple) else loaded.score)
            return loaded
        loading_info = kwargs.pop("output_loading_info", False)
        config.name_or_path = os.fspath(pretrained_model_name_or_path)
        base = _load_base(config, kwargs) if backbone is None else _share_base(backbone, config)
        model = cls(config, base)._adopt_base(base)
        model._load_head(pretrained_model_name_or_path, {k: kwargs[k] for k in _HUB_KWARGS if k in kwargs})
        model.eval()
        info = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": ""}
        return (model, info) if loading_info else model

    def _adopt_base(self, base: PreTrainedModel) -> Any:
        """Note that the backbone's weights are the base model's, compare them with the head's memory of them, freeze them."""
        found = backbone_fingerprint(base)
        expected = self.config.backbone_fingerprint
        if fingerprints_differ(expected, found):
            raise BackboneMismatchError(
                f"the weights of the base model {self.config.backbone_name_or_path!r} (revision "
                f"{self.config.backbone_revision!r}) are not those this head was trained on: fingerprint {found}, expected "
                f"{expected}. A score from them would be wrong. Pin the right revision, or pass backbone=."
            )
        if expected is None and self.config.backbone_name_or_path is not None:
            self.config.backbone_fingerprint = found
        self._base_fingerprint = found if self.config.backbone_name_or_path is not None else None
        self.backbone.requires_grad_(False)
        self.backbone.eval()
        device = next((p.device for p in base.parameters() if not p.is_meta), torch.device("cpu"))
        self.score.to(device)
        if device_map := getattr(base, "hf_device_map", None):
            prefixed = {f"backbone.{name}" if name else "backbone": where for name, where in device_map.items()}
            self.hf_device_map = {**prefixed, "score": device}
        return self

    def _load_head(self, name: str | os.PathLike, hub: dict[str, Any]) -> None:
        file = cached_file(os.fspath(name), SAFE_WEIGHTS_NAME, **hub)
        if file is None:
            raise BackboneError(f"the checkpoint {os.fspath(name)!r} has no {SAFE_WEIGHTS_NAME}.")
        state = {k.removeprefix("score."): v for k, v in load_file(file).items() if k.startswith("score.")}
        expected = self.score.state_dict()
        wrong = sorted(k for k in expected if k not in state or state[k].shape != expected[k].shape)
        wrong += sorted(set(state) - set(expected))
        if wrong:
            raise BackboneError(
                f"the checkpoint {os.fspath(name)!r} does not hold the head that its config describes; it differs in {wrong[:4]} "
                f"({len(wrong)} in all)."
            )
        self.score.load_state_dict(state)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights; for a backbone that is the base model's, the head's weights alone are complete.

        So Trainer resumes from, and brings back the best of, head-only checkpoints without a false alarm over missing keys.
        """
        head_only = bool(state_dict) and all(k.startswith("score.") for k in state_dict)
        if head_only and self.backbone_is_untouched():
            result = self.score.load_state_dict(
                {k.removeprefix("score."): v for k, v in state_dict.items()}, strict=strict, assign=assign
            )
            return type(result)(
                [f"score.{k}" for k in result.missing_keys], [f"score.{k}" for k in result.unexpected_keys]
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        *,
        save_backbone: bool | None = None,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the head alone while the backbone's weights are the base model's, else everything.

        Args:
            save_directory: Folder; created if missing.
            is_main_process: As in `PreTrainedModel.save_pretrained`.
            save_backbone: `True` writes everything; `False` the head alone, and raises where that would lose trained
                backbone weights; `None` decides by whether they were touched.
            state_dict: Weights to save instead of the model's own (Trainer under FSDP or DeepSpeed).
            **kwargs: For `PreTrainedModel.save_pretrained`.

        Raises:
            BackboneError: if `save_backbone=False` would lose weights, or the folder holds the base model itself.
        """
        untouched = self.backbone_is_untouched()
        if save_backbone is False and not untouched:
            raise BackboneError(
                "save_backbone=False would lose weights: this backbone was trained, or no base model is named."
            )
        whole = (not untouched) if save_backbone is None else save_backbone
        base = self.config.backbone_name_or_path
        if base and Path(resolve_backbone(base) if not whole else base).resolve() == Path(save_directory).resolve():
            raise BackboneError(f"{os.fspath(save_directory)!r} holds the base model itself; save into another folder.")
        if not whole:
            state = (
                state_dict if state_dict is not None else {f"score.{k}": v for k, v in self.score.state_dict().items()}
            )
            state_dict = {k: v for k, v in state.items() if k.startswith("score.")}
        self.config.backbone_in_checkpoint = whole
        super().save_pretrained(save_directory, is_main_process, state_dict=state_dict, **kwargs)

    def backbone_is_untouched(self) -> bool:
        """Whether the backbone's weights are still those of the base model that the config names."""
        if self._base_fingerprint is None or self.config.backbone_name_or_path is None:
            return False
        if any(p.requires_grad for p in self.backbone.parameters()):
            return False
        return not fingerprints_differ(self._base_fingerprint, backbone_fingerprint(self.backbone))


def _realign(head: torch.nn.Module) -> None:
    """Copy weights out of the mapped file: at odd addresses, products of one row round otherwise than before saving."""
    for parameter in head.parameters():
        if not parameter.is_meta and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()


def _resolved_grid(settings: dict[str, Any], tokenizer: Any, name: str | None, revision: str | None) -> NumberGrid:
    """Find the tokens of a number grid's values as they follow the prompt."""
    grid = NumberGrid.from_setting(settings["number_grid"])
    if grid.tokens is None and tokenizer is None:
        if name is None:
            raise BackboneError(
                "a loaded model without a name brings no tokenizer: pass tokenizer= for the number grid."
            )
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_backbone(name), trust_remote_code=False, **({"revision": revision} if revision else {})
        )
    template = settings.get("prompt_template", RelishConfig.prompt_template)
    return grid.resolve(tokenizer, template)


def bounded_length(max_length: int, config: Any, grid: NumberGrid | None = None) -> int:
    """Bound `max_length` by the positions that the backbone has (RoBERTa's begin after its padding index).

    The tokens of a grid's numbers, all but the last, follow the prompt and need positions too.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return max_length
    offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    if grid is not None and grid.tokens is not None:
        offset = max(map(len, grid.tokens)) - 1
    return min(max_length, positions - offset)


def _load_base(config: RelishConfig, kwargs: dict[str, Any]) -> PreTrainedModel:
    if not config.backbone_name_or_path:
        raise BackboneError(
            f"the checkpoint {config.name_or_path!r} holds the head alone and names no base model; pass backbone=."
        )
    loading = {k: kwargs[k] for k in _BACKBONE_KWARGS if kwargs.get(k) is not None}
    if config.dtype is not None:  # the dtype at saving, so that the scores are the same to the bit
        loading.setdefault("dtype", config.dtype)
    if isinstance(loading.get("device_map"), dict):
        inner = {k.removeprefix("backbone").removeprefix("."): v for k, v in loading["device_map"].items()}
        loading["device_map"] = {k: v for k, v in inner.items() if not k.startswith("score")}
    if config.backbone_revision:
        loading["revision"] = config.backbone_revision
    return load_backbone(
        config.backbone_name_or_path, config.cut_layer, causal_lm=config.reads_language_model, **loading
    )


def _share_base(backbone: PreTrainedModel, config: RelishConfig) -> PreTrainedModel:
    if config.reads_language_model:
        check_language_model(backbone)
        return backbone
    bare = without_pooler(bare_model(backbone))
    if bare.config.num_hidden_layers == config.num_hidden_layers:
        return cut_backbone(bare, config.cut_layer)
    raise BackboneError(
        f"the backbone passed in has {bare.config.num_hidden_layers} layers, the checkpoint's base model "
        f"{config.backbone_name_or_path!r} has {config.num_hidden_layers}."
    )
