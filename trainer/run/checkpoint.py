"""Resumable state: the trained weights, the optimizer's, and the step. Safetensors and JSON only.

A checkpoint is written beside the others under a temporary name and renamed when it is whole and on the disk, so a
kill or a full disk in the middle costs that checkpoint alone. The order of data, the learning rate and the random
state are functions of the step, so nothing else needs saving. Its tensors are whole and named by parameter (see
`state`), so it depends neither on the number of processes that wrote it nor on their launcher.

Each file has a checksum. A checkpoint that cannot be read is named, passed over and never deleted: the disk may have
failed for a moment only.
"""

import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decoding.measure.machine import commit, versions
from decoding.model.stored import non_finite
from trainer.files.folders import check_seal, write_folder
from trainer.run.state import Tensors

_STATE, _WEIGHTS, _OPTIMIZER, _BEST = "state.json", "weights.safetensors", "optimizer.safetensors", "best.safetensors"
_NAME = re.compile(r"step-\d{8,}")
_ASIDE = "unreadable-"
"""Prefix for the folder of a checkpoint that could not be read, once the run has gone on without it."""


# --- the settings of a run that is started again ----------------------------------------------------------------------

_ALWAYS = (
    *("name", "output", "tracking", "checkpoint", "draft.check_costs"),  # the weights do not depend on them
    *("launch", "training.micro_batch_size", "evaluation.batch_size"),
    *("heads.tree_nodes", "draft.dspark.tree_nodes"),  # apply where the artefact is written anew
)
"""Settings that may always differ: they change nothing but rounding, or they take effect in a finished run too."""
_WHILE_TRAINING = ("training.learning_rate", "training.mixed_precision")
"""Settings that may differ while there are steps to come; the provenance keeps the steps of each value."""
_CHOOSING = ("evaluation", "held-out data")
"""Settings that bind a run whose evaluations choose its weights."""


class Change(NamedTuple):
    """A setting by its name, with its recorded value and its value now: ``training.steps (8, now 12)``."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """Return the name, with the values of a setting of the recipe that is no section."""
        lone = "." in self.name and not isinstance(self.before, dict | list) and not isinstance(self.now, dict | list)
        return f"{self.name} ({_shown(self.before)}, now {_shown(self.now)})" if lone else self.name


class Changes(NamedTuple):
    """The settings that differ and may not, and those that may."""

    refused: list[Change]
    allowed: list[Change]


def compare(recorded: Mapping[str, Any], now: Mapping[str, Any], finished: bool = False) -> Changes:
    """Compare the settings of now with the recorded ones, as `trainer.job.Job.identity` has them.

    ``finished``: no step is left to train.
    """
    decides = any((settings.get("evaluation") or {}).get("keep") == "best" for settings in (recorded, now))
    found = list(_differing(recorded, now))
    refused = [change for change in found if _binds(change.name, finished, decides)]
    return Changes(refused, [change for change in found if change not in refused])


def bound(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings that may not differ in a finished run whose evaluations choose its weights."""
    return {
        name: bound(value, f"{section}{name}.") if isinstance(value, dict) else value
        for name, value in settings.items()
        if not _is_in(_ALWAYS, f"{section}{name}")
    }


def _binds(name: str, finished: bool, decides: bool) -> bool:
    if _is_in(_ALWAYS, name):
        return False
    if _is_in(_WHILE_TRAINING, name):
        return finished
    return decides or not _is_in(_CHOOSING, name)


def _is_in(names: tuple[str, ...], name: str) -> bool:
    """Return True for a name of the list, and for a setting of a section in it."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[Change]:
    for key, value in sorted(now.items()):
        old, name = before.get(key), f"{section}{key}"
        if isinstance(value, dict) and isinstance(old, dict):
            yield from _differing(old, value, f"{name}.")
        elif old != value:
            yield Change(name, old, value)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Progress of a run: optimizer steps done, and trained tokens seen by all processes."""

    step: int
    tokens: int


