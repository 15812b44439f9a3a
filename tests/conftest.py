"""What holds in every test: no hub, no network, a cache folder of its own, fixed seeds. The fixtures for real models and data."""

import atexit
import os
import shutil
import tempfile

# Hugging Face libraries read these on import. RELISH_HOME is the user's own and stays as it is.
_HF_HOME = tempfile.mkdtemp(prefix="relish-tests-hf-home-")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ.update(
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_TOKEN"):
    os.environ.pop(_name, None)  # each would lead past HF_HOME

import ipaddress  # noqa: E402
import random  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))  # `from tiny import ...`, from the folders below too

pytest_plugins = ["command_line", "table_files", "training"]  # their fixtures

torch.set_num_threads(1)  # tiny tensors; threads that wait for each other cost more than they bring


# They take minutes each. First, so that no worker is left with one of them when the others have ended.
SLOW_FILES = (
    "test_notebooks.py", "test_paper_table.py", "test_compare_run.py", "test_trl_real.py", "test_number_grid_real.py",
    "test_compare_resume.py", "test_hub_push.py", "test_accelerate.py", "test_hub.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first."""
    items.sort(key=lambda item: SLOW_FILES.index(item.path.name) if item.path.name in SLOW_FILES else len(SLOW_FILES))


class NetworkBlockedError(RuntimeError):
    """A test reached for the network. Not an OSError: a library would take that for a missing connection and carry on."""


def _is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _check(host: object) -> None:
    if not _is_local(host):
        raise NetworkBlockedError(
            f"A test reached for the network (host {host!r}); tests may only use this machine's loopback."
        )


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Raise `NetworkBlockedError` on every address or name that is not the loopback; Unix sockets are let through."""

    def guarded(method, position):
        def call(self, *args):
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _check(args[position][0])
            return method(self, *args)

        return call

    def guarded_lookup(function):
        def call(host, *args, **kwargs):
            _check(host)
            return function(host, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, position in (("connect", 0), ("connect_ex", 0), ("sendto", -1)):
            patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name), position))
        for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
            patch.setattr(socket, name, guarded_lookup(getattr(socket, name)))
        yield


@pytest.fixture(autouse=True)
def seeded():
    """Give every test the same random numbers, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _fetched(name: str, marker: str = "config.json", room: str = "backbones") -> Path:
    home = Path(os.environ.get("RELISH_HOME") or Path.home() / ".cache" / "modeling_relish")
    folder = home / room / name
    if not (folder / marker).is_file():
        reason = f"{name or marker} is not in {folder}: `make fetch` gets it (RELISH_HOME chooses another place)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct."""
    return _fetched("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    return _fetched("all-MiniLM-L6-v2")


@pytest.fixture(scope="session")
def tweets() -> Path:
    """Return the table of rated tweets."""
    return _fetched("", "tweets.csv", "data") / "tweets.csv"


@pytest.fixture(scope="session")
def measurement_data() -> Path:
    """Return the folder of the measurement data, which lies beside the repository and does not belong to it."""
    folder = TESTS.parents[1] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the measurement data is not in {folder}")
    return folder
