"""Checkpoints: the head alone, completed from the base model that it names, an adapter and the head, or everything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.hub import resolve_revision

from .adapter_relish import Adapter, adapter_config, find_adapter, put_on, remove_adapter, save_adapter
from .backbone_relish import BackboneError, check_architecture, check_language_model, cut_backbone
from .base_model_relish import (
    BACKBONE_KWARGS,
    FILE_KWARGS,
    BackboneMismatchError,
    bare_model,
    bounded_length,
    check_safetensors,
    checked_kwargs,
    load_backbone,
    load_base,
    nothing_missing,
    output_row,
    reading,
    resolve_backbone,
    resolved_grid,
    share_base,
    whole_config,
    without_pooler,
)
from .configuration_checks_relish import LABEL_SETTINGS, LM_HEADS, RelishConfigError
from .configuration_relish import RelishConfig
from .hub_relish import HubMixin, write_code
from .loaded_base_relish import name_of
from .text_relish import PromptTemplate
from .weights_relish import (
    backbone_fingerprint,
    bring_back,
    check_no_others_adapter,
    fingerprints_differ,
    keep_4_bit_weights,
    load_head,
    quantization_of,
    realign,
    remove_stale_weights,
    stand_beside,
)


class RelishPreTrainedModel(HubMixin, PreTrainedModel):  # type: ignore[misc]
    """`PreTrainedModel` whose checkpoint may hold the head alone, and brings its code and its card along."""

    config_class = RelishConfig
    base_model_prefix = "backbone"
    # The weights' digests when they came from the base model; None means they must be saved with the head. The second is of
    # more values and not rounded: what an adapter adds when it is merged may be less than the first one sees.
    _base_fingerprint: str | None = None
    # Where its files were read from, for those that are read later; a token is remembered here and nowhere else.
    _file_kwargs: dict[str, Any] = {}  # noqa: RUF012
    _base_fine_fingerprint: str | None = None

    # Set by the subclass.
    backbone: PreTrainedModel
    score: torch.nn.Module

    @classmethod
    def from_backbone(
        cls, backbone: str | os.PathLike | PreTrainedModel, *, revision: str | None = None, **kwargs: Any
    ) -> Any:
        """Start a model with a fresh head.

        Args:
            backbone: Hub id, folder, `embedded:NAME`, or a loaded model (shared, not copied; saved whole if it was trained).
            revision: Of the backbone on the Hub.
            **kwargs: Settings of [`RelishConfig`] (backbone_layer, prompt_template, num_labels ...), and what
                `AutoModel.from_pretrained` takes (dtype, device_map, token ...). `number_grid` may be numbers, a mapping
                word -> number or a `NumberGrid`; `tokenizer` finds its tokens where the backbone's own is not to be loaded.

        Raises:
            BackboneError: if the backbone cannot be loaded or cut.
            RelishConfigError: for an unknown or impossible setting.
        """
        loading = {k: kwargs.pop(k) for k in BACKBONE_KWARGS if k in kwargs}
        tokenizer = kwargs.pop("tokenizer", None)
        known = set(RelishConfig.__dataclass_fields__) | LABEL_SETTINGS
        if unknown := sorted(set(kwargs) - known):
            raise RelishConfigError(f"unknown setting(s) {unknown}; RelishConfig knows {sorted(known)}.")
        layers = {k: kwargs[k] for k in ("backbone_layer", "backbone_layers") if k in kwargs}
        causal_lm = kwargs.get("head_type") in (*LM_HEADS, "special_token")
        if isinstance(backbone, PreTrainedModel):
            name = name_of(backbone)
            loaded = backbone if causal_lm else without_pooler(bare_model(backbone))
            if causal_lm:
                check_language_model(loaded)
            else:
                check_architecture(loaded.config.get_text_config())
            text_config = loaded.config
            loaded = cut_backbone(loaded, RelishConfig(backbone_config=text_config, **layers).cut_layer)
        else:
            name = os.fspath(backbone)
            name = str(Path(name).resolve()) if Path(name).is_dir() else name
            hub = {"revision": revision} if revision else {}
            text_config = whole_config(name, {**hub, **{k: loading[k] for k in FILE_KWARGS if k in loading}})
            cut = RelishConfig(backbone_config=text_config, **layers).cut_layer
            loaded = load_backbone(name, cut, causal_lm=causal_lm, **hub, **loading)
        max_length, grid_tokens = kwargs.get("max_length", RelishConfig.max_length), 0
        if kwargs.get("number_grid") is not None:
            grid = resolved_grid(kwargs, tokenizer, name, revision)
            kwargs["number_grid"], grid_tokens = grid.to_dict(), grid.num_appended_tokens
        kwargs["max_length"] = bounded_length(max_length, text_config, grid_tokens)
        config = RelishConfig(
            backbone_name_or_path=name, backbone_revision=revision, backbone_config=text_config, **kwargs
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
        token, row = output_row(language_model, config.special_token_id)
        config.special_token_id = token
        base = without_pooler(bare_model(language_model))
        model = cls(config, base)._adopt_base(base)
        with torch.no_grad():
            model.score.regressor.weight.copy_(row.float().expand(len(config.target_names), -1))
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
        """Load a checkpoint: the head alone or an adapter and the head, completed from the base model it names, or everything.

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
            AdapterError: if an adapter lacks the head or does not fit.
        """
        name = os.fspath(pretrained_model_name_or_path)
        kwargs = checked_kwargs(kwargs, settings := set(RelishConfig.__dataclass_fields__) | LABEL_SETTINGS)
        which = {k: kwargs[k] for k in ("token", "cache_dir") if k in kwargs}
        offline = bool(kwargs.get("local_files_only"))
        # Once, so that config, weights and tokenizer are of one commit.
        kwargs["revision"] = resolve_revision(name, kwargs.get("revision"), local_files_only=offline, **which)
        hub = {k: kwargs[k] for k in FILE_KWARGS if k in kwargs}
        with reading(f"the checkpoint {name!r}"):
            adapter = find_adapter(name, kwargs, hub)
        if not isinstance(config, RelishConfig):
            own = {k: kwargs.pop(k) for k in list(kwargs) if k in settings and k != "dtype"}
            with reading(f"the checkpoint {name!r}"):
                if adapter is not None and config is None:
                    config = adapter_config(adapter, **own)
                else:
                    config = RelishConfig.from_pretrained(config or name, **hub, **own)
        if config.backbone_config is None:
            raise BackboneError(
                f"{name!r} is no RELISH checkpoint. Start a model on a language model with from_backbone(...)."
            )
        if adapter is not None:
            return cls._from_adapter(adapter, config, backbone, kwargs)
        if config.backbone_in_checkpoint and backbone is not None:
            # The base model's fingerprint would fit, and its untrained weights would give another score.
            raise BackboneError(
                f"the checkpoint {name!r} holds its own backbone weights, which may be trained; leave backbone= out."
            )
        check_safetensors(f"the checkpoint {name!r}", name, kwargs)
        later = {
            k: kwargs[k] for k in ("cache_dir", "local_files_only", "token", "revision") if kwargs.get(k) is not None
        }
        if config.backbone_in_checkpoint:
            return cls._whole_from_pretrained(name, later, *model_args, config=config, **kwargs)
        loading_info = kwargs.pop("output_loading_info", False)
        config.name_or_path = name
        base = load_base(config, kwargs) if backbone is None else share_base(backbone, config)
        model = cls(config, base)._adopt_base(base)
        model._file_kwargs = later
        load_head(model.score, name, {k: kwargs[k] for k in FILE_KWARGS if k in kwargs})
        model.eval()
        return (model, nothing_missing()) if loading_info else model

    @classmethod
    def _from_adapter(
        cls, adapter: Adapter, config: RelishConfig, backbone: PreTrainedModel | None, kwargs: dict[str, Any]
    ) -> Any:
        """Build the model that an adapter stands on, the language model or a saved RELISH model, and put it there."""
        loading_info = kwargs.pop("output_loading_info", False)
        config.name_or_path = adapter.source
        if (base_name := adapter.base(config)) is not None:
            more = {k: v for k, v in kwargs.items() if k not in ("revision", "subfolder")}
            revision = adapter.settings.get("revision")
            model = cls.from_pretrained(
                base_name, config=config, backbone=backbone, **more, **({"revision": revision} if revision else {})
            )
        else:
            base = load_base(config, kwargs) if backbone is None else share_base(backbone, config)
            model = cls(config, base)._adopt_base(base)
        put_on(model, adapter)
        return (model, nothing_missing()) if loading_info else model

    @classmethod
    def _whole_from_pretrained(cls, name: str, later: dict[str, Any], *model_args: Any, **kwargs: Any) -> Any:
        loading_info = kwargs.pop("output_loading_info", False)
        kwargs = {**kwargs, "use_safetensors": True, "output_loading_info": True}
        with reading(f"the checkpoint {name!r}"):
            loaded: Any = super().from_pretrained(name, *model_args, **kwargs)
        model, info = loaded
        if info["missing_keys"] and not kwargs.get("ignore_mismatched_sizes"):
            raise BackboneError(
                f"the checkpoint {name!r} lacks {len(info['missing_keys'])} weights, as {sorted(info['missing_keys'])[:3]}; they "
                "would be random. A head pushed earlier under the same name can hide the shards of a whole model."
            )
        model._file_kwargs = later
        bring_back(model.score)
        realign(model.score)
        return (model, info) if loading_info else model

    def _adopt_base(self, base: PreTrainedModel) -> Any:
        """Note that the backbone's weights are the base model's, compare them with the head's memory of them, freeze them."""
        check_no_others_adapter(self)
        found = backbone_fingerprint(base, embeddings=True)
        expected = self.config.backbone_fingerprint
        if fingerprints_differ(expected, found):
            raise BackboneMismatchError(
                f"the weights of the base model {self.config.backbone_name_or_path!r} (revision "
                f"{self.config.backbone_revision!r}) are not those this head was trained on: fingerprint {found}, expected "
                f"{expected}. A score from them would be wrong. Pin the right revision, or pass backbone=."
            )
        if expected is None and self.config.backbone_name_or_path is not None:
            self.config.backbone_fingerprint = found
        if self.config.backbone_name_or_path is not None:
            self._base_fingerprint, self._base_fine_fingerprint = found, backbone_fingerprint(base, fine=True)
        keep_4_bit_weights(base)
        self.backbone.requires_grad_(False)
        self.backbone.eval()
        stand_beside(self, base)
        return self

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
        """Save the head alone while the backbone's weights are the base model's, with an adapter where one is on it, else all.

        Args:
            save_directory: Folder; created if missing. An adapter in it goes once a model without one is written there.
            is_main_process: As in `PreTrainedModel.save_pretrained`.
            save_backbone: `True` writes everything; `False` the head alone, and raises where that would lose trained
                backbone weights; `None` decides by whether they were touched (in a push: as that was told).
            state_dict: Weights to save instead of the model's own (Trainer under FSDP or DeepSpeed).
            **kwargs: For `PreTrainedModel.save_pretrained`.

        Raises:
            BackboneError: if `save_backbone=False` would lose weights, or the folder holds the base model itself.
        """
        check_no_others_adapter(self)
        if save_backbone is None and self._push_settings is not None:
            save_backbone = self._push_settings["save_backbone"]
        if kwargs.get("push_to_hub"):
            self._check_base(save_backbone)
        if self.has_adapter:
            if save_backbone:
                raise BackboneError("save_backbone=True needs the adapter merged first: peft_model.merge_and_unload().")
            if is_main_process:
                save_adapter(self, save_directory, next(iter(self.peft_config)), state_dict)
                write_code(save_directory)
                self._save_card(save_directory)
            return
        untouched = self.backbone_is_untouched()
        if save_backbone is False and not untouched:
            raise BackboneError("save_backbone=False would lose weights: the backbone was trained, or has no name.")
        whole = (not untouched) if save_backbone is None else save_backbone
        if whole and quantization_of(self.backbone) is not None:
            raise BackboneError(
                "a quantised backbone is not saved, only named: its base model must have a name. Merge an adapter into the "
                "base model loaded without quantization_config."
            )
        base = self.config.backbone_name_or_path
        if base and Path(resolve_backbone(base) if not whole else base).resolve() == Path(save_directory).resolve():
            raise BackboneError(f"{os.fspath(save_directory)!r} holds the base model itself; save into another folder.")
        if not whole:
            if state_dict is None:
                state_dict = {f"score.{k}": v for k, v in self.score.state_dict().items()}
            state_dict = {k: v for k, v in state_dict.items() if k.startswith("score.")}
        self.config.backbone_in_checkpoint = whole
        self._forget_old_figures()
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_code(save_directory)
            self._save_card(save_directory)
        if not whole and (quantization := quantization_of(self.backbone)) is not None:
            self.config.quantization_config = quantization
        super().save_pretrained(save_directory, is_main_process, state_dict=state_dict, **kwargs)
        if is_main_process:  # last, so that a save that fails loses nothing
            remove_adapter(save_directory)
            remove_stale_weights(save_directory)

    @property
    def device(self) -> torch.device:
        """Where inputs go: the first device with weights on it. Those that accelerate has offloaded are on none (meta)."""
        offloaded = torch.device("cpu" if getattr(self, "hf_device_map", None) else "meta")
        return next((p.device for p in self.parameters() if not p.is_meta), offloaded)

    @property
    def has_adapter(self) -> bool:
        """Whether PEFT has put an adapter on the model."""
        return bool(getattr(self, "peft_config", None))

    def backbone_is_untouched(self) -> bool:
        """Whether the backbone's weights are still those of the base model that the config names, and nothing is on them."""
        trained = any(p.requires_grad for p in self.backbone.parameters())
        return not trained and not self.has_adapter and self.base_is_named()

    def base_is_named(self) -> bool:
        """Whether the backbone's weights, an adapter's own apart, are those of the base model that the config names."""
        if self._base_fingerprint is None or self.config.backbone_name_or_path is None:
            return False
        return not (
            fingerprints_differ(self._base_fingerprint, backbone_fingerprint(self.backbone))
            or fingerprints_differ(self._base_fine_fingerprint, backbone_fingerprint(self.backbone, fine=True))
        )