class Best(NamedTuple):
    """The weights with the highest held-out figure so far, of all evaluations in one order."""

    progress: Progress
    figure: float
    weights: Tensors


class Saved(NamedTuple):
    """Content of a checkpoint: progress, weights by name, and the optimizers' state by ``{parameter} {name}``."""

    progress: Progress
    weights: Tensors
    moments: Tensors

    def non_finite(self) -> list[str]:
        """Return the names of weights and moments that hold a NaN or an infinity."""
        return non_finite({**self.weights, **self.moments})


class Checkpoints:
    """The checkpoints of one run, newest last. ``identity`` ties them to a recipe, by `compare`.

    ``settings``: those that change the figures of a step, and may change where a run goes on; `stretches` lists them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        identity: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        """``made_by``: the run's recipe and launch as JSON values, from which `read_apart` makes an artefact."""
        self._folder = folder
        self._keep = keep
        self._identity = json.loads(json.dumps(dict(identity)))
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._made_by = {**(made_by or {}), "commit": commit(), "versions": versions()}
        self.stretches: list[dict[str, Any]] = [{"first_step": 0, **self._settings}]
        """The settings of each stretch of steps and the first step, from 0, that was trained by them."""
        self.unreadable: dict[Path, str] = {}
        """The checkpoints that `latest` passed over, newest first, with the reasons."""
        self.changes: list[Change] = []
        """The settings that are not those of the checkpoint that `latest` returned, and need not be."""
        self.best: Best | None = None
        """The best weights so far, a part of the state: `latest` and `read` set it, and `save` writes it."""
        self._recorded = self._identity

    def _all(self) -> list[Path]:
        return sorted(folder for folder in self._folder.glob("step-*") if _NAME.fullmatch(folder.name))

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints there are, in increasing order."""
        return [int(folder.name.removeprefix("step-")) for folder in self._all()]

    def last_good(self) -> str:
        """Name the newest checkpoint that was read or written, for a message."""
        good = [folder for folder in self._all() if folder not in self.unreadable]
        return f"the last good checkpoint, {good[-1]}, is kept" if good else "there is no checkpoint before it"

    def save(self, saved: Saved) -> None:
        """Write a checkpoint and drop the oldest; raises OSError with the last good one untouched.

        Half-written folders of a kill are removed too. Checkpoints that `latest` passed over are renamed.
        """
        progress = saved.progress
        newest = self._folder / f"step-{progress.step:08d}"
        for left_behind in self._folder.glob(".step-*"):
            shutil.rmtree(left_behind, ignore_errors=True)

        def write(folder: Path) -> None:
            save_file(saved.weights, folder / _WEIGHTS)
            save_file(saved.moments, folder / _OPTIMIZER)
            state = {"step": progress.step, "tokens": progress.tokens, "identity": self._identity, **self._made_by}
            if self.best is not None:
                save_file(self.best.weights, folder / _BEST)
                state["best"] = {**vars(self.best.progress), "figure": self.best.figure}
            (folder / _STATE).write_text(json.dumps({**state, "stretches": self.stretches}, indent=2))

        try:
            self._set_aside(newest)
            write_folder(newest, write, sealed=True)
        except OSError as error:
            remedy = "make room" if error.errno in (None, errno.ENOSPC, errno.EDQUOT) else "see to the folder"
            raise OSError(
                f"the checkpoint of step {progress.step} could not be written ({error}); {self.last_good()}: "
                f"{remedy} and start again to resume"
            ) from error
        for folder in self._all()[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _set_aside(self, newest: Path) -> None:
        """Rename the checkpoints that were passed over, and those of later steps than the run has reached."""
        for folder in self._all():
            if folder > newest or folder in self.unreadable:
                others = len([*folder.parent.glob(f"{_ASIDE}{folder.name}*")])
                folder.rename(folder.with_name(f"{_ASIDE}{folder.name}{f'-{others + 1}' if others else ''}"))
        self.unreadable = {}

    def read(self, step: int) -> Saved:
        """Return the checkpoint of a step that another process has verified."""
        folder = self._folder / f"step-{step:08d}"
        state, saved = _read(folder, verify=False)
        self.best = _read_best(folder, state)
        return saved

    def latest(self) -> Saved | None:
        """Return the newest readable checkpoint; None if there is none. Those that cannot be read go to `unreadable`.

        Raises ValueError if it was made by another recipe, and if there are checkpoints but none can be read.
        """
        self.unreadable = {}
        for folder in reversed(self._all()):
            try:
                state, saved = _read(folder)
                self.best = _read_best(folder, state)
            except (OSError, ValueError, SafetensorError) as error:
                self.unreadable[folder] = " ".join(str(error).split()) or type(error).__name__
                continue
            self._recorded = state["identity"]
            self.changes = self._allowed(f"{folder} was made by a recipe")
            self.stretches = _continued(state["stretches"], saved.progress.step, self._settings)
            return saved
        if self.unreadable:
            listed = "; ".join(f"{folder} ({reason})" for folder, reason in self.unreadable.items())
            raise ValueError(
                f"none of the {len(self.unreadable)} checkpoints can be read: {listed}. Nothing was changed: start "
                "again if the disk failed for a moment, else copy them back from where they are whole; to start over, "
                f"give the recipe another output folder or remove {self._folder}"
            )
        return None

    def check_finished(self) -> None:
        """Raise ValueError if a run of which no step is left to train has other settings now, which nothing follows."""
        self._allowed(f"the run in {self._folder.parent} is finished,", finished=True)

    def _allowed(self, whose: str, finished: bool = False) -> list[Change]:
        refused, allowed = compare(self._recorded, self._identity, finished)
        if refused:
            raise ValueError(
                f"{whose} with another {', '.join(map(str, refused))}: give the recipe another output folder, or "
                f"remove {self._folder} to start over"
            )
        return allowed


def newest_checkpoint(folder: Path) -> Path | None:
    """Return ``folder`` if it is a checkpoint, else the newest in it; None if it holds none."""
    if (folder / _STATE).is_file() and (folder / _WEIGHTS).is_file():
        return folder
    return max((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), default=None)


def read_apart(folder: Path) -> tuple[dict[str, Any], Saved]:
    """Read a checkpoint without its run, and without moments; return what state.json holds, and the weights.

    ValueError if any of it is damaged, or if it does not hold the recipe and launch that it was made by.
    """
    try:
        state, saved = _read(folder, moments=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the checkpoint {folder} cannot be read ({error}): give another") from error
    if not all(isinstance(state.get(name), dict) for name in ("recipe", "launch")):
        raise ValueError(f"{folder / _STATE} holds no recipe: resume the run, and export what it finishes")
    return state, saved


def _read(folder: Path, verify: bool = True, moments: bool = True) -> tuple[dict[str, Any], Saved]:
    """Read what state.json holds, and the state; ValueError or OSError if any of it is damaged."""
    if verify:
        check_seal(folder)
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    match state:
        case {"identity": dict(), "stretches": [*_], "step": int() as step, "tokens": int() as tokens}:
            progress = Progress(step, tokens)
        case _:
            raise ValueError(f"{_STATE} holds no checkpoint's state")
    saved = Saved(progress, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER) if moments else {})
    if verify and (broken := saved.non_finite()):
        raise ValueError(f"{broken[0]} holds values that are not finite")
    return state, saved


def _read_best(folder: Path, state: Mapping[str, Any]) -> Best | None:
    best = state.get("best")
    return best and Best(Progress(best["step"], best["tokens"]), best["figure"], load_file(folder / _BEST))


def _continued(stretches: list[dict[str, Any]], step: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stretches of a run that goes on from ``step`` under these settings, a new one only if they changed."""
    done = [stretch for stretch in stretches if stretch["first_step"] < step]
    before = {name: value for name, value in done[-1].items() if name != "first_step"} if done else None
    return done if before == settings else [*done, {"first_step": step if done else 0, **settings}]
