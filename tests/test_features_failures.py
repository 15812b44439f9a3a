"""What kills, damage and full disks leave behind in a feature cache."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cached import SMALL, counted, files, filled, keys_in, shards
from safetensors import SafetensorError
from training import IDS, tiny_model

from modeling_relish import FeatureCache, feature_files
from modeling_relish.features import FeatureCacheError, text_key

pytestmark = pytest.mark.usefixtures("workbench")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a cache that was filled in one go."""
    root = tmp_path_factory.mktemp("whole")
    filled(root)
    assert len(shards(root)) > 5
    return files(root)


@pytest.fixture
def stopped_at(tmp_path, monkeypatch):
    """Fill a cache until its n-th shard, and fail there."""

    def stopped_at(n):
        write = FeatureCache._write_shard

        def stop(self, path, *args):
            if int(path.stem) == n:
                raise KeyboardInterrupt
            write(self, path, *args)

        with monkeypatch.context() as patch:
            patch.setattr(FeatureCache, "_write_shard", stop)
            with pytest.raises(KeyboardInterrupt):
                filled(tmp_path)

    return stopped_at


@pytest.mark.parametrize("n", [0, 1, 4])
def test_stopped_cache_goes_on_from_the_last_whole_shard(n, stopped_at, tmp_path, whole):
    stopped_at(n)
    kept = shards(tmp_path)
    assert [path.stem for path in kept] == [f"{i:05d}" for i in range(n)]
    model = tiny_model()
    seen = counted(model)
    filled(tmp_path, model)
    assert files(tmp_path) == whole
    assert sum(seen.values()) == 24 - sum(len(keys_in(path)) for path in kept)


KILL = """
import os, signal, sys
import torch; torch.set_num_threads(1)
from pathlib import Path
from modeling_relish import FeatureCache, feature_files, features
from training import IDS, tiny_model
model, root = tiny_model(), Path(sys.argv[1])
save, note = feature_files.save_file, feature_files.write_json
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def half(tensors, path):
    save(tensors, path)
    if "00002" in path.name:
        os.truncate(path, path.stat().st_size // 2)
        die()
def before(name):
    return lambda path, values: die() if path.name == name else note(path, values)
for where in ("half", "00003.json", "done.json"):
    pid = os.fork()
    if not pid:
        if where == "half":
            feature_files.save_file = half
        else:
            feature_files.write_json = features.write_json = before(where)
        FeatureCache(model, root / where, "float32", 40, 60).add(IDS, show_progress=False)
        os._exit(0)
    print(where, os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(os.name != "posix", reason="kills forked processes")
def test_killed_cache_ends_with_the_same_bytes(tmp_path, whole):
    folder = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [sys.executable, "-c", KILL, str(tmp_path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    assert out.split() == ["half", "9", "00003.json", "9", "done.json", "9"]
    assert list((tmp_path / "half").rglob("*00002*.tmp"))
    assert [p.stem for p in shards(tmp_path / "00003.json")] == ["00000", "00001", "00002", "00003"]
    for where in ("half", "00003.json", "done.json"):
        filled(tmp_path / where)
        assert files(tmp_path / where) == whole, where


DAMAGE = {
    "flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "note gone": lambda path: path.with_suffix(".json").unlink(),
    "note empty": lambda path: os.truncate(path.with_suffix(".json"), 0),
    "note of another": lambda path: path.with_suffix(".json").write_text(json.dumps({"size": 1})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard_is_found_told_and_computed_anew(damage, tmp_path, whole, caplog):
    filled(tmp_path)
    DAMAGE[damage](shards(tmp_path)[2])
    model = tiny_model()
    seen = counted(model)
    cache = FeatureCache(model, tmp_path, **SMALL)
    assert "damaged or missing" in caplog.text
    assert not any(row in cache for row in IDS)
    cache.add(IDS, show_progress=False)
    assert files(tmp_path) == whole
    assert sum(seen.values()) == len(keys_in(shards(tmp_path)[2]))  # nothing else ran


@pytest.mark.parametrize("text", ["", "[]", '{"shards": 2}'])
def test_damaged_end_of_a_request_costs_no_run(text, tmp_path, whole):
    filled(tmp_path)
    next(tmp_path.rglob("done.json")).write_text(text)
    model = tiny_model()
    seen = counted(model)
    filled(tmp_path, model)
    assert files(tmp_path) == whole
    assert not seen


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
RUST = SafetensorError("I/O error: No space left on device (os error 28)")
FULL = [(feature_files, "save_file", NO_SPACE), (feature_files, "save_file", RUST), (Path, "write_text", NO_SPACE)]


@pytest.mark.parametrize(("place", "name", "error"), FULL)
def test_full_disk_is_named_and_leaves_whole_shards_only(place, name, error, tmp_path, whole, monkeypatch):
    original = getattr(place, name)

    def full(*args):
        path = args[0] if place is Path else args[1]
        if path.name.startswith("00003"):
            path.write_bytes(b"what still found room")
            raise error
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(FeatureCacheError, match="No space left.*MB free") as caught:
            filled(tmp_path)
    assert str(tmp_path) in str(caught.value)
    left = files(tmp_path)
    assert not [path for path in left if "tmp" in path]
    assert {path: whole[path] for path in left} == left
    filled(tmp_path)
    assert files(tmp_path) == whole


def test_other_shard_sizes_do_not_mix(stopped_at, tmp_path):
    stopped_at(2)
    cache = filled(tmp_path, shard_tokens=200)
    assert all(len(cache.states(text_key(row))) == len(row) for row in IDS)


def test_two_processes_write_what_one_writes(tmp_path, whole):
    first, second = (FeatureCache(tiny_model(), tmp_path, **SMALL) for _ in range(2))
    second.add(IDS, show_progress=False, rank=1, world=2)
    with pytest.raises(FeatureCacheError, match="the first is 0"):
        second.refresh(IDS)  # nothing is closed while shards are missing
    first.add(IDS, show_progress=False, rank=0, world=2)
    assert IDS[0] not in first
    first.refresh(IDS)
    second.refresh(IDS, is_main=False)
    assert files(tmp_path) == whole
    assert all(torch.equal(first.states(key), second.states(key)) for key in map(text_key, IDS))
