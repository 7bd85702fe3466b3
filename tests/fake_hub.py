"""A server on the loopback that speaks the Hub's protocol: uploads, downloads by revision, and faults on demand.

As on the real Hub, large files come from another host, which must never see the token.
"""

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import yaml

TOKEN = "hf_ThisIsNoRealTokenOnlyATest"
REPOSITORY = "zoe/target-heads"


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def token(self) -> str | None:
        """The token that was sent; None if there was none."""
        sent = {name.lower(): value for name, value in self.headers.items()}.get("authorization")
        return None if sent is None else sent.removeprefix("Bearer ")


class Answer(NamedTuple):
    status: int
    content: Any
    """bytes, or JSON values"""
    headers: Mapping[str, str] = MappingProxyType({})


@dataclass
class Repository:
    """Files by branch, tag or commit; the name of a commit is the digest of its files."""

    visibility: str = "private"
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit({})

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make ``files`` the content of a branch; return the commit hash."""
        listed = repr([(name, hashlib.sha256(content).hexdigest()) for name, content in sorted(files.items())])
        name = hashlib.sha1(f"{self.refs.get(branch)} {listed}".encode()).hexdigest()
        self.commits[name], self.refs[branch] = dict(files), name
        return name

    def resolved(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        name = self.resolved(revision)
        return {} if name is None else self.commits[name]


def _refusal(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".parquet"))


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class FakeHub:
    """A server that answers like the Hub, or with ``failures[path]`` instead: (status, message[, headers])."""

    address: str = ""
    requests: list[Request] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    drops: dict[str, list[str]] = field(default_factory=dict)
    """Where to cut connections, by the beginning of a path, with one entry per request. ``answer`` cuts a connection
    after the work is done but before the answer, and ``content`` cuts it in the middle of the content. None lets a
    request succeed.
    """

    # --- the repository of the uploads ---

    @property
    def visibility(self) -> str | None:
        """None before the repository exists."""
        return self.repositories[REPOSITORY].visibility if REPOSITORY in self.repositories else None

    @visibility.setter
    def visibility(self, value: str) -> None:
        self.repositories.setdefault(REPOSITORY, Repository()).visibility = value

    @property
    def files(self) -> dict[str, bytes]:
        return self.repositories[REPOSITORY].files() if REPOSITORY in self.repositories else {}

    @files.setter
    def files(self, value: dict[str, bytes]) -> None:
        self.repositories.setdefault(REPOSITORY, Repository()).commit(value)

    def asked(self, part: str) -> list[str]:
        """Return method and path of the requests whose path contains this part."""
        return [f"{r.method} {r.path.split('?')[0]}" for r in self.requests if part in r.path]

    # --- answers ---

    def answer(self, request: Request) -> Answer:
        path = unquote(request.path.split("?")[0])
        if path in self.failures:
            status, message, *headers = self.failures[path]
            return Answer(status, {"error": message}, *headers)
        word = path.split("/")[1]
        if word == "cdn":
            return self.large_file(request, path.rsplit("/", 1)[1])
        if word == "storage":
            return self.stored(request, path)
        if path == "/api/validate-yaml":
            return self.validate_yaml(request)
        if path == "/api/repos/create":
            return self.create(request)
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
            return self.of_repository(request, f"{owner}/{name}", *rest)
        if path.startswith("/api/datasets/"):
            owner, name, *rest = path.removeprefix("/api/datasets/").split("/", 3)
            return self.of_repository(request, f"datasets/{owner}/{name}", *rest)
        if ".git/info/lfs/objects/batch" in path:
            return self.batch(request)
        if "/resolve/" in path:
            repo_id, _, rest = path[1:].partition("/resolve/")
            return self.file(request, repo_id, rest)
        return Answer(404, {"error": f"no such path: {path}"})

    def create(self, request: Request) -> Answer:
        asked = request.json
        repo_id = f"{asked.get('organization') or 'zoe'}/{asked['name'].split('/')[-1]}"
        self.repositories[repo_id] = Repository(asked["visibility"])
        return Answer(200, {"url": f"{self.address}/{repo_id}"})

    def of_repository(self, request: Request, repo_id: str, word: str = "revision", rest: str = "main") -> Answer:
        found = self.readable(request, repo_id)
        if isinstance(found, Answer):
            return found
        if word == "branch":
            exists = rest in found.refs
            found.refs.setdefault(rest, found.refs.get("main", ""))
            return Answer(409 if exists else 200, {})
        if word == "auth-check":
            return self.gate(request, repo_id) if found.gated else Answer(200, {})
        if word == "tree":
            return self.listed(request, found, rest)
        if (name := found.resolved(rest)) is None and (word, rest) != ("revision", "main"):
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {rest}")
        if word == "revision":
            listed = [{"rfilename": path} for path in found.files(rest)]
            private = found.visibility == "private"
            repo_id = repo_id.removeprefix("datasets/")
            return Answer(200, {"id": repo_id, "sha": name, "private": private, "tags": [], "siblings": listed})
        if word == "preupload":
            return self.preupload(request, found.files(rest))
        return self.commit(request, repo_id, found, rest)

    def listed(self, request: Request, found: Repository, rest: str) -> Answer:
        """List a revision's files and folders under a folder."""
        commit, under = next(self.split(found, f"{rest}/"))
        files = found.commits[commit]
        folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
        deep = "recursive=true" in request.path.lower()
        wanted = [path for path in sorted({*files, *folders}) if f"{path}/".startswith(under) and path != under[:-1]]
        wanted = [path for path in wanted if deep or "/" not in path.removeprefix(under)]
        if under and not wanted:
            return _refusal(404, "EntryNotFound", f"{under} does not exist")
        told = [
            self.described(path, files[path]) if path in files else {"type": "directory", "path": path, "oid": commit}
            for path in wanted
        ]
        return Answer(200, told)

    def readable(self, request: Request, repo_id: str) -> Repository | Answer:
        if request.token not in (None, TOKEN):
            return Answer(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
        found = self.repositories.get(repo_id)
        if found is None or (found.visibility == "private" and request.token is None):
            return _refusal(401 if request.token is None else 404, "RepoNotFound", "Repository not found")
        return found

    @staticmethod
    def described(path: str, content: bytes) -> dict[str, Any]:
        told = {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content)}
        oid = hashlib.sha256(content).hexdigest()
        return told | ({"lfs": {"oid": oid, "size": len(content), "pointerSize": 134}} if _is_large(path) else {})

    def file(self, request: Request, repo_id: str, rest: str) -> Answer:
        found = self.readable(request, repo_id)
        if isinstance(found, Answer):
            return found
        if found.gated:
            return self.gate(request, repo_id)
        commit, path = next(self.split(found, rest))
        if path not in found.commits[commit]:
            return _refusal(404, "EntryNotFound", "Entry not found")
        content = found.commits[commit][path]
        if not _is_large(path):
            return ranged(request, content, {"ETag": f'"{_git_oid(content)}"', "X-Repo-Commit": commit})
        oid = hashlib.sha256(content).hexdigest()
        self.blobs[oid] = content
        elsewhere = self.address.replace("127.0.0.1", "localhost")
        linked = {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
        return Answer(302, b"", {"Location": f"{elsewhere}/cdn/{oid}", **linked})

    @staticmethod
    def gate(request: Request, repo_id: str) -> Answer:
        return _refusal(403 if request.token else 401, "GatedRepo", f"Access to {repo_id} is restricted")

    @staticmethod
    def split(found: Repository, rest: str) -> Iterator[tuple[str, str]]:
        """Yield (commit, path) of REVISION/PATH; a revision may contain slashes."""
        for revision in [*found.refs, *found.commits]:
            if rest.startswith(f"{revision}/"):
                yield str(found.resolved(revision)), rest.removeprefix(f"{revision}/")

    def large_file(self, request: Request, oid: str) -> Answer:
        assert request.token is None, "the storage of large files is another host: no token for it"
        return ranged(request, self.blobs[oid], {"ETag": f'"{oid}"'})

    # --- uploads ---

    def validate_yaml(self, request: Request) -> Answer:
        front_matter = yaml.safe_load(request.json["content"].split("---\n")[1])
        errors = [] if isinstance(front_matter["tags"], list) else [{"message": '"tags" must be an array'}]
        return Answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, request: Request, held: dict[str, bytes]) -> Answer:
        files = []
        for file in request.json["files"]:
            path, content = file["path"], held.get(file["path"])
            mode, digest = ("lfs", _sha256) if _is_large(path) else ("regular", _git_oid)
            oid = None if content is None else digest(content)
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Answer(200, {"files": files})

    def batch(self, request: Request) -> Answer:
        objects = []
        for wanted in request.json["objects"]:
            oid = wanted["oid"]
            if oid in self.blobs:
                objects.append(wanted)  # there is nothing to do
                continue
            objects.append({**wanted, "actions": {"upload": {"href": f"{self.address}/storage/{oid}"}}})
        return Answer(200, {"transfer": "basic", "objects": objects})

    def stored(self, request: Request, path: str) -> Answer:
        assert request.token is None, "the storage of large files is another host: no token for it"
        self.blobs[path.rsplit("/", 1)[1]] = request.body
        return Answer(200, {})

    def commit(self, request: Request, repo_id: str, found: Repository, branch: str) -> Answer:
        files = dict(found.files(branch))
        for entry in map(json.loads, request.body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        asks_pull = "create_pr=1" in request.path
        number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
        oid = found.commit(files, f"refs/pr/{number}" if asks_pull else branch)
        pull = {"pullRequestUrl": f"{self.address}/{repo_id}/discussions/{number}"} if asks_pull else {}
        return Answer(200, {"commitUrl": f"{self.address}/{repo_id}/commit/{oid}", "commitOid": oid, **pull})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def ranged(request: Request, content: bytes, headers: dict[str, str]) -> Answer:
    """Answer with the content, or with the part of it that the request asks for by ``bytes=FIRST-[LAST]``."""
    asked = {name.lower(): value for name, value in request.headers.items()}.get("range")
    if asked is None:
        return Answer(200, content, headers)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    part = content[int(first) : int(last) + 1 if last else None]
    told = {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
    return Answer(206, part, {**headers, **told})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer would wait 40 ms for an acknowledgement
    fake: FakeHub

    def handle_any(self) -> None:
        cut = self.cut()
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, self.path, dict(self.headers), self.rfile.read(length))
        self.fake.requests.append(request)
        answer = self.fake.answer(request)
        if cut == "answer":
            self.hang_up()
            return
        raw = isinstance(answer.content, bytes)
        encoded = answer.content if raw else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/octet-stream" if raw else "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(encoded[: len(encoded) // 2] if cut == "content" else encoded)
        if cut == "content":
            self.hang_up()

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def cut(self) -> str | None:
        for beginning, left in self.fake.drops.items():
            if self.path.startswith(beginning) and left and self.command != "HEAD":
                return left.pop(0)
        return None

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[FakeHub]:
    """Serve a fake Hub over real HTTP while the context lasts."""
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    fake.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def folder_on(hub: FakeHub, repo_id: str, folder: Path, visibility: str = "public", branch: str = "main") -> str:
    """Put the files of a folder on the Hub; return the commit hash."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return hub.repositories.setdefault(repo_id, Repository(visibility)).commit(files, branch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Start a fake Hub in place of the real one, with an empty cache and no waiting before second attempts."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serve() as fake:
        # huggingface_hub reads its variables on import, and another test may have imported it already.
        here = {
            "ENDPOINT": fake.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": fake.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in here.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield fake
