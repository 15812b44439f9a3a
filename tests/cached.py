"""A feature cache in tests: filled, counted, listed."""

import hashlib
from collections import Counter

from safetensors.numpy import load_file
from training import IDS, tiny_model

from modeling_relish import FeatureCache

SMALL = {"dtype": "float32", "batch_tokens": 40, "shard_tokens": 60}  # several batches a shard, several shards


def counted(model):
    """Count how often each text passes through the backbone."""
    seen = Counter()

    def look(module, args, kwargs):
        for ids, mask in zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True):
            seen[tuple(ids[mask.bool()].tolist())] += 1

    model.backbone.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def filled(root, model=None, ids=IDS, **kwargs):
    cache = FeatureCache(model or tiny_model(), root, **{**SMALL, **kwargs})
    cache.add(ids, show_progress=False)
    return cache


def files(root):
    """Return every file below a folder, by name, with its digest."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def shards(root):
    return sorted(root.rglob("*.safetensors"))


def keys_in(shard):
    return [bytes(key) for key in load_file(shard)["keys"]]
