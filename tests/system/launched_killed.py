"""Run scripts/train.py as a process that torchrun restarts: the first two attempts end by kill -9, and the third
succeeds. In the first attempt the second process dies after step 3, which no checkpoint contains. In the second attempt
the first process dies in the middle of a checkpoint, whose weights are written but whose state is not.

Usage, under torchrun --max-restarts 2: launched_killed.py RECIPE [section.key=value ...]
"""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from tiny_training import await_file

import trainer.run.checkpoint
from trainer.run.checkpoint import Progress
from trainer.run.log import Log

ATTEMPT, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
note_step, save_file = Log.step, trainer.run.checkpoint.save_file


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_step_3(self: Log, progress: Progress, figures: dict[str, float], *times: Any) -> None:
    note_step(self, progress, figures, *times)
    if progress.step == 3 and (ATTEMPT, RANK) == (0, 1):
        await_file(self._file.parent / "checkpoints" / "step-00000002")  # written by a thread of the first process
        die()


def die_amid_a_checkpoint(tensors: Any, file: Path) -> None:
    save_file(tensors, file)
    if ATTEMPT == 1:
        die()


if __name__ == "__main__":
    Log.step = die_after_step_3  # type: ignore[method-assign]
    trainer.run.checkpoint.save_file = die_amid_a_checkpoint
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"), run_name="__main__")
