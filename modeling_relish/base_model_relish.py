"""The base model that a head was trained on: found by its name, loaded, recognised by its weights."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    has_file,
    logging,
)

from .backbone_relish import (
    BackboneError,
    check_architecture,
    check_language_model,
    cut_backbone,
    cut_config,
    model_kwargs,
    remove_final_norm,
    shallow_copy,
)
from .configuration_checks_relish import RelishConfigError
from .configuration_relish import RelishConfig
from .number_grid_relish import NumberGrid

EMBEDDED_PREFIX = "embedded:"
_HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
# Kinds of models whose positions begin behind the padding index.
_BEHIND_PADDING = ("roberta", "camembert", "mpnet", "longformer", "esm", "ibert", "data2vec-text", "xmod", "luke")
# What `cached_file` takes of the keywords of `from_pretrained`.
FILE_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# What a base model takes of them.
BACKBONE_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "attn_implementation", "device_map",
                    "dtype", "max_memory", "offload_folder", "quantization_config")  # fmt: skip


class UnreachableError(BackboneError, OSError):
    """A checkpoint or a base model whose files cannot be read: missing, private, or a download that broke off."""


class BackboneMismatchError(BackboneError):
    """The base model's weights are not those that the head was trained on."""


def cache_root() -> Path:
    """Return the folder of everything the library keeps on this machine: `RELISH_HOME`, or one in the user's cache."""
    return Path(os.environ.get("RELISH_HOME") or "~/.cache/modeling_relish").expanduser().absolute()


def resolve_backbone(name_or_path: str) -> str:
    """Turn `embedded:NAME` into the folder of a backbone fetched from the package registry; others stay as they are."""
    if not name_or_path.startswith(EMBEDDED_PREFIX):
        return name_or_path
    name = name_or_path.removeprefix(EMBEDDED_PREFIX)
    if not _HUB_ID.fullmatch(name) or "/" in name or ".." in name:
        raise BackboneError(f"{name_or_path!r} is no name of an embedded backbone: it must not lead to another folder.")
    folder = cache_root() / "backbones" / name
    if not (folder / "config.json").is_file():
        raise BackboneError(
            f"the embedded backbone {name!r} is not on this machine ({folder} is missing). Fetch it with "
            f"`python -m modeling_relish.embedded {name}`, or set RELISH_HOME to the folder that has it."
        )
    return str(folder)


def is_local_name(name: str) -> bool:
    """Whether a base model's name can only be a folder, of this machine or of another: no Hub id and no `embedded:NAME`."""
    return not name.startswith(EMBEDDED_PREFIX) and (".." in name or not _HUB_ID.fullmatch(name))


