"""The upload, against a server on this machine that speaks the Hub's protocol and keeps all it was sent."""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import REPOSITORY, TOKEN, FakeHub
from fake_hub import hub as hub

from trainer.export.artefact import Artefact
from trainer.export.card import render_card
from trainer.export.hub import upload

WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}" + bytes(range(256)) * 8
CONFIG = b'{"num_heads": 2}\n'


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
        "from trainer.export.hub import upload\n"
        "from huggingface_hub.utils import logging as hub_logging; hub_logging.set_verbosity_debug()\n"
        "print(upload(sys.argv[1], sys.argv[2]))\n"
    )
    settings = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_DEBUG": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), REPOSITORY],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/{REPOSITORY}: sent" in done.stdout
    assert (
        done.stdout.strip().splitlines()[-1] == f"read it as {REPOSITORY}@{hub.repositories[REPOSITORY].refs['main']}"
    )
    assert TOKEN not in done.stdout + done.stderr and "preupload" in done.stderr, "the logs were on, without the token"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files["model.safetensors"] == WEIGHTS and len(hub.files) == 3
    assert hub.visibility == "private"
    asked = [each.replace(f"/api/models/{REPOSITORY}", "") for each in hub.asked("/") if "agent-harnesses" not in each]
    assert list(dict.fromkeys(asked)) == [  # each kind once
        "POST /api/validate-yaml",  # before there is a repository
        "POST /api/repos/create",
        "POST /preupload/main",
        f"POST /{REPOSITORY}.git/info/lfs/objects/batch",
        f"PUT /storage/{hashlib.sha256(WEIGHTS).hexdigest()}",
        "POST /verify",
        "POST /commit/main",
    ]
    check_token_is_in_headers_only(hub)
    without = {request.path.split("/")[1] for request in hub.requests if request.token is None}
    assert without == {"storage", "api"}, "another host, and the first look at the card, need no token"
    assert all(request.token in (None, TOKEN) for request in hub.requests)


def test_a_repository_is_public_only_if_asked(hub: FakeHub, folder: Path) -> None:
    upload(folder, REPOSITORY, public=True)
    assert hub.visibility == "public"


@pytest.mark.parametrize(("visibility", "public"), [("private", False), ("public", True)])
def test_a_push_to_a_repository_that_exists_replaces_its_files(
    hub: FakeHub, folder: Path, visibility: str, public: bool
) -> None:
    hub.visibility = visibility
    hub.files = {"config.json": b"old", "LICENSE": b"kept"}
    upload(folder, REPOSITORY, public=public)
    assert hub.files["config.json"] == CONFIG and hub.files["LICENSE"] == b"kept"


@pytest.mark.parametrize(("visibility", "public"), [("public", False), ("private", True)])
def test_nothing_is_sent_to_a_repository_of_the_other_visibility(
    hub: FakeHub, folder: Path, visibility: str, public: bool
) -> None:
    hub.visibility = visibility
    with pytest.raises(ValueError, match=f"exists and is {visibility}"):
        upload(folder, REPOSITORY, public=public)
    assert hub.files == {} and hub.blobs == {}


def test_a_token_that_may_not_create_still_writes_to_a_repository_that_exists(hub: FakeHub, folder: Path) -> None:
    hub.visibility = "private"
    hub.failures["/api/repos/create"] = (403, "no right to create")
    upload(folder, REPOSITORY)
    assert hub.files["config.json"] == CONFIG


CREATE, COMMIT = "/api/repos/create", f"/api/models/{REPOSITORY}/commit/main"


