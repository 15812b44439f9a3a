"""Every knob of a RELISH model, its default and its check."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from .configuration_checks_relish import (
    AUTO_LAYER,
    LM_HEADS,
    RelishConfigError,
    check_backbone_layers,
    check_head,
    check_labels,
    check_num_labels,
    check_text,
    per_target,
)

logger = logging.get_logger(__name__)

# Where a process without this package finds the classes, in the files that lie beside the weights. The configuration is found
# through the model's module: `pipeline()` loads the configuration, then chooses its class by the task, then loads the model.
# By the second step the pipelines that know the prompt template must be registered, or the bare text would be scored.
AUTO_MAP = {
    "AutoConfig": "modeling_relish.RelishConfig",
    "AutoModel": "modeling_relish.RelishForSequenceRegression",
    "AutoModelForSequenceClassification": "modeling_relish.RelishForSequenceRegression",
}

# Names that any transformers configuration may carry beside the fields below: written by save_pretrained, by the Hub
# or by TRL and PEFT. Anything else is a misspelling or comes from another version, and is told.
_FOREIGN_NAMES = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "custom_pipelines",
        "eos_token_id",
        "experts_implementation",
        "gradient_checkpointing",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "pad_token_id",
        "quantization_config",
        "torch_dtype",
        "use_cache",
    }
)
# Fields that shape the head and its training: what an ablation changes.
HEAD_SETTINGS = (
    "backbone_layers", "head_dropout", "head_hidden_size", "head_intermediate_size", "head_num_attention_heads", "huber_delta",
    "input_norm", "latent_combination", "latent_init", "num_latents", "num_refinement_steps", "regressor",
    "share_refinement_steps",
)  # fmt: skip
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _of_backbone(name: str, meaning: str) -> property:
    """Make a property that reads and writes a setting of the backbone's own configuration."""
    return property(
        lambda self: getattr(self._text_config(), name, None),
        lambda self, value: setattr(self._text_config(), name, value),
        doc=meaning,
    )


