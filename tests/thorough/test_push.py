"""Upload of an exported folder to a server on this machine that speaks the Hub's protocol; nothing private is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import REPOSITORY, TOKEN, FakeHub
from fake_hub import hub as hub
from test_export import random_heads, report_of, write_json

from decoding.files.fingerprint import stored_fingerprint
from trainer.export.card import render_card
from trainer.export.exporter import export
from trainer.export.task import Artefact
from trainer.export.upload import push

SECRET = "hf_SomebodyElsesTokenInARecipe"
WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}" + bytes(range(256)) * 8
CONFIG = b'{"num_heads": 2}\n'
COMMIT = f"/api/models/{REPOSITORY}/commit/main"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make an exported folder with a real card."""
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "model.safetensors").write_bytes(WEIGHTS)
    (exported / "config.json").write_bytes(CONFIG)
    artefact = Artefact("heads", 100, "bfloat16", hidden_size=8, vocab_size=12, layers=1, heads=2, tree_nodes=2)
    (exported / "README.md").write_text(render_card(artefact, None, None), encoding="utf-8")
    return exported


def check_token_is_in_headers_only(hub: FakeHub) -> None:
    for request in hub.requests:
        assert TOKEN not in request.path and TOKEN.encode() not in request.body
        assert TOKEN not in json.dumps({k: v for k, v in request.headers.items() if k.lower() != "authorization"})


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_push_delivers_every_byte_to_a_private_repository_and_keeps_the_token_quiet(
    hub: FakeHub, folder: Path
) -> None:
    """The push runs in a separate process with all loggers at the lowest level, so that everything printed can be
    searched.
    """
    program = (
        "import logging, sys; logging.basicConfig(level=1)\n"
        "from trainer.export.upload import push\n"
        "from huggingface_hub.utils import logging as hub_logging; hub_logging.set_verbosity_debug()\n"
        "print(push(sys.argv[1], sys.argv[2]))\n"
    )
    settings = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_DEBUG": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", program, str(folder), REPOSITORY]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    commit = hub.repositories[REPOSITORY].refs["main"]
    assert done.stdout == f"uploaded to {hub.address}/{REPOSITORY}\nuse it as {REPOSITORY}@{commit}\n"
    assert TOKEN not in done.stdout + done.stderr and "preupload" in done.stderr, "the logs were on, without the token"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()} and len(hub.files) == 3
    assert hub.visibility == "private"
    check_token_is_in_headers_only(hub)
    assert all(request.token in (None, TOKEN) for request in hub.requests)


def test_a_repository_is_public_only_if_asked_and_nothing_is_published_by_accident(hub: FakeHub, folder: Path) -> None:
    push(folder, REPOSITORY, public=True)
    assert hub.visibility == "public"
    for visibility, public in (("public", False), ("private", True)):
        hub.visibility = visibility
        hub.files = {}
        with pytest.raises(ValueError, match=f"exists and is {visibility}"):
            push(folder, REPOSITORY, public=public)
        assert hub.files == {}


def test_a_push_replaces_files_keeps_others_and_sends_no_weights_twice(hub: FakeHub, folder: Path) -> None:
    hub.visibility, hub.files = "private", {"config.json": b"old", "LICENSE": b"kept"}
    hub.failures["/api/repos/create"] = (403, "no right to create")  # this package is not needed
    hub.failures[COMMIT] = (507, "the disk is full")
    with pytest.raises(ValueError, match=r"answered 507 .*the disk is full.*: push again"):
        push(folder, REPOSITORY)
    del hub.failures[COMMIT]
    pushed = push(folder, REPOSITORY)
    assert hub.files["config.json"] == CONFIG and hub.files["LICENSE"] == b"kept"
    assert len(hub.asked("/storage/")) == 1, "the weights were there"
    assert pushed.name == f"{REPOSITORY}@{hub.repositories[REPOSITORY].refs['main']}"


# --- what the Hub refuses ---------------------------------------------------------------------------------------------