@pytest.mark.parametrize(
    ("path", "status", "complaint"),
    [
        (CREATE, 401, r"does not accept the token \(401\): run `hf auth login`"),
        (CREATE, 402, r"asks for payment \(402\), saying 'refused for"),
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
        upload(folder, REPOSITORY)
    assert "\n" not in str(raised.value) and TOKEN not in repr(raised.value)
    assert raised.value.__cause__ is None and raised.value.__context__ is None, "either would hold the request"
    assert TOKEN not in caplog.text and TOKEN not in "".join(capfd.readouterr())
    assert hub.files == {}
    check_token_is_in_headers_only(hub)


def test_a_hub_that_cannot_be_reached_is_named(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://zoe:password@127.0.0.1:1")
    with pytest.raises(ValueError, match=r"the upload to http://127\.0\.0\.1:1 failed") as raised:
        upload(folder, REPOSITORY)
    assert "password" not in str(raised.value)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("front_matter", "reason"),
    [("just words", "repo card metadata block should be a dict"), ("tags: one", '"tags" must be an array')],
)
def test_a_card_that_the_hub_does_not_accept_makes_no_repository(
    hub: FakeHub, folder: Path, front_matter: str, reason: str
) -> None:
    (folder / "README.md").write_text(f"---\n{front_matter}\n---\n")
    with pytest.raises(ValueError) as raised:
        upload(folder, REPOSITORY)
    assert str(raised.value) == f"{hub.address} does not accept the card's metadata ({reason}): correct README.md"
    assert hub.repositories == {} and hub.blobs == {}


# --- broken connections, and a Hub that asks to wait ------------------------------------------------------------------


def digest(content: bytes = WEIGHTS) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("part_size", [None, 1000])
@pytest.mark.parametrize("cut", ["request", "answer"])
@pytest.mark.parametrize(
    "beginning",
    ["/storage/", "/part/", "/complete/", "/verify", "/api/repos/create", COMMIT, f"/api/models/{REPOSITORY}"],
)
def test_an_upload_goes_on_after_a_broken_connection(
    hub: FakeHub, folder: Path, beginning: str, cut: str, part_size: int | None
) -> None:
    """In the middle of a request, or before the answer to one that the Hub has done."""
    hub.part_size, hub.drops = part_size, {beginning: [cut]}
    pushed = upload(folder, REPOSITORY)
    other_way = ("/part/", "/complete/") if part_size is None else ("/storage/",)
    assert hub.drops[beginning] == ([cut] if beginning in other_way else []), "the connection did break"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert pushed.commit == hub.repositories[REPOSITORY].refs["main"]
    assert len(hub.repositories[REPOSITORY].commits) == 2, "the empty one, and one of all files"


def test_large_files_go_in_parts(hub: FakeHub, folder: Path) -> None:
    hub.part_size = 1000
    upload(folder, REPOSITORY)
    assert hub.asked("/part/") == [f"PUT /part/{digest()}/{number}" for number in (1, 2, 3)]
    assert [len(part) for part in hub.parts[digest()].values()] == [1000, 1000, len(WEIGHTS) - 2000]
    assert hub.files["model.safetensors"] == WEIGHTS


def test_a_second_push_sends_only_what_is_missing(hub: FakeHub, folder: Path) -> None:
    hub.failures[COMMIT] = (507, "the disk is full")
    with pytest.raises(ValueError, match=r"no room for these files \(507\), saying 'the disk is full': free some"):
        upload(folder, REPOSITORY)
    assert hub.asked("/storage/") == [f"PUT /storage/{digest()}"] and hub.files == {}
    hub.failures.clear()
    assert upload(folder, REPOSITORY).changed
    again = upload(folder, REPOSITORY)
    assert hub.asked("/storage/") == [f"PUT /storage/{digest()}"], "it was there"
    assert not again.changed and "nothing was sent, as the repository holds these very files" in str(again)
    assert len(hub.asked("/commit/main")) == 2 and again.commit == hub.repositories[REPOSITORY].refs["main"]


@pytest.mark.parametrize("headers", [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=7'}])
def test_a_hub_that_asks_to_wait_is_waited_for(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        hub.failures.clear()

    monkeypatch.setattr("time.sleep", wait)
    hub.failures[COMMIT] = (429, "slow down", headers)
    assert upload(folder, REPOSITORY).changed and waits == [7]


def test_a_hub_that_asks_for_a_long_wait_is_told_of(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    hub.failures[COMMIT] = (429, "slow down", {"Retry-After": "1800"})
    with pytest.raises(ValueError, match=r"too many requests \(429\), saying 'slow down': push again in 1800 seconds"):
        upload(folder, REPOSITORY)
    assert waits == []


# --- branches and pull requests ---------------------------------------------------------------------------------------


def test_a_branch_is_made_and_main_stays(hub: FakeHub, folder: Path) -> None:
    first = upload(folder, REPOSITORY)
    (folder / "config.json").write_bytes(b"{}")
    second = upload(folder, REPOSITORY, revision="v2/wide", message="Wider heads")
    refs = hub.repositories[REPOSITORY].refs
    assert refs == {"main": first.commit, "v2/wide": second.commit} and first.commit != second.commit
    assert hub.repositories[REPOSITORY].files("v2/wide")["config.json"] == b"{}"
    assert second.name == f"{REPOSITORY}@{second.commit}" and hub.asked("/storage/").count("PUT") == 0
    sent = [request for request in hub.requests if "/commit/v2%2Fwide" in request.path][-1]
    assert json.loads(sent.body.splitlines()[0])["value"]["summary"] == "Wider heads"
    assert not upload(folder, REPOSITORY, revision="v2/wide").changed


def test_a_pull_request_leaves_main_and_is_opened_once(hub: FakeHub, folder: Path) -> None:
    hub.visibility = "private"
    before = dict(hub.repositories[REPOSITORY].refs)
    pushed = upload(folder, REPOSITORY, pull_request=True)
    assert pushed.pull_request == f"{hub.address}/{REPOSITORY}/discussions/1"
    assert hub.repositories[REPOSITORY].refs == {**before, "refs/pr/1": pushed.commit}
    hub.drops[COMMIT] = ["answer"]
    (folder / "config.json").write_bytes(b"{}")
    with pytest.raises(
        ValueError, match=r"failed \(RemoteProtocolError.*discussions for a pull request, then push again"
    ):
        upload(folder, REPOSITORY, pull_request=True)
    assert "refs/pr/3" not in hub.repositories[REPOSITORY].refs
    with pytest.raises(ValueError, match="a pull request goes to main, but revision is 'v2': give one of the two"):
        upload(folder, REPOSITORY, pull_request=True, revision="v2")


# --- refused before any request ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.bin", "optimizer.pt", "weights.PTH", "state.pkl", "last.ckpt"])
def test_a_pickle_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="may be a pickle"):
        upload(folder, REPOSITORY)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "model.safetensors", ".env"])
def test_a_file_that_holds_the_token_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(f"my token: {TOKEN}\n".encode())
    with pytest.raises(ValueError, match="contains your token") as raised:
        upload(folder, REPOSITORY)
    assert TOKEN not in str(raised.value) and name in str(raised.value)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_folder_without_an_exported_artefact_is_refused(hub: FakeHub, folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing\): export first"):
        upload(folder, REPOSITORY)
    with pytest.raises(ValueError, match="there is no folder"):
        upload(folder / "nowhere", REPOSITORY)
    assert hub.requests == []


@pytest.mark.parametrize("repo_id", ["heads", "a/b/c", "zoe/", "/heads", "zoe/with blank", "zoe/a--b", "zoe/x.git", ""])
def test_a_malformed_repository_id_is_refused(hub: FakeHub, folder: Path, repo_id: str) -> None:
    with pytest.raises(ValueError, match="give ORG/NAME"):
        upload(folder, repo_id)
    assert hub.requests == []


def test_without_a_token_the_message_says_where_to_get_one(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.export.hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="run `hf auth login`, or set HF_TOKEN"):
        upload(folder, REPOSITORY)
    assert hub.requests == []


def test_a_link_out_of_the_folder_is_refused(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (folder / "notes.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=r"notes\.json is a link out of its folder: put the file itself there"):
        upload(folder, REPOSITORY)
    assert hub.requests == []
