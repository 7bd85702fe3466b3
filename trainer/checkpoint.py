"""Resumable state: the trained weights, the optimizer's, and the step. Safetensors and JSON only.

A checkpoint is written beside the others under a temporary name and renamed when it is whole and on the disk, so a
kill or a full disk in the middle costs that checkpoint alone. The order of data, the learning rate and the random
state are functions of the step, so nothing else needs saving.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from decoding.machine import commit, versions
from trainer.folders import write_folder

_STATE, _WEIGHTS, _OPTIMIZER = "state.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, and trained tokens seen by all processes."""

    step: int
    tokens: int


class Checkpoints:
    """The checkpoints of one run, newest last. ``identity`` ties them to a recipe: another one cannot resume them."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        self._folder = folder
        self._keep = keep
        self._identity = json.loads(json.dumps(identity))
        self._made_by = {"commit": commit(), "versions": versions()}

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def save(self, module: nn.Module, optimizers: Sequence[Optimizer], progress: Progress) -> None:
        """Write a checkpoint and drop the oldest; raises OSError with the last good one untouched.

        What a kill left half written goes too, and so do checkpoints of later steps: loading passed them over.
        """
        newest = self._folder / f"step-{progress.step:08d}"
        for left_behind in self._folder.glob(".step-*"):
            shutil.rmtree(left_behind, ignore_errors=True)

        def write(folder: Path) -> None:
            save_file(_contiguous(module.state_dict()), folder / _WEIGHTS)
            save_file(_optimizer_tensors(optimizers), folder / _OPTIMIZER)
            state = {"step": progress.step, "tokens": progress.tokens, "identity": self._identity, **self._made_by}
            (folder / _STATE).write_text(json.dumps(state, indent=2))

        try:
            write_folder(newest, write)
        except (OSError, SafetensorError) as error:
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

    def load_latest(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Progress | None:
        """Load the newest readable checkpoint into all of them; None if there is none. A damaged one is passed over."""
        for folder in reversed(self._all()):
            try:
                state = json.loads((folder / _STATE).read_text())
                weights = load_file(folder / _WEIGHTS)
                tensors = load_file(folder / _OPTIMIZER)
                identity, progress = state["identity"], Progress(state["step"], state["tokens"])
            except (OSError, ValueError, KeyError, SafetensorError):
                continue
            changed = sorted(key for key in self._identity if identity.get(key) != self._identity[key])
            if changed:
                raise ValueError(
                    f"{folder} was made by a recipe with another {', '.join(changed)}: "
                    "give the recipe another output folder, or delete this one to start over"
                )
            module.load_state_dict(_with_tied(weights, module))
            _load_optimizers(optimizers, tensors)
            return progress
        return None


def _contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: on the host, contiguous, and those that share memory (tied) once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _with_tied(weights: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Give tied parameters, stored once, their other names back."""
    by_pointer = {tensor.data_ptr(): weights[name] for name, tensor in module.state_dict().items() if name in weights}
    return {name: by_pointer[tensor.data_ptr()] for name, tensor in module.state_dict().items()}


def _optimizer_tensors(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as ``{optimizer}.{parameter}.{name}``; numbers become tensors."""
    return {
        f"{position}.{index}.{name}": torch.as_tensor(value).detach().cpu().contiguous()
        for position, optimizer in enumerate(optimizers)
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def _load_optimizers(optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]) -> None:
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, tensor in tensors.items():
        position, index, name = key.split(".", 2)
        states[int(position)].setdefault(int(index), {})[name] = tensor
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
