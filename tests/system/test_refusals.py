"""An error in one of several processes ends all processes, and no process waits for the one that failed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from launched_refusals import PLACES, prepare
from safetensors.torch import load_file
from whole_runs import (
    DIRECT,
    ROOT,
    TORCHRUN,
    checkpoint_steps,
    finish,
    losses,
    repeated,
    run,
    write_recipe,
    write_workshop,
)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    for name in PLACES:
        prepare(folder / name)
    script = str(ROOT / "tests" / "system" / "launched_refusals.py")
    run([*TORCHRUN, "--standalone", "--nproc_per_node", "2", script, str(folder), *PLACES], folder)
    return folder


@pytest.mark.parametrize("name", PLACES)
def test_a_refusal_of_one_process_is_an_error_on_both(refused: Path, name: str) -> None:
    place = PLACES[name]
    own, other = (json.loads((refused / f"{name}-{rank}.json").read_text()) for rank in (place.rank, 1 - place.rank))
    assert own["type"] == place.error.__name__ and "planted" in own["message"]
    assert other["type"] == "UserError" and "another process failed" in other["message"]
    if place.slow:
        assert own["kept"] == other["kept"] == ["step-00000005"], "a launcher would kill the process that still writes"


def test_a_process_that_works_for_long_is_waited_for_as_long_as_it_gives_signs(tmp_path: Path) -> None:
    """Here each process waits for two seconds, and one works for four."""
    script = str(ROOT / "tests" / "system" / "launched_patience.py")
    run([*TORCHRUN, "--standalone", "--nproc_per_node", "2", script, str(tmp_path)], tmp_path)
    quick, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert quick == ["done", "given up"] and slow[0] == "done"


# --- kills: a run goes on as if nothing had happened ------------------------------------------------------------------


KILLS = 6
STEPS = 40
EVERY = 4  # steps between checkpoints, so that six kills hardly ever all come right after a checkpoint


def test_a_run_killed_six_times_equals_the_one_that_was_never_killed(tmp_path: Path) -> None:
    """The loss of every step, including repeated steps, and the final weights are equal bit by bit."""
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
    assert again  # kills cost steps, which were repeated
    ours, theirs = (load_file(output / "final" / "model.safetensors") for output in (whole, killed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoint_steps(killed) == checkpoint_steps(whole) == [STEPS - EVERY, STEPS]
    assert not list((killed / "checkpoints").glob(".*")) and not list(killed.glob(".*"))
