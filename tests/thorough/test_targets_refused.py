"""Targets that cannot be loaded: every command says in one sentence what is missing."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from decoding.model.loading import load_tokenizer
from trainer.cli import app
from trainer.terminal.exit_codes import ExitCode

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "any" / "medusa1.yaml"
OVERRIDES = "name=x target=TARGET data.train=rows.jsonl data.heldout=rows.jsonl data.max_length=64 output=out"
DIAGNOSE = "diagnose draft:draft --target TARGET --prompts rows.jsonl --max-new-tokens 4"
COMMANDS = (
    f"train {RECIPE} {OVERRIDES}",
    f"train {RECIPE} {OVERRIDES} --dry-run",
    "regenerate --target TARGET --prompts rows.jsonl --output out.jsonl",
    "realign --target TARGET --draft draft --prompts rows.jsonl --output out",
    "data inspect rows.jsonl --target TARGET",
    "generate --target TARGET --prompt a",
    "chat --target TARGET",
    "demo --target TARGET --port PORT",
    "evaluate --target TARGET --prompts rows.jsonl --output out",
    "plan --target TARGET --prompts rows.jsonl --output out --drafter lookup",
    "verify --target TARGET --prompts rows.jsonl",
    f"{DIAGNOSE} --endpoint http://127.0.0.1:9/v1 --model m",
    "doctor --target TARGET",
    "export draft exported --format draft --target TARGET",
)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def with_own_code(folder: Path) -> None:
    """Name classes as published models with their own code do; the code never runs here."""
    classes = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": classes}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "mine.py").write_text("raise SystemExit('code of a model was run')")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, "tokenizer.json"),
    "code of its own": (with_own_code, "--trust-remote-code"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    for name in ("draft", *FAULTS):
        tiny_model(vocab=128).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    for name, (spoil, _) in FAULTS.items():
        spoil(folder / name)
    rows = "".join(json.dumps({"prompt": f"{i}. How are you?", "answer": "Well."}) + "\n" for i in range(40))
    (folder / "rows.jsonl").write_text(rows)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_a_target_says_what_it_lacks(
    folder: Path, command: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, package in (("demo", "gradio"), ("--endpoint", "openai")):
        if part in command:
            pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as free:
        command = command.replace("PORT", str(free.getsockname()[1]))
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [word.replace("TARGET", fault) for word in command.split()])
    assert FAULTS[fault][1] in result.output and "code of a model was run" not in result.output
    if command.startswith("doctor"):  # it returns a report, in which this is a problem
        assert result.exit_code == ExitCode.FAILED
    else:
        assert result.exit_code == ExitCode.BAD_INPUT
        assert FAULTS[fault][1] in next(line for line in result.stderr.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "llama"])
def test_no_family_gets_an_empty_tokenizer(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
