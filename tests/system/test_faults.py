"""Kills, damage and a second run: a run goes on as if nothing had happened, or says in a sentence why it does not."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import (
    DEADLINE,
    DIRECT,
    ROOT,
    TWO_PROCESSES,
    checkpoint_steps,
    finish,
    kill_group,
    losses,
    repeated,
    run,
    running,
    steps_done,
    wait_until,
    write_recipe,
    write_workshop,
)

KILLS = 6
STEPS = 40
EVERY = 4  # steps between checkpoints: of six kills, hardly ever all fall right behind one


def test_a_run_killed_six_times_equals_the_one_that_was_never_killed(tmp_path: Path) -> None:
    """Bit by bit: every step's loss, those done again included, and the weights at the end."""
    workshop = write_workshop(tmp_path)
    whole, killed = workshop / "whole", workshop / "killed"
    recipes = [write_recipe(workshop, "medusa", output, steps=STEPS, every=EVERY) for output in (whole, killed)]
    run([*DIRECT, recipes[0]], workshop)
    program = [sys.executable, str(ROOT / "tests" / "system" / "killed_often.py"), recipes[1], str(killed)]
    done = finish([*program, str(KILLS), "7"], workshop)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.split()) == KILLS
    assert list(losses(whole)) == list(range(1, STEPS + 1)) and losses(killed) == losses(whole)
    again = [line["step"] for line in repeated(killed) if "loss" in line]
    assert again  # kills did cost steps, which were done again
    ours, theirs = (load_file(output / "final" / "model.safetensors") for output in (whole, killed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoint_steps(killed) == checkpoint_steps(whole) == [STEPS - EVERY, STEPS]
    assert not list((killed / "checkpoints").glob(".*")) and not list(killed.glob(".*"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run stopped between its checkpoints, launched once, with a copy beside it; and its recipe."""
    workshop = write_workshop(tmp_path_factory.mktemp("stopped"))
    output = workshop / "run"
    recipe = write_recipe(workshop, "medusa", output, every=2, steps=12)
    with running([*DIRECT, recipe, "evaluation.every=7", "evaluation.max_new_tokens=90"], workshop) as process:
        wait_until(lambda: steps_done(output) >= 7, process)
        kill_group(process)
    shutil.copytree(output, workshop / "as it was stopped")
    return output, recipe


@pytest.fixture
def begun(stopped: tuple[Path, str]) -> tuple[Path, str]:
    """The stopped run and its recipe, with nothing left of the test before."""
    output, recipe = stopped
    shutil.rmtree(output)
    shutil.copytree(output.parent / "as it was stopped", output)
    return output, recipe


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error that ended a program with 2; the announcements before it are left out."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr.splitlines()[-1]


def test_a_run_with_nothing_but_damaged_checkpoints_exits_2_and_keeps_them(begun: tuple[Path, str]) -> None:
    output, recipe = begun
    for weights in output.glob("checkpoints/*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:50])
    kept, lines = checkpoint_steps(output), (output / "metrics.jsonl").read_text()
    said = one_line(finish([*DIRECT, recipe], output.parent))
    assert said.startswith("error: none of the 2 checkpoints can be read: ") and len(kept) == 2
    assert said.count("(weights.safetensors is damaged: its 50 bytes have another checksum)") == 2
    assert checkpoint_steps(output) == kept and (output / "metrics.jsonl").read_text() == lines


def test_a_second_run_in_the_same_folder_exits_2_and_leaves_the_first_alone(begun: tuple[Path, str]) -> None:
    output, recipe = begun
    with running([*DIRECT, recipe, "training.steps=12"], output.parent) as first:
        wait_until(lambda: f'"process": {first.pid},' in (output / "run.lock").read_text(), first)
        os.kill(first.pid, signal.SIGSTOP)
        said = one_line(finish([*DIRECT, recipe], output.parent))
        assert said.startswith(f"error: {output} is being written by process {first.pid} on ")
        together = finish([*TWO_PROCESSES, recipe, "training.micro_batch_size=4"], output.parent)
        assert together.returncode != 0 and f"is being written by process {first.pid} on " in together.stderr
        os.kill(first.pid, signal.SIGCONT)
        first.communicate(timeout=DEADLINE)
    assert first.returncode == 0 and list(losses(output)) == list(range(1, 13))


def test_a_run_that_loses_its_weights_exits_2_and_goes_on_from_before_with_another_rate(
    begun: tuple[Path, str],
) -> None:
    output, recipe = begun
    said = one_line(finish([*DIRECT, recipe, "training.learning_rate=1e38"], output.parent))
    assert "not finite" in said or " is nan at step " in said
    assert f"the last good checkpoint, {output}/checkpoints/step-00000006, is kept. To resume, lower training." in said
    assert not (output / "final").exists()
    assert "tiny medusa: resuming from step 6 of 12" in run([*DIRECT, recipe], output.parent)
    assert one_line(finish([*DIRECT, recipe, "training.learning_rate=.inf"], output.parent)).endswith(
        "training.learning_rate: Input should be a finite number (got inf)"
    )
