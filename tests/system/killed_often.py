"""Runs scripts/train.py repeatedly, kills it at random moments, and finally lets it finish.

Usage: killed_often.py RECIPE OUTPUT KILLS SEED. Every run is a fork of this process, which has imported everything
once, so that no run waits for its imports. Prints the step that each run reached.
"""

import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

from whole_runs import SCRIPT, steps_done

import trainer.run.train  # noqa: F401  # imported for all lives


def begin(recipe: str) -> int:
    """Start a run; return its process id."""
    process = os.fork()
    if process:
        return process
    sys.argv = [SCRIPT, recipe]
    code = 1
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def ended(process: int) -> bool:
    return os.waitpid(process, os.WNOHANG) != (0, 0)


def kill_somewhere(process: int, output: Path, chance: random.Random, step_seconds: float) -> bool:
    """Kill a run some steps later, at a random moment of a step, perhaps during a checkpoint;
    return False if it ended.
    """
    until = steps_done(output) + chance.randrange(5)
    begun = time.monotonic()
    while steps_done(output) < until or not (output / "metrics.jsonl").exists():
        if ended(process):
            return False
        assert time.monotonic() - begun < 60, "a life made no progress"
        time.sleep(0.001)
    time.sleep(chance.random() * step_seconds)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def main(recipe: str, output: Path, kills: int, seed: int) -> int:
    chance = random.Random(seed)
    for _ in range(kills):
        if not kill_somewhere(begin(recipe), output, chance, step_seconds=0.05):
            print("it ended before it was killed often enough")
            return 1
        print(steps_done(output), end=" ", flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(begin(recipe), 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