def test_a_branch_is_made_and_a_pull_request_leaves_main(hub: FakeHub, folder: Path) -> None:
    first = push(folder, REPOSITORY)
    (folder / "config.json").write_bytes(b"{}")
    second = push(folder, REPOSITORY, revision="v2/wide", message="Wider heads")
    third = push(folder, REPOSITORY, pull_request=True)
    refs = {name: f"{REPOSITORY}@{commit}" for name, commit in hub.repositories[REPOSITORY].refs.items()}
    assert refs == {"main": first.name, "v2/wide": second.name, "refs/pr/1": third.name} and first != second
    assert third.address == f"{hub.address}/{REPOSITORY}/discussions/1"
    sent = next(request for request in hub.requests if "/commit/v2%2Fwide" in request.path)
    assert json.loads(sent.body.splitlines()[0])["value"]["summary"] == "Wider heads"
    with pytest.raises(ValueError, match="a pull request goes to main, but revision is 'v2': use only one"):
        push(folder, REPOSITORY, pull_request=True, revision="v2")


@pytest.mark.parametrize(
    ("path", "status", "remedy"),
    [("/api/repos/create", 401, "run `hf auth login`"), (COMMIT, 403, "use a token with write access")],
)
def test_whatever_the_hub_refuses_is_one_sentence_without_the_token(
    hub: FakeHub, folder: Path, path: str, status: int, remedy: str
) -> None:
    """This is true even if the message of the server repeats the token."""
    hub.failures[path] = (status, f"refused for Bearer {TOKEN}\nsee the manual")
    with pytest.raises(ValueError, match=f"{REPOSITORY} answered {status} .*{remedy}") as raised:
        push(folder, REPOSITORY)
    assert "\n" not in str(raised.value) and TOKEN not in repr(raised.value)
    assert raised.value.__cause__ is None and raised.value.__context__ is None, "either would hold the request"
    assert hub.files == {}
    check_token_is_in_headers_only(hub)


# --- refused before any request ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.bin", "inner/weights.PTH"])
def test_a_pickle_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="may be a pickle"):
        push(folder, REPOSITORY)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", ".env"])
def test_a_file_that_holds_the_token_is_never_uploaded(hub: FakeHub, folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(f"my token: {TOKEN}\n".encode())
    with pytest.raises(ValueError, match="contains your Hub token") as raised:
        push(folder, REPOSITORY)
    assert TOKEN not in str(raised.value) and name in str(raised.value)
    assert hub.requests == []


def test_only_a_whole_export_is_pushed_to_a_repository_by_somebody_with_a_token(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("heads", "a/b/c", "zoe/", "zoe/with blank", ""):
        with pytest.raises(ValueError, match="write ORG/NAME"):
            push(folder, name)
    with monkeypatch.context() as patched:
        patched.setattr("trainer.export.upload.get_token", lambda: None)
        with pytest.raises(ValueError, match="run `hf auth login`, or set HF_TOKEN"):
            push(folder, REPOSITORY)
    (tmp_path / "secret.json").write_text("{}")
    (folder / "notes.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=r"notes\.json links out of its folder"):
        push(folder, REPOSITORY)
    (folder / "README.md").write_text("---\ntags:\n- medusa\n---\n")
    for other in (folder, folder / "nowhere"):
        with pytest.raises(ValueError, match="headstart export did not write"):
            push(other, REPOSITORY)
    assert hub.requests == []


# --- what lies next to the weights ------------------------------------------------------------------------------------


def test_an_export_carries_its_provenance_and_what_was_given_without_paths_and_secrets(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "medusa"
    random_heads().save_pretrained(run / "final")
    provenance = {
        "commit": "0123456789ab",
        "recipe": {"target": f"{tmp_path}/models/target", "output": str(run), "note": f"key {SECRET}"},
        "data": {f"{tmp_path}/data/train.jsonl": {"sha256": "ab", "rows": 3}},
        "target": {"name": f"{tmp_path}/models/target", "fingerprint": "feed"},
    }
    write_json(run / "final" / "provenance.json", provenance)
    mine = stored_fingerprint(run / "final")
    sample = {"setting": "greedy", "method": "plain", "task": None, "prompt": "my diagnosis", "pieces": [["?", False]]}
    measured = report_of(target="feed", heads=mine) | {"output": str(tmp_path), "samples": [sample]}
    report = write_json(run / "report.json", measured)
    summary = export(run, tmp_path / "out", "heads", report=report)
    names = ["README.md", "config.json", "model.safetensors", "provenance.json", "report.json"]
    assert sorted(summary.files) == names
    for name in names:
        content = (summary.folder / name).read_bytes()
        assert not any(private.encode() in content for private in (str(tmp_path), SECRET, "my diagnosis")), name
    export(tmp_path / "out", tmp_path / "again", "heads")
    assert (tmp_path / "again" / "provenance.json").read_text() == (tmp_path / "out" / "provenance.json").read_text()
