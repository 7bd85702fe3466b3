"""Resumable state: the trained weights, the optimizer's, and the step. Safetensors and JSON only.

A checkpoint is written beside the others under a temporary name and renamed when it is whole and on the disk, so a
kill or a full disk in the middle costs that checkpoint alone. The order of data, the learning rate and the random
state are functions of the step, so nothing else needs saving. Its tensors are whole and go by the parameters' names
(see `state`), so it does not depend on how many processes wrote it, nor on how they were launched.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decoding.machine import commit, versions
from trainer.folders import write_folder
from trainer.state import Tensors

_STATE, _WEIGHTS, _OPTIMIZER = "state.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, and trained tokens seen by all processes."""

    step: int
    tokens: int


class Saved(NamedTuple):
    """What a checkpoint holds: progress, weights by name, and the optimizers' state by ``{parameter} {name}``."""

    progress: Progress
    weights: Tensors
    moments: Tensors


class Checkpoints:
    """The checkpoints of one run, newest last. ``identity`` ties them to a recipe: another one cannot resume them."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        self._folder = folder
        self._keep = keep
        self._identity = json.loads(json.dumps(identity))
        self._made_by = {"commit": commit(), "versions": versions()}

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def steps(self) -> list[int]:
        """Of the checkpoints there are."""
        return [int(folder.name.removeprefix("step-")) for folder in self._all()]

    def save(self, saved: Saved) -> None:
        """Write a checkpoint and drop the oldest; raises OSError with the last good one untouched.

        What a kill left half written goes too, and so do checkpoints of later steps: loading passed them over.
        """
        progress = saved.progress
        newest = self._folder / f"step-{progress.step:08d}"
        for left_behind in self._folder.glob(".step-*"):
            shutil.rmtree(left_behind, ignore_errors=True)

        def write(folder: Path) -> None:
            save_file(saved.weights, folder / _WEIGHTS)
            save_file(saved.moments, folder / _OPTIMIZER)
            state = {"step": progress.step, "tokens": progress.tokens, "identity": self._identity, **self._made_by}
            (folder / _STATE).write_text(json.dumps(state, indent=2))

        try:
            write_folder(newest, write)
        except OSError as error:
            last = self._all()[-1:]
            raise OSError(
                f"the checkpoint of step {progress.step} could not be written ({error}); "
                + (f"the last good one is {last[0]}" if last else "there is none before it")
                + ": make room and start again to resume"
            ) from error
        up_to_now = [folder for folder in self._all() if folder <= newest]
        for folder in self._all():
            if folder not in up_to_now[-self._keep :]:
                shutil.rmtree(folder, ignore_errors=True)

    def latest(self) -> Saved | None:
        """The newest readable checkpoint; None if there is none. A damaged one is passed over.

        Raises ValueError if it was made by another recipe.
        """
        for folder in reversed(self._all()):
            try:
                identity, progress = _read_state(folder / _STATE)
                weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER)
            except (OSError, ValueError, SafetensorError):
                continue
            changed = sorted(key for key in self._identity if identity.get(key) != self._identity[key])
            if changed:
                raise ValueError(
                    f"{folder} was made by a recipe with another {', '.join(changed)}: "
                    "give the recipe another output folder, or delete this one to start over"
                )
            return Saved(progress, weights, moments)
        return None


def _read_state(path: Path) -> tuple[dict[str, Any], Progress]:
    """The identity and the progress in a checkpoint's state.json; ValueError if it holds anything else."""
    match json.loads(path.read_text()):
        case {"identity": dict() as identity, "step": int() as step, "tokens": int() as tokens}:
            return identity, Progress(step, tokens)
    raise ValueError(f"{path} is no checkpoint's state")