def base_path(name_or_path: str) -> str:
    """Return where a base model is loaded from: its folder, or its Hub id.

    Raises:
        BackboneError: for what is neither: a folder of another machine, or a path that leads outside.
    """
    if is_local_name(name_or_path) and not Path(name_or_path).is_dir():
        raise BackboneError(
            f"the base model {name_or_path!r} cannot be loaded: it is no folder of this machine, and no Hub id. Tell where it is "
            "with backbone_name_or_path=, or pass a loaded one with backbone=."
        )
    return resolve_backbone(name_or_path)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what goes wrong while files are read or fetched into an [`UnreachableError`] that names what was wanted."""
    try:
        yield
    except BackboneError:
        raise
    except OSError as error:
        hint = " Log in with `hf auth login`, set HF_TOKEN, or pass token=." if "401" in str(error) else ""
        raise UnreachableError(f"{what} cannot be loaded: {error}{hint}") from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):
            raise
        raise UnreachableError(f"{what} cannot be loaded, the connection broke off: {error}. Run it again.") from error


def check_safetensors(what: str, path: str, hub: Mapping[str, Any]) -> None:
    """Refuse weights that are not in safetensors, by the name of their file: a pickle can run code.

    Args:
        what: What is loaded, for the message.
        path: Folder or Hub id.
        hub: Keywords of `from_pretrained`; those that say where files lie are used.
    """
    hub = {k: hub[k] for k in FILE_KWARGS if hub.get(k) is not None}
    with reading(what):
        if any(_has(path, name, hub) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
            return
        found = [name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if _has(path, name, hub)]
    pickle = (
        f" It has {found[0]}, a pickle, which can run code and is never read: convert it once with "
        "AutoModel.from_pretrained(...).save_pretrained(folder), if you trust it, and name that folder."
    )
    raise BackboneError(f"{what} has no {SAFE_WEIGHTS_NAME}.{pickle if found else ''}")


def _has(path: str, name: str, hub: Mapping[str, Any]) -> bool:
    if Path(path).is_dir():
        return (Path(path) / hub.get("subfolder", "") / name).is_file()
    if name.endswith(".bin") or name.endswith(".bin.index.json"):  # only asked after, never fetched
        return has_file(path, name, **{k: hub[k] for k in ("cache_dir", "token", "revision") if k in hub})
    return cached_file(path, name, **hub, _raise_exceptions_for_missing_entries=False) is not None


def whole_config(name: str, hub: dict[str, Any]) -> PreTrainedConfig:
    """Read the text configuration of a whole backbone, by its name."""
    return _read_config(name, base_path(name), hub).get_text_config()


def _read_config(name: str, path: str, hub: dict[str, Any]) -> PreTrainedConfig:
    what = f"the base model {name!r}{_at(hub)}"
    try:
        with reading(what):
            # False, not None: with None transformers asks on the terminal whether to run the code of who wrote the checkpoint.
            return AutoConfig.from_pretrained(path, trust_remote_code=False, **hub)
    except BackboneError:
        raise
    except ValueError as error:
        raise BackboneError(f"{what} cannot be loaded: {error}") from error


def load_backbone(
    name_or_path: str, layer: int | None = None, *, causal_lm: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Load a backbone's weights, only those of the first `layer` layers.

    Args:
        name_or_path: Hub id, folder, or `embedded:NAME`.
        layer: Where to cut; `None` keeps every layer.
        causal_lm: Keep the language model's output layer (nothing is cut then).
        **kwargs: For `AutoModel.from_pretrained`: revision, dtype, device_map, quantization_config, token, ...

    Raises:
        BackboneError: if it is not found, is an encoder-decoder, cannot be cut, or lacks weights.
    """
    path = base_path(name_or_path)
    hub = {k: kwargs[k] for k in FILE_KWARGS if k in kwargs}
    whole = _read_config(name_or_path, path, hub)
    text_config = whole.get_text_config()
    check_architecture(text_config, causal_lm)
    if causal_lm and text_config is not whole:
        raise BackboneError(f"{name_or_path!r} is multimodal ({whole.model_type}); use its text-only language model.")
    if causal_lm:
        return _from_pretrained(path, name_or_path, whole, kwargs, AutoModelForCausalLM)
    if text_config is not whole:  # a multimodal model: its language part has the weights under a prefix of its own
        config, extra = whole, {}
    else:
        config, extra = cut_config(whole, layer), model_kwargs(whole)
    backbone = _from_pretrained(path, name_or_path, config, {**extra, **kwargs})
    if text_config is not whole:
        return cut_backbone(bare_model(backbone), layer)
    if layer is not None and layer != whole.num_hidden_layers:
        remove_final_norm(backbone)
    return backbone


