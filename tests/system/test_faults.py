"""Kills: a run goes on as if nothing had happened."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from whole_runs import DIRECT, ROOT, checkpoint_steps, finish, losses, repeated, run, write_recipe, write_workshop

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
