"""`headstart realign` as it is typed: killed in the middle, typed again, and the draft it leaves is decoded with."""

import json
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from test_realign import STALE, options, write_workshop
from test_realign import run as realign
from whole_runs import HEADSTART, losses, run, running, wait_until

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft, load_model, load_tokenizer

STEPS = 30


def command(output: str) -> list[str]:
    words = ["--target", "tuned", "--draft", STALE, "--prompts", "prompts.jsonl", "--output", output]
    words += ["--max-new-tokens", "12", "--steps", str(STEPS), "training.learning_rate=0.1", "dtype=fp32"]
    return [*HEADSTART, "realign", *words]


def test_a_killed_realignment_typed_again_ends_with_the_draft_of_one_that_was_not(tmp_path: Path) -> None:
    """Killed among the steps of the training, past its first checkpoint; the other one is done in this process."""
    workshop = write_workshop(tmp_path)
    whole = realign(options(workshop, output=workshop / "whole", steps=STEPS))
    killed = workshop / "killed"
    with running(command("killed"), workshop) as process:
        wait_until(lambda: (killed / "checkpoints" / "step-00000003").exists(), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "final").exists() and not (killed / "realigned.json").exists()
    said = run(command("killed"), workshop)
    assert "realigned draft: step 30" in said and "accepted/drafted" in said
    ours, theirs = (load_file(workshop / name / "final" / "model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    report = json.loads((killed / "realigned.json").read_text())
    assert (report["before"], report["after"]) == (whole["before"], whole["after"])
    assert losses(killed) == losses(workshop / "whole") and len(losses(killed)) == STEPS

    target = CausalLM(load_model(str(workshop / "tuned"), torch.float32, torch.device("cpu")))
    draft = load_draft(str(killed / "final"), target, load_tokenizer(str(workshop / "tuned")))
    config = DecodingConfig(max_new_tokens=11)
    drafted = Engine(target, DraftModelDrafter(draft, 4)).decode([4, 5, 6], config)
    assert drafted.tokens == Engine(target).decode([4, 5, 6], config).tokens == (8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12)
    assert len(drafted.steps) < 6  # a prefill and, drafting nothing, ten passes
