"""A stand-in for the model hub, over real HTTP on this machine, and a way to run clients of it.

It proves the client side only: that what our code and the libraries ask of a hub, in this form, is enough to push and load. It
is no proof of the real hub's rules, limits or storage. What it speaks is what huggingface_hub 2.4 asks for: repositories with
branches and commits, regular and LFS files, private repositories, ranges, and downloads that break off.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

ROOT = Path(__file__).parents[1]
TOKEN = "hf_of_the_tests"
USER = "user"
LFS_ENDINGS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass
class Repo:
    """One repository: every commit's files, and where the branches stand."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        parent = self.branches.get(branch, "")
        content = repr((parent, len(self.commits), sorted((k, hashlib.sha1(v).hexdigest()) for k, v in files.items())))
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


def metadata(card: str) -> dict:
    """Return what the YAML block of a card says."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", card, re.S)
    return yaml.safe_load(block[1]) if block else {}


class LocalHub:
    """The hub; a context manager.

    `lfs` chooses how weights are stored. `cuts[path]` breaks the next GETs of a file off, each after so many bytes.
    """

    def __init__(self, lfs: bool = False) -> None:
        self.lfs = lfs
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.cuts: dict[str, list[int]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository, as {path: content}."""
        repo = self.repos[repo_id]
        return repo.commits[repo.at(revision)]

    def put(self, repo_id: str, folder: Path, private: bool = False, branch: str = "main") -> str:
        """Lay a folder into a repository without any client, and return the commit."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        repo = self.repos.setdefault(repo_id, Repo(private))
        repo.lfs |= {name for name in files if self.lfs and name.endswith(LFS_ENDINGS)}
        return repo.commit(branch, files)

    def asked(self, method: str, pattern: str) -> list[tuple[str, str, int]]:
        """Return the requests of a method whose path matches a pattern."""
        return [r for r in self.requests if r[0] == method and re.search(pattern, r[1])]


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    # ------------------------------------------------------------------ answers

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.hub.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: object, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def missing(self, what: str, **headers: str) -> None:
        self.json({"error": f"{what} (local stand-in)"}, 404, X_Error_Code=what, X_Error_Message=what, **headers)

    def forbidden(self) -> None:
        self.json({"error": "Invalid username or password."}, 401, X_Error_Message="Invalid username or password.")

    # ------------------------------------------------------------------ requests

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def do_POST(self) -> None:
        self.route()

    def do_PUT(self) -> None:
        self.route()

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def route(self) -> None:
        path, self.sent = unquote(urlsplit(self.path).path), self.body()
        self.query = parse_qs(urlsplit(self.path).query)
        routes = (
            (r"PUT /lfs-objects/(?P<oid>\w+)", self.put_object),
            (r"POST /api/validate-yaml", self.validate_yaml),
            (r"POST /api/repos/create", self.create),
            (r"GET /api/whoami-v2", self.whoami),
            (r"POST /api/models/(?P<repo>.+)/branch/(?P<rev>[^/]+)", self.create_branch),
            (r"POST /api/models/(?P<repo>.+)/preupload/(?P<rev>[^/]+)", self.preupload),
            (r"POST /api/models/(?P<repo>.+)/commit/(?P<rev>[^/]+)", self.commit),
            (r"POST /(?P<repo>.+)\.git/info/lfs/objects/batch", self.lfs_batch),
            (r"GET /api/models/(?P<repo>.+)/tree/(?P<rev>[^/]+)(/(?P<file>.*))?", self.tree),
            (r"GET /api/models/(?P<repo>.+)/revision/(?P<rev>[^/]+)", self.info),
            (r"GET /api/models/(?P<repo>[^/]+/[^/]+)", self.info),
            (r"(GET|HEAD) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)", self.resolve),
        )
        for pattern, action in routes:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                found = {name: value for name, value in match.groupdict().items() if value is not None}
                return self.in_repo(action, **found) if "repo" in found else action(**found)
        return self.missing("no such route")

    def in_repo(self, action, repo: str, **rest: str) -> None:
        writes = self.command in ("POST", "PUT")
        if (writes or (repo in self.hub.repos and self.hub.repos[repo].private)) and not self.known:
            return self.forbidden()
        if repo not in self.hub.repos:
            return self.missing("RepoNotFound")
        return action(self.hub.repos[repo], repo, **rest)

    # ------------------------------------------------------------------ push

    def whoami(self) -> None:
        self.json({"name": USER, "type": "user", "orgs": []}) if self.known else self.forbidden()

    def validate_yaml(self) -> None:
        try:
            errors = [] if isinstance(metadata(json.loads(self.sent)["content"]), dict) else ["not a mapping"]
        except yaml.YAMLError as error:
            errors = [str(error)]
        self.json({"warnings": [], "errors": [{"message": e} for e in errors]}, 400 if errors else 200)

    def create(self) -> None:
        if not self.known:
            return self.forbidden()
        asked = json.loads(self.sent)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return self.json({"error": "You already created this model repo", **url}, 409)
        self.hub.repos[repo_id] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        self.hub.repos[repo_id].commit("main", {".gitattributes": b""})
        return self.json(url)

    def create_branch(self, repo: Repo, repo_id: str, rev: str) -> None:
        if rev in repo.branches:
            return self.json({"error": "Reference already exists"}, 409)
        repo.branches[rev] = repo.branches["main"]
        return self.json({})

    def preupload(self, repo: Repo, repo_id: str, rev: str) -> None:
        if repo.at(rev) is None:
            return self.missing("RevisionNotFound")
        modes = []
        for file in json.loads(self.sent)["files"]:
            lfs = self.hub.lfs and file["path"].endswith(LFS_ENDINGS)
            modes.append({"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False})
        return self.json({"files": modes})

    def lfs_batch(self, repo: Repo, repo_id: str) -> None:
        objects = json.loads(self.sent)["objects"]
        for item in objects:
            if item["oid"] not in self.hub.objects:
                item["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs-objects/{item['oid']}"}}
        self.json({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.sent).hexdigest() != oid:
            return self.json({"error": "the bytes are not those announced"}, 400)
        self.hub.objects[oid] = self.sent
        return self.answer(200)

    def commit(self, repo: Repo, repo_id: str, rev: str) -> None:
        if rev not in repo.branches:
            return self.missing("RevisionNotFound")
        files = dict(repo.commits[repo.branches[rev]])
        for line in self.sent.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                repo.lfs.discard(value["path"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
                repo.lfs.add(value["path"])
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repo.commit(rev, files)
        return self.json({"commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{oid}"})

    # ------------------------------------------------------------------ load

    def info(self, repo: Repo, repo_id: str, rev: str = "main") -> None:
        oid = repo.at(rev)
        if oid is None:
            return self.missing("RevisionNotFound")
        names = [{"rfilename": name} for name in sorted(repo.commits[oid])]
        card = metadata(repo.commits[oid].get("README.md", b"").decode())
        of_card = {name: card.get(name) for name in ("library_name", "pipeline_tag")}
        return self.json({"id": repo_id, "sha": oid, "siblings": names, "tags": [], "private": repo.private, **of_card})

    def tree(self, repo: Repo, repo_id: str, rev: str, file: str = "") -> None:
        oid = repo.at(rev)
        if oid is None:
            return self.missing("RevisionNotFound")
        entries = []
        for name, data in sorted(repo.commits[oid].items()):
            if name.startswith(f"{file}/" if file else ""):
                entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                if name in repo.lfs:
                    entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                entries.append(entry)
        return self.json(entries) if entries or not file else self.missing("EntryNotFound", X_Repo_Commit=oid)

    def resolve(self, repo: Repo, repo_id: str, rev: str, file: str) -> None:
        oid = repo.at(rev)
        if oid is None:
            return self.missing("RevisionNotFound")
        if file not in repo.commits[oid]:
            return self.missing("EntryNotFound", X_Repo_Commit=oid)
        data = repo.commits[oid][file]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if file in repo.lfs:
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and self.hub.cuts.get(file):
            return self.break_off(data[start:], self.hub.cuts[file].pop(0), 206 if start else 200, headers)
        return self.answer(206 if start else 200, data[start:], **headers)

    def break_off(self, data: bytes, after: int, status: int, headers: dict[str, str]) -> None:
        self.hub.requests.append((self.command, self.path, -after))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:after])
        self.wfile.flush()
        self.close_connection = True


PRELUDE = "import sys\nif sys.argv[1] == 'without':\n    sys.modules['modeling_relish'] = None\n"


def run_client(
    code: str, hub: LocalHub, home: Path, *, token: str | None = TOKEN, package: bool = True, fails: bool = False
):
    """Run Python in a process of its own whose hub is the stand-in, and return what it printed as JSON on its last line.

    Args:
        code: Python; it prints one JSON value last.
        hub: The running stand-in.
        home: HF_HOME of the process: its cache and its modules. A fresh one knows nothing.
        token: Of the user; `None` = not logged in.
        package: `False` makes `import modeling_relish` fail, as on a machine that does not have it.
        fails: Expect a failure, and return stderr in place of the value.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    env |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    env |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, "with" if package else "without"],
        env=env, cwd=home.parent, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    if fails:
        assert done.returncode, done.stdout
        return done.stderr
    assert not done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
