"""A server on the loopback that speaks the Hub's upload protocol and keeps all it was sent."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


@dataclass
class FakeHub:
    """Answers like the Hub, or with ``failures[path]`` instead: (status, message)."""

    address: str = ""
    requests: list[Request] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    visibility: str | None = None
    """Of the repository, None before it exists"""

    def answer(self, request: Request) -> tuple[int, Any]:
        path = request.path.split("?")[0]
        if path in self.failures:
            status, message = self.failures[path]
            return status, {"error": message}
        if request.method == "PUT":
            self.blobs[path.rsplit("/", 1)[1]] = request.body
            return 200, {}
        answers = {
            "/api/repos/create": self.create,
            f"/api/models/{REPOSITORY}": self.describe,
            "/api/validate-yaml": self.validate_yaml,
            f"/api/models/{REPOSITORY}/preupload/main": self.preupload,
            f"/{REPOSITORY}.git/info/lfs/objects/batch": self.batch,
            "/verify": self.verify,
            f"/api/models/{REPOSITORY}/commit/main": self.commit,
        }
        return answers[path](request) if path in answers else (404, {"error": f"no such path: {path}"})

    def create(self, request: Request) -> tuple[int, Any]:
        if self.visibility is not None:
            return 409, {"error": "You already created this model repo", "url": f"{self.address}/{REPOSITORY}"}
        self.visibility = request.json["visibility"]
        return 200, {"url": f"{self.address}/{REPOSITORY}"}

    def describe(self, _: Request) -> tuple[int, Any]:
        if self.visibility is None:
            return 404, {"error": "Repository not found"}
        return 200, {"id": REPOSITORY, "private": self.visibility == "private", "tags": [], "siblings": []}

    def validate_yaml(self, request: Request) -> tuple[int, Any]:
        front_matter = yaml.safe_load(request.json["content"].split("---\n")[1])
        errors = [] if isinstance(front_matter, dict) else [{"message": "the front matter is no mapping"}]
        return 400 if errors else 200, {"errors": errors, "warnings": []}

    def preupload(self, request: Request) -> tuple[int, Any]:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in request.json["files"]
        ]
        return 200, {"files": files}

    def batch(self, request: Request) -> tuple[int, Any]:
        objects = [
            {
                **wanted,
                "actions": {
                    "upload": {"href": f"{self.address}/storage/{wanted['oid']}"},
                    "verify": {"href": f"{self.address}/verify"},
                },
            }
            for wanted in request.json["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def verify(self, request: Request) -> tuple[int, Any]:
        blob = self.blobs[request.json["oid"]]
        same = hashlib.sha256(blob).hexdigest() == request.json["oid"] and len(blob) == request.json["size"]
        return 200 if same else 422, {}

    def commit(self, request: Request) -> tuple[int, Any]:
        for entry in map(json.loads, request.body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]
        return 200, {"commitUrl": f"{self.address}/{REPOSITORY}/commit/1", "commitOid": "1" * 40}


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A fake Hub behind real HTTP, for as long as the context lasts."""
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or every answer waits 40 ms for an acknowledgement

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, dict(self.headers), body)
            fake.requests.append(request)
            status, content = fake.answer(request)
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
