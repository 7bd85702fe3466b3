"""The upload, against a server on this machine that speaks the Hub's protocol and keeps all it was sent."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import REPOSITORY, TOKEN, FakeHub, serve

from trainer.export.artefact import Artefact
from trainer.export.card import render_card
from trainer.export.hub import push

WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}" + bytes(range(256)) * 8
CONFIG = b'{"num_heads": 2}\n'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake Hub, and a fake token in the environment."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # huggingface_hub reads HF_HUB_DISABLE_XET when it is imported, which some other test may have done by now.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with serve() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported folder, with a real card."""
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "model.safetensors").write_bytes(WEIGHTS)
    (exported / "config.json").write_bytes(CONFIG)
    artefact = Artefact("vllm", 100, "bfloat16", hidden_size=8, vocab_size=12, layers=1, heads=2, tree_nodes=2)
    (exported / "README.md").write_text(render_card(artefact, None, None), encoding="utf-8")
    return exported


def check_token_is_in_headers_only(hub: FakeHub) -> None:
    for request in hub.requests:
        assert TOKEN not in request.path and TOKEN.encode() not in request.body
        assert TOKEN not in json.dumps({k: v for k, v in request.headers.items() if k.lower() != "authorization"})


def test_a_push_delivers_every_byte_to_a_private_repository_and_keeps_the_token_quiet(
    hub: FakeHub, folder: Path
) -> None:
    """In a process of its own, with every logger at its most talkative, so that all it prints can be searched."""
    program = (
        "import logging, sys; logging.basicConfig(level=1)\n"
        "from trainer.export.hub import push\n"
        "from huggingface_hub.utils import logging as hub_logging; hub_logging.set_verbosity_debug()\n"
        "print(push(sys.argv[1], sys.argv[2], endpoint=sys.argv[3]))\n"
    )
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), REPOSITORY, hub.address],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == f"{hub.address}/{REPOSITORY}"
    assert TOKEN not in done.stdout + done.stderr and "preupload" in done.stderr, "the logs were on, without the token"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files["model.safetensors"] == WEIGHTS and len(hub.files) == 3
    assert hub.visibility == "private"
    asked = [f"{r.method} {r.path.split('?')[0]}".replace(f"/api/models/{REPOSITORY}", "") for r in hub.requests]
    assert list(dict.fromkeys(asked)) == [  # each kind once: the card is validated twice
        "POST /api/repos/create",
        "POST /api/validate-yaml",
        "POST /preupload/main",
        f"POST /{REPOSITORY}.git/info/lfs/objects/batch",
        f"PUT /storage/{hashlib.sha256(WEIGHTS).hexdigest()}",
        "POST /verify",
        "POST /commit/main",
    ]
    check_token_is_in_headers_only(hub)
    for request in hub.requests:
        sent = request.headers.get("authorization", request.headers.get("Authorization"))
        assert sent == (None if request.method == "PUT" else f"Bearer {TOKEN}")


def test_a_repository_is_public_only_if_asked(hub: FakeHub, folder: Path) -> None:
    push(folder, REPOSITORY, public=True, endpoint=hub.address)
    assert hub.visibility == "public"


@pytest.mark.parametrize(("visibility", "public"), [("private", False), ("public", True)])
def test_a_push_to_a_repository_that_exists_replaces_its_files(
    hub: FakeHub, folder: Path, visibility: str, public: bool
) -> None:
    hub.visibility = visibility
    hub.files = {"config.json": b"old", "LICENSE": b"kept"}
    push(folder, REPOSITORY, public=public, endpoint=hub.address)
    assert hub.files["config.json"] == CONFIG and hub.files["LICENSE"] == b"kept"


@pytest.mark.parametrize(("visibility", "public"), [("public", False), ("private", True)])
def test_nothing_is_sent_to_a_repository_of_the_other_visibility(
    hub: FakeHub, folder: Path, visibility: str, public: bool
) -> None:
    hub.visibility = visibility
    with pytest.raises(ValueError, match=f"exists and is {visibility}"):
        push(folder, REPOSITORY, public=public, endpoint=hub.address)
    assert hub.files == {} and hub.blobs == {}