class RelishConfig(PreTrainedConfig):
    r"""Configuration of [`RelishForSequenceRegression`]. The defaults are the paper's configuration (RELISH, section 3).

    Args:
        backbone_name_or_path: Hub id or folder of the language model; a head-only checkpoint is completed from it.
        backbone_revision: Branch, tag or commit of the backbone on the Hub (`None` = its main branch).
        backbone_config: Full configuration of the whole backbone, as an object or a dict with `model_type`.
        backbone_fingerprint: Digest of the backbone's weights, written by the library and compared on load.
        backbone_in_checkpoint: Whether the checkpoint holds the backbone's weights (`False` = the head alone).
        backbone_layer: Transformer layer whose output the head reads, 1 .. number of layers. `None` = the last one with
            the final norm. `"auto"` lets `RelishTrainer` search for it (until then it is the last).
            The layers above are neither loaded nor run.
        backbone_layers: Several layers to read at once, in place of `backbone_layer`: the head learns a softmax mix of them
            (each under its own LayerNorm). The backbone is cut at the highest.
        layer_search: What a layer search measured, layer -> validation Pearson; written by it.
        evaluation: What [`RelishTrainer`] measured with these very weights, and on what; the model card quotes it.
        head_type: `"relish"` (the paper's), `"linear"` or `"mlp"` (both over a pooled token), `"number_grid"` (the expected
            number under the language model: RAIL; trained, RAFT), or RAFT's other predictors: `"special_token"` (one token's
            logit) and `"final_logits_mlp"` (an MLP with a sigmoid on the last token's logits).
        head_hidden_size: Width d of the latent state.
        head_num_attention_heads: Attention heads of a refinement step; divides `head_hidden_size`.
        head_intermediate_size: Width of the feed-forward part (and of the `mlp` head's hidden layer).
        num_refinement_steps: L, the number of refinement steps, each with its own parameters.
        share_refinement_steps: Whether all steps have one set of parameters in common.
        num_latents: Latent tokens that are refined side by side.
        latent_combination: What the regressor reads of several latents: their `"mean"`, or all, one after the other (`"concat"`).
        latent_init: Where the latent starts: `"learned"`, or that plus the `"first"` or `"last"` token of X, its `"mean"` or
            `"max"` over the tokens.
        regressor: `"linear"`, or `"mlp"` with one hidden layer of `head_hidden_size` (the `relish` head's).
        head_dropout: Dropout after attention and feed-forward, in [0, 1).
        input_norm: LayerNorm (without parameters) on every token state before the head. `None` follows the layer: on
            where a layer is read that is not the last, for its states are not normalised by the backbone.
        pooling: `"mean"`, `"last"` or `"first"` token, for the `linear` and `mlp` heads.
        number_grid: The numbers that a `number_grid` head may answer with: a `NumberGrid`'s dict, with its tokens.
        normalize_grid: Make the probabilities of the grid sum to one (the papers take the whole vocabulary's softmax).
        learn_values: Train the grid's values too (learnable-RAFT).
        special_token_id: Token whose logit the `special_token` head starts from; `None` = the end-of-text token.
        label_mean: Mean of the training labels, one per target; measured by `RelishTrainer` when `None`.
        label_std: Standard deviation of the training labels, one per target; all > 0.
        label_min: Lower end of the label's scale, one per target (for NRMSE).
        label_max: Upper end of the label's scale, one per target.
        objective: `"huber"` or `"mse"`, on standardised targets. For a `number_grid` head also `"raft"` (squared error of the
            expected number, which there is what `"mse"` is), `"mbr"` (expected squared error) and `"cross_entropy"` (of the
            nearest number of the grid: standard fine-tuning).
        huber_delta: Where Huber turns from square to linear, in label standard deviations.
        prompt_template: Text with named fields, as `"Sentence 1: {text_a}\nSentence 2: {text_b}\nScore:"`.
        max_length: Longest prompt in tokens; longer ones lose the end of their longest field, never the template.
        truncation: `"longest_first"` cuts with a warning, `"error"` raises.

    Raises:
        RelishConfigError: for a value outside what is said above.
    """

    model_type = "relish"
    # A plain class attribute: the base class's sub_configs_defaults treats the name `backbone_config` as a vision model's.
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["hidden_states", "attentions", "log_probs"]

    backbone_name_or_path: str | None = None
    backbone_revision: str | None = None
    backbone_config: Any = None
    backbone_fingerprint: str | None = None
    backbone_in_checkpoint: bool = True
    backbone_layer: int | str | None = None
    backbone_layers: list | None = None
    layer_search: dict | None = None
    evaluation: dict | None = None
    head_type: str = "relish"
    head_hidden_size: int = 256
    head_num_attention_heads: int = 8
    head_intermediate_size: int = 1024
    num_refinement_steps: int = 3
    share_refinement_steps: bool = False
    num_latents: int = 1
    latent_combination: str = "mean"
    latent_init: str = "learned"
    regressor: str = "linear"
    head_dropout: float | int = 0.0
    input_norm: bool | None = None
    pooling: str = "mean"
    number_grid: dict | None = None
    normalize_grid: bool = False
    learn_values: bool = False
    special_token_id: int | None = None
    label_mean: list | None = None
    label_std: list | None = None
    label_min: list | None = None
    label_max: list | None = None
    objective: str = "huber"
    huber_delta: float | int = 1.0
    prompt_template: str = "{text}"
    max_length: int = 1024
    truncation: str = "longest_first"
    problem_type: Any = "regression"

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - _FOREIGN_NAMES)
        if unknown:
            logger.warning(
                f"RelishConfig got {unknown}, which this version does not know; they are kept and have no effect. "
                "A misspelt setting, or a checkpoint of another version?"
            )
        if isinstance(self.backbone_config, dict):
            self.backbone_config = _backbone_config_from_dict(self.backbone_config)
        # A copy: the object may be a live model's, and what is set here (attention kernel, pad token) is not meant for it.
        self.backbone_config = copy.deepcopy(self.backbone_config)
        attention = getattr(self.backbone_config, "_attn_implementation", None)
        check_num_labels(kwargs.get("num_labels"), self.id2label)
        if self.id2label is None:
            kwargs.setdefault("num_labels", 1)
        special_ids = {name: kwargs.pop(name) for name in _SPECIAL_IDS if kwargs.get(name) is not None}
        super().__post_init__(**kwargs)
        if attention is not None and self._attn_implementation is None:
            self.backbone_config._attn_implementation = attention
        for name, value in special_ids.items():
            setattr(self, name, value)
        for name in ("label_mean", "label_std", "label_min", "label_max"):
            setattr(self, name, per_target(self, name))
        check_head(self)
        check_labels(self)
        check_text(self)
        if self.backbone_layers is not None and self.backbone_layer is not None:
            raise RelishConfigError("backbone_layer and backbone_layers exclude each other: give one of them.")
        if self.backbone_config is not None:
            check_backbone_layers(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration; another model's becomes the backbone's, for PEFT compares its vocabulary with the model's."""
        if config_dict.get("model_type", cls.model_type) != cls.model_type:
            config_dict = {"backbone_config": config_dict, "backbone_in_checkpoint": False}
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, and always the targets' names and where the code is.

        transformers leaves out two labels named LABEL_0 and LABEL_1 as its default; here one target is the default, and two
        targets would come back as one. The code is what lies beside the weights, also after a load from somewhere else.
        """
        always = {"id2label": self.id2label, "label2id": self.label2id, "auto_map": dict(AUTO_MAP)}
        return {**super().to_diff_dict(), **always}

    # ------------------------------------------------------------------ what follows from the settings

    @property
    def read_layers(self) -> list[int]:
        """The layers whose states the head reads, 1 .. number of layers."""
        own = None if self.backbone_layer == AUTO_LAYER else self.backbone_layer
        return self.backbone_layers or [own or self.num_hidden_layers]

    @property
    def cut_layer(self) -> int:
        """The layer after which the backbone is cut; its number of layers where it is whole."""
        return max(self.read_layers)

    @property
    def reads_language_model(self) -> bool:
        """Whether the head reads the language model's distribution, so that the backbone keeps its output layer."""
        return self.head_type in LM_HEADS

    @property
    def state_size(self) -> int:
        """Width of what the head is given per token: D for every layer that it reads."""
        return self.hidden_size * len(self.read_layers)

    @property
    def layer_name(self) -> str:
        """What is read, for messages."""
        if self.backbone_layers is not None:
            return f"layers {self.backbone_layers}"
        return "last layer" if self.backbone_layer in (None, AUTO_LAYER) else f"layer {self.backbone_layer}"

    @property
    def uses_input_norm(self) -> bool:
        """`input_norm`, resolved: where it is `None` it follows the layer."""
        if self.input_norm is not None:
            return self.input_norm
        return any(layer != self.num_hidden_layers for layer in self.read_layers)

    @property
    def target_names(self) -> list[str]:
        """Names of the K targets, in the order of the logits' columns."""
        names: dict[Any, str] = self.id2label or {}
        return [names[i] for i in range(len(names))]

    @property
    def label_range(self) -> list[tuple[float, float]] | None:
        """(minimum, maximum) of the scale for every target, or `None` where it is not known."""
        if self.label_min is None or self.label_max is None:
            return None
        return list(zip(self.label_min, self.label_max, strict=True))

    # ------------------------------------------------------------------ the backbone's own settings, seen from the top
    # TRL, PEFT and Trainer read and write these on the model's config. They live in the backbone's config alone, so
    # that what is written through either is the same value, and is saved with it.

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the backbone's text configuration (this object itself while there is none)."""
        if self.backbone_config is None:
            return self
        return self.backbone_config.get_text_config(decoder=decoder, encoder=encoder)

    @property
    def hidden_size(self) -> int:
        """D, the width of the backbone's token states."""
        return self._text_config().hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the backbone."""
        return self._text_config().vocab_size

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers of the whole backbone, also where it is cut."""
        return self._text_config().num_hidden_layers

    pad_token_id = _of_backbone("pad_token_id", "Padding token of the backbone; never used for masking.")
    bos_token_id = _of_backbone("bos_token_id", "Token that begins a text for the backbone.")
    eos_token_id = _of_backbone("eos_token_id", "Token that ends a text for the backbone, or a list of them.")

    def _text_config(self) -> PreTrainedConfig:
        if self.backbone_config is None:
            raise AttributeError("this RelishConfig has no backbone_config yet, so no size is known")
        return self.backbone_config.get_text_config()


def _backbone_config_from_dict(values: dict[str, Any]) -> PreTrainedConfig:
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        # Only architectures that transformers itself holds: a config from the Hub must never bring code in by this door.
        raise RelishConfigError(
            f"backbone_config has model_type {model_type!r}, which this version of transformers does not know. Backbones "
            "with remote code are not loaded; update transformers if the architecture is new."
        )
    return CONFIG_MAPPING[model_type].from_dict({k: v for k, v in values.items() if k != "auto_map"})