def _from_pretrained(
    path: str, name: str, config: PreTrainedConfig, kwargs: dict[str, Any], auto_class: Any = AutoModel
) -> PreTrainedModel:
    what = f"the base model {name!r}{_at(kwargs)}"
    check_safetensors(what, path, kwargs)
    kwargs = {**kwargs, "use_safetensors": True, "trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the layers above the cut are reported as unexpected; what is missing is checked below
    try:
        with reading(what):
            backbone, info = auto_class.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise BackboneError(
            f"the base model {name!r} lacks {len(missing)} weights, as {missing[:3]}; it would be partly random."
        )
    return backbone


def checked_kwargs(kwargs: dict[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """Return the keywords of `from_pretrained`, an older name of one replaced; what looks like a misspelt setting raises.

    transformers passes on what it does not know, so that a typing error would be without effect.
    """
    kwargs = dict(kwargs)
    if (dtype := kwargs.pop("torch_dtype", None)) is not None:
        kwargs.setdefault("dtype", dtype)
    for name in kwargs:
        close = difflib.get_close_matches(name, settings, n=1, cutoff=0.85)
        if close and close[0] != name and name not in (*FILE_KWARGS, *BACKBONE_KWARGS):
            raise RelishConfigError(f"there is no setting {name!r}; {close[0]!r} may be meant.")
    return kwargs


def bounded_length(max_length: int, config: Any, num_appended_tokens: int = 0) -> int:
    """Bound `max_length` by the positions that the backbone has (RoBERTa's begin behind its padding index).

    Tokens that are run after the prompt, as those of numbers, need positions too.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not positions or positions < 1:  # XLNet has -1: no bound
        return max_length
    offset = (config.pad_token_id or 0) + 1 if any(name in config.model_type for name in _BEHIND_PADDING) else 0
    return min(max_length, positions - offset - num_appended_tokens)


def load_base(config: RelishConfig, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load the base model that a checkpoint names; `kwargs` are those of `from_pretrained`."""
    if not config.backbone_name_or_path:
        raise BackboneError(
            f"the checkpoint {config.name_or_path!r} holds no backbone and names no base model; pass backbone=, or start a model "
            "on it with from_backbone."
        )
    loading = {k: kwargs[k] for k in BACKBONE_KWARGS if kwargs.get(k) is not None}
    if config.dtype is not None:  # the dtype at saving, so that the scores are the same to the bit
        loading.setdefault("dtype", config.dtype)
    if (quantization := getattr(config, "quantization_config", None)) is not None:  # and the same weights
        loading.setdefault("quantization_config", AutoQuantizationConfig.from_dict(dict(quantization)))
    if isinstance(loading.get("device_map"), dict):
        inner = {k.removeprefix("backbone").removeprefix("."): v for k, v in loading["device_map"].items()}
        loading["device_map"] = {k: v for k, v in inner.items() if not k.startswith("score")}
    if config.backbone_revision:
        loading["revision"] = config.backbone_revision
    return load_backbone(
        config.backbone_name_or_path, config.cut_layer, causal_lm=config.reads_language_model, **loading
    )


def share_base(backbone: PreTrainedModel, config: RelishConfig) -> PreTrainedModel:
    """Cut a loaded base model as a head-only checkpoint reads it, the given object left as it is."""
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


def _at(kwargs: Mapping[Any, Any]) -> str:
    return f" at revision {kwargs['revision']!r}" if kwargs.get("revision") else ""


def bare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the bare text model inside a loaded one: without language-model head, without vision tower."""
    model = getattr(model, "base_model", model)
    return getattr(model, "language_model", model)


def without_pooler(backbone: PreTrainedModel) -> PreTrainedModel:
    """Return a loaded BERT-like encoder without its pooler, the given object left as it is."""
    if getattr(backbone, "pooler", None) is None:
        return backbone
    shell = shallow_copy(backbone)
    shell._modules["pooler"] = None
    return shell


def resolved_grid(settings: dict[str, Any], tokenizer: Any, name: str | None, revision: str | None) -> NumberGrid:
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


def output_row(language_model: PreTrainedModel, token: int | None) -> tuple[int, torch.Tensor]:
    """Return a token's id (`None` = the end of text) and its (D,) row of the language model's output layer."""
    output = language_model.get_output_embeddings()
    if token is None:
        eos = language_model.config.eos_token_id
        token = eos[0] if isinstance(eos, (list, tuple)) else eos
    if output is None or token is None:
        raise BackboneError("a special_token head needs a causal language model and special_token_id.")
    return token, output.weight[token]


def nothing_missing() -> dict[str, Any]:
    """Return what `output_loading_info` says of a checkpoint that was loaded whole."""
    return {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": ""}