def test_a_token_that_may_not_create_still_writes_to_a_repository_that_exists(hub: FakeHub, folder: Path) -> None:
    hub.visibility = "private"
    hub.failures["/api/repos/create"] = (403, "no right to create")
    push(folder, REPOSITORY, endpoint=hub.address)
    assert hub.files["config.json"] == CONFIG


CREATE, COMMIT = "/api/repos/create", f"/api/models/{REPOSITORY}/commit/main"


@pytest.mark.parametrize(
    ("path", "status", "complaint"),
    [
        (CREATE, 401, r"does not accept the token \(401\): run `hf auth login`"),
        (CREATE, 403, r"may not write to zoe/target-heads \(403\)"),
        (CREATE, 404, r"knows no zoe/target-heads \(404\)"),
        (CREATE, 500, r"answered 500, saying .*: nothing was published"),
        (COMMIT, 403, r"may not write to zoe/target-heads \(403\)"),
        (COMMIT, 500, r"answered 500"),
        ("/api/validate-yaml", 500, r"answered 500"),
    ],
)
def test_whatever_the_hub_refuses_is_one_sentence_without_the_token(
    hub: FakeHub,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    path: str,
    status: int,
    complaint: str,
) -> None:
    """Also when the server's own message repeats the token."""
    caplog.set_level(logging.DEBUG)
    hub.failures[path] = (status, f"refused for Bearer {TOKEN}\nsee the manual")
    with pytest.raises(ValueError, match=complaint) as raised:
        push(folder, REPOSITORY, endpoint=hub.address)
    assert "\n" not in str(raised.value) and TOKEN not in repr(raised.value)
    assert raised.value.__cause__ is None and raised.value.__context__ is None, "either would hold the request"
    assert TOKEN not in caplog.text and TOKEN not in "".join(capfd.readouterr())
    assert hub.files == {}
    check_token_is_in_headers_only(hub)


def test_a_hub_that_cannot_be_reached_is_named(hub: FakeHub, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"the upload to http://127\.0\.0\.1:1 failed") as raised:
        push(folder, REPOSITORY, endpoint="http://zoe:password@127.0.0.1:1")
    assert "password" not in str(raised.value)
    assert hub.requests == []


def test_a_card_that_the_hub_does_not_accept_stops_the_upload(hub: FakeHub, folder: Path) -> None:
    (folder / "README.md").write_text("---\njust words\n---\n")
    with pytest.raises(ValueError, match="the front matter is no mapping"):
        push(folder, REPOSITORY, endpoint=hub.address)
    assert hub.files == {} and hub.blobs == {}


# --- refused before any request ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.bin", "optimizer.pt", "weights.PTH", "state.pkl", "last.ckpt"])
def test_a_pickle_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="may be a pickle"):
        push(folder, REPOSITORY, endpoint=hub.address)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "model.safetensors", ".env"])
def test_a_file_that_holds_the_token_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(f"my token: {TOKEN}\n".encode())
    with pytest.raises(ValueError, match="contains your token") as raised:
        push(folder, REPOSITORY, endpoint=hub.address)
    assert TOKEN not in str(raised.value) and name in str(raised.value)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_folder_without_an_exported_artefact_is_refused(hub: FakeHub, folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing\): export first"):
        push(folder, REPOSITORY, endpoint=hub.address)
    with pytest.raises(ValueError, match="there is no folder"):
        push(folder / "nowhere", REPOSITORY, endpoint=hub.address)
    assert hub.requests == []


@pytest.mark.parametrize("repo_id", ["heads", "a/b/c", "zoe/", "/heads", "zoe/with blank", "zoe/a--b", "zoe/x.git", ""])
def test_a_malformed_repository_id_is_refused(hub: FakeHub, folder: Path, repo_id: str) -> None:
    with pytest.raises(ValueError, match="give ORG/NAME"):
        push(folder, repo_id, endpoint=hub.address)
    assert hub.requests == []


def test_without_a_token_the_message_says_where_to_get_one(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.export.hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="run `hf auth login`, or set HF_TOKEN"):
        push(folder, REPOSITORY, endpoint=hub.address)
    assert hub.requests == []
