"""Stored files cannot permit code to run; only the flag of the running command can."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from tiny_training import recipe_content, write_rows
from typer.testing import CliRunner

from decoding.files.fingerprint import stored_fingerprint
from trainer.cli import app
from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe
from trainer.terminal.exit_codes import ExitCode

CLASS = """
class {name}({base}):
    model_type = "mine"
    def __init__(self, *args, **given):
        __import__("pathlib").Path({marker!r}).touch()
        super().__init__(*args, **given)
"""
GENERATE = "generate --prompt a --max-new-tokens 4"
WITH = "--target good --prompts rows.jsonl"
STORED = (
    "export heads-stopped out --format heads",
    "export heads/checkpoints/step-00000002 out --format heads",
    "export heads/final out --format heads",
    "export draft-stopped out --format draft",
    "export draft/final out --format draft",
    "export draft/final out --format gguf",
    f"{GENERATE} --target good --drafter draft:attacker",
    f"{GENERATE} --target good --drafter cascade:good,small=attacker",
    f"{GENERATE} --target good --plan plan.json",
    f"{GENERATE} --target adapters",
    f"{GENERATE} --target pickled",
    "chat --target good --drafter draft:adapters",
    f"evaluate {WITH} --drafter draft:attacker --output out",
    f"plan {WITH} --drafter draft:attacker --output out",
    f"verify {WITH} --drafter other-tokenizer:attacker --draws 9 --limit 2",
    f"verify {WITH} --drafter heads:heads/final --draws 9 --limit 2",
    f"regenerate {WITH} --drafter draft:draft/final --output out.jsonl",
    f"realign {WITH} --draft attacker --output out",
    f"realign {WITH} --max-new-tokens 8 --steps 2 --draft draft/final --output out",
    f"diagnose draft:attacker {WITH} --max-new-tokens 4",
    f"diagnose heads/final {WITH} --max-new-tokens 4",
    "doctor --target good --drafter draft:attacker",
    "doctor --target good --drafter cascade:good,small=attacker",
    "doctor --target good --drafter heads:heads/final",
)


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("mark"),)


def write_attacker(folder: Path, marker: Path) -> None:
    """Write a model and a tokenizer with their own classes, which leave a mark when they are created."""
    names = {"MyConfig": "LlamaConfig", "MyTokenizer": "PreTrainedTokenizerFast"}
    code = "".join(CLASS.format(name=name, base=base, marker=str(marker)) for name, base in names.items())
    code += "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    (folder / "mine.py").write_text(f"from transformers import LlamaForCausalLM, {', '.join(names.values())}\n{code}")
    models = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    tokenizers = {"AutoTokenizer": [None, "mine.MyTokenizer"]}
    own = {"config.json": {"model_type": "mine", "auto_map": models}}
    own["tokenizer_config.json"] = {"tokenizer_class": "MyTokenizer", "auto_map": tokenizers}
    for name, more in own.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **more}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make runs by recipes that permit code, and a draft, adapters and a plan by other people."""
    folder = tmp_path_factory.mktemp("stored")
    rows = [{"text": f"{index}. Why is the sky blue?"} for index in range(40)]
    write_rows(folder / "rows.jsonl", [{"prompt": row["text"]} for row in rows])
    for name in ("train", "heldout"):
        write_rows(folder / f"{name}.jsonl", rows)
    model = tiny_model(vocab=128)
    for name in ("good", "attacker"):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    write_attacker(folder / "attacker", folder / "mark")
    of_attacker = {"init": {"from_model": str(folder / "attacker")}}
    for name, kind, target, more in (
        ("heads", "medusa", "attacker", {}),
        ("draft", "draft", "good", {"draft": of_attacker}),
    ):
        content = recipe_content(folder, kind, steps=2, batch_size=2, micro_batch_size=2) | more
        content |= {"output": str(folder / name), "target": str(folder / target), "trust_remote_code": True}
        AcceleratorState._reset_state(True)
        run_recipe(parse_recipe(content))
        shutil.copytree(folder / name / "checkpoints", folder / f"{name}-stopped" / "checkpoints")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, base in (("adapters", "attacker"), ("pickled", "good")):
        adapted.peft_config["default"].base_model_name_or_path = str(folder / base)
        adapted.save_pretrained(folder / name)
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "other.safetensors")
    (folder / "pickled" / "adapter_model.bin").write_bytes(pickle.dumps({"weight": _Evil()}))
    plan: dict[str, Any] = {name: {} for name in ("curves", "hardware", "temperature")}
    plan |= {"format": "headstart plan 1", "dtype": "bfloat16", "cells": [], "drafters": []}
    plan["fingerprints"] = {"target": stored_fingerprint(folder / "good"), "drafters": {"draft:attacker": ""}}
    (folder / "plan.json").write_text(json.dumps(plan))
    yield folder
    AcceleratorState._reset_state(True)


def marked_by(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Run a command in the folder; return whether stored code ran, and the exit code."""
    monkeypatch.chdir(folder)
    for left in ("mark", "out.jsonl"):
        (folder / left).unlink(missing_ok=True)
    shutil.rmtree(folder / "out", ignore_errors=True)
    result = CliRunner().invoke(app, command.split())
    return (folder / "mark").exists(), result.exit_code


@pytest.mark.parametrize("command", STORED)
def test_nothing_that_is_stored_permits_code(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, code = marked_by(command, folder, monkeypatch)
    assert not ran and code in (ExitCode.DONE, ExitCode.FAILED, ExitCode.BAD_INPUT)


@pytest.mark.parametrize("command", [STORED[0], STORED[6], STORED[9]])
def test_the_flag_of_the_command_does(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert marked_by(f"{command} --trust-remote-code", folder, monkeypatch) == (True, ExitCode.DONE)
