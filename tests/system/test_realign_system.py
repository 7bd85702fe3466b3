"""`headstart realign` as it is typed: killed in the middle, typed again, and the draft it leaves is decoded with."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_realign import write_workshop
from whole_runs import ROOT, environment, losses, run, running, wait_until

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, decode
from decoding.loading import load_draft, load_model, load_tokenizer
from decoding.target import CausalLM

pytestmark = pytest.mark.system

REALIGN = [sys.executable, "-c", "from trainer.cli import main; main()", "realign"]
STEPS = 30


def command(workshop: Path, output: str) -> list[str]:
    words = ["--target", "tuned", "--draft", "stale", "--prompts", "prompts.jsonl", "--output", output]
    words += ["--max-new-tokens", "12", "--steps", str(STEPS), "--learning-rate", "0.1", "--dtype", "fp32"]
    return [*REALIGN, *words]


def report(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "realigned.json").read_text())
    return content


def test_a_killed_realignment_typed_again_ends_with_the_draft_of_one_that_was_not(tmp_path: Path) -> None:
    """Killed among the steps of the training, past its first checkpoint."""
    workshop = write_workshop(tmp_path)
    path = {"PYTHONPATH": str(ROOT)}
    said = run(command(workshop, "whole"), workshop, **path)
    assert "realigned" in said and "accepted per drafted" in said
    killed = workshop / "killed"
    with running(command(workshop, "killed"), workshop, {**environment(), **path}) as process:
        wait_until(lambda: (killed / "checkpoints" / "step-00000003").exists(), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "final").exists() and not (killed / "realigned.json").exists()
    run(command(workshop, "killed"), workshop, **path)
    ours, theirs = (load_file(workshop / name / "final" / "model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert report(killed)["after"] == report(workshop / "whole")["after"]
    assert losses(killed) == losses(workshop / "whole") and len(losses(killed)) == STEPS

    target = CausalLM(load_model(str(workshop / "tuned"), torch.float32, torch.device("cpu")))
    draft = load_draft(str(killed / "final"), target, load_tokenizer(str(workshop / "tuned")))
    config = DecodingConfig(max_new_tokens=11)
    drafted = decode(target, DraftModelDrafter(draft, (1, 1, 1, 1)), [4, 6], config)
    assert drafted.tokens == decode(target, None, [4, 6], config).tokens == (8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12)
    assert [step.accepted for step in drafted.steps] == [0, 4, 4]
