"""The registry of methods, in the order in which a budget takes them."""

from __future__ import annotations

from collections.abc import Sequence

from .method import Method
from .methods_heads import Encoder, Head
from .methods_language_model import Decoding, RailGrid, TunedLanguageModel
from .methods_tfidf import Tfidf
from .tasks import CompareError

METHODS: dict[str, Method] = {
    method.key: method
    for method in (
        Tfidf("tfidf_ridge", "TF-IDF, ridge", forest=False),
        Head("relish_layer_search", "RELISH, layer search", "relish", searched=True),
        Head("relish", "RELISH", "relish"),
        Head("mlp", "MLP, mean", "mlp"),
        Head("linear", "linear, mean", "linear"),
        TunedLanguageModel("raft", "RAFT", objective="raft"),
        Encoder("encoder_mean", "mean", "mean of tokens"),
        Encoder("encoder_first", "first", "first token"),
        RailGrid("rail", "RAIL, grid"),
        Decoding("zero_shot", "zero-shot decoding", "zero"),
        Head("mlp_layer_search", "MLP, mean, layer search", "mlp", searched=True, regimes=("frozen",)),
        Head("linear_layer_search", "linear, mean, layer search", "linear", searched=True, regimes=("frozen",)),
        Head("special_token", "special token", "special_token"),
        Tfidf("tfidf_forest", "TF-IDF, random forest", forest=True),
        Head("final_logits_mlp", "MLP on final logits", "final_logits_mlp"),
        TunedLanguageModel(
            "cross_entropy", "cross-entropy, decoding", "cross-entropy, RAIL", objective="cross_entropy"
        ),
        TunedLanguageModel("mbr", "MBR", objective="mbr"),
        Decoding("many_shot", "many-shot decoding", "many"),
        Decoding("rail_sampling", "RAIL, sampling", "samples"),
    )
}


def find_methods(names: str | Sequence[str]) -> list[Method]:
    """Return methods by their names: `"all"`, names in one string with commas between, or a list of names.

    Raises:
        CompareError: for a name that is not known; the message lists those that are.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    wanted = [name for name in wanted if name]
    if wanted == ["all"]:
        return list(METHODS.values())
    if unknown := [name for name in wanted if name not in METHODS]:
        raise CompareError(f"there is no method {unknown}; the known ones are {', '.join(sorted(METHODS))}, or all.")
    if not wanted:
        raise CompareError(f"no method was named; the known ones are {', '.join(sorted(METHODS))}, or all.")
    return [method for key, method in METHODS.items() if key in wanted]
