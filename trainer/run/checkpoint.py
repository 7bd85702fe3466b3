"""Checkpoints: trained weights, optimizer state and step, as safetensors and JSON.

A checkpoint gets its name only once it is complete and on disk, so a kill or a full disk loses only this checkpoint.
Data order, learning rate and random state are functions of the step and are not saved. Tensors are whole and named by
parameter (see `state`), so a run may resume under another launcher or number of processes.

Each file has a checksum. A checkpoint that cannot be read is reported and skipped, but never deleted: perhaps the disk
failed only for a moment.
"""

import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from decoding.files.stored import non_finite
from decoding.measure.machine import commit, versions
from trainer.files.folders import check_seal, write_folder
from trainer.processes import is_agreed, on_first
from trainer.run.state import Tensors

_STATE, _WEIGHTS, _OPTIMIZER, _BEST = "state.json", "weights.safetensors", "optimizer.safetensors", "best.safetensors"
_NAME = re.compile(r"step-\d{8,}")
_ASIDE = "unreadable-"
"""Prefix for the folder of a checkpoint that could not be read, once the run has continued without it."""


# --- settings that may differ when a run resumes ----------------------------------------------------------------------

_ALWAYS = (
    *("name", "output", "tracking", "checkpoint"),  # the weights do not depend on these settings
    *("launch", "trust_remote_code", "training.micro_batch_size", "evaluation.batch_size"),
    *("adapters.gradient_checkpointing", "draft.gradient_checkpointing"),
    *("heads.tree_nodes", "draft.dspark.tree_nodes"),  # these settings are used only when the artefact is written
)
"""Settings that may always differ, because they change only rounding or take effect even in a finished run."""
_WHILE_TRAINING = ("training.learning_rate", "training.mixed_precision")
"""Settings that may differ until the last step; the provenance records the steps of each value."""
_CHOOSING = ("evaluation", "held-out data")
"""Settings that may not differ if evaluations choose the weights."""


class Change(NamedTuple):
    """A setting that differs: its name, recorded value and present value, as in ``training.steps (8, now 12)``."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """Return the name, with the values if the setting is a single key of the recipe."""
        lone = "." in self.name and not isinstance(self.before, dict | list) and not isinstance(self.now, dict | list)
        return f"{self.name} ({_shown(self.before)}, now {_shown(self.now)})" if lone else self.name


class Changes(NamedTuple):
    """The settings that differ: those for which the run is refused, and those that are allowed to differ."""

    refused: list[Change]
    allowed: list[Change]


def compare(recorded: Mapping[str, Any], now: Mapping[str, Any], finished: bool = False) -> Changes:
    """Compare two origins (`trainer.run.job.Job.origin`); ``finished`` means that no step is left to train."""
    decides = any((settings.get("evaluation") or {}).get("keep") == "best" for settings in (recorded, now))
    changes = list(_differing(recorded, now))
    refused = [change for change in changes if _binds(change.name, finished, decides)]
    return Changes(refused, [change for change in changes if change not in refused])


def bound(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings without those in `_ALWAYS`, which may differ in any case."""
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
    return any(name == section or name.startswith(f"{section}.") for section in names)


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
    """How many optimizer steps were done, and how many trained tokens all processes have seen."""

    step: int
    tokens: int


class Best(NamedTuple):
    """The weights with the highest held-out figure so far, and for each prompt the numbers of new tokens and target
    passes.
    """

    progress: Progress
    figure: float
    weights: Tensors
    texts: tuple[tuple[int, int], ...] = ()


class Saved(NamedTuple):
    """A checkpoint's progress, weights by name, and optimizer state by ``{parameter} {name}``."""

    progress: Progress
    weights: Tensors
    moments: Tensors

    def non_finite(self) -> list[str]:
        """Return the names of weights and moments containing a NaN or an infinity."""
        return non_finite({**self.weights, **self.moments})


class Checkpoints:
    """The checkpoints of one run, newest last. `compare` checks them against the run's ``origin``.

    ``settings`` affect a step's figures but may change when a run resumes; `stretches` records them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        origin: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        """``made_by`` is the run's recipe and launch as JSON values, for `read_apart`."""
        self.writing: Future[None] | None = None
        """The call of `save` that runs in a thread, if any."""
        self.best: Best | None = None
        """The best weights so far. `latest` and `read` set this attribute."""
        self._folder = folder
        self._keep = keep
        self._origin = json.loads(json.dumps(dict(origin)))
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._made_by = {**(made_by or {}), "commit": commit(), "versions": versions()}
        self.stretches: list[dict[str, Any]] = [{"first_step": 0, **self._settings}]
        """The settings of each stretch of steps, and its first step (from 0)."""
        self.unreadable: dict[Path, str] = {}
        """The checkpoints that `latest` skipped, with the reasons; the newest comes first."""
        self.changes: list[Change] = []
        """Permitted differences from the settings of the checkpoint that `latest` returned."""
        self._recorded = self._origin

    def _all(self) -> list[Path]:
        return sorted(folder for folder in self._folder.glob("step-*") if _NAME.fullmatch(folder.name))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in increasing order."""
        return [int(folder.name.removeprefix("step-")) for folder in self._all()]

    def last_good(self) -> str:
        """Return part of a sentence, for messages, that names the newest good checkpoint, once `writing` has ended."""
        self.settle()
        return self._last_good()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """`settle` before an error of all processes leaves the block."""
        try:
            yield
        except Exception as error:
            if is_agreed(error):
                self.settle()
            raise

    def settle(self) -> None:
        """Make all processes wait until `writing` has ended; otherwise a launcher that sees one of them end would kill
        the process that writes. Every process must call this.
        """
        on_first(lambda: wait([self.writing] if self.writing else []))

    def _last_good(self) -> str:
        good = [folder for folder in self._all() if folder not in self.unreadable]
        return f"the last good checkpoint, {good[-1]}, is kept" if good else "there is no earlier checkpoint"

    def save(self, saved: Saved, best: Best | None = None) -> None:
        """Write a checkpoint and drop the oldest; after an OSError the last good one is untouched.

        Also removes half-written folders, and renames the checkpoints that `latest` skipped.
        """
        progress = saved.progress
        newest = self._folder / f"step-{progress.step:08d}"
        for left_behind in self._folder.glob(".step-*"):
            shutil.rmtree(left_behind, ignore_errors=True)

        def write(folder: Path) -> None:
            save_file(saved.weights, folder / _WEIGHTS)
            save_file(saved.moments, folder / _OPTIMIZER)
            state = {"step": progress.step, "tokens": progress.tokens, "identity": self._origin, **self._made_by}
            if best is not None:
                save_file(best.weights, folder / _BEST)
                state["best"] = {**vars(best.progress), "figure": best.figure, "texts": best.texts}
            (folder / _STATE).write_text(json.dumps({**state, "stretches": self.stretches}, indent=2))

        try:
            self._set_aside(newest)
            write_folder(newest, write, sealed=True)
        except OSError as error:
            remedy = "make room" if error.errno in (None, errno.ENOSPC, errno.EDQUOT) else "check the folder"
            raise OSError(
                f"the checkpoint of step {progress.step} could not be written ({error}); {self._last_good()}. "
                f"To resume, {remedy} and start again"
            ) from error
        for folder in self._all()[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _set_aside(self, newest: Path) -> None:
        """Rename the skipped checkpoints and all checkpoints of steps after ``newest``."""
        for folder in self._all():
            if folder > newest or folder in self.unreadable:
                others = len([*folder.parent.glob(f"{_ASIDE}{folder.name}*")])
                folder.rename(folder.with_name(f"{_ASIDE}{folder.name}{f'-{others + 1}' if others else ''}"))
        self.unreadable = {}

    def read(self, step: int) -> Saved:
        """Return the checkpoint of a step; another process has already verified it."""
        folder = self._folder / f"step-{step:08d}"
        state, saved = _read(folder, verify=False)
        self.best = _read_best(folder, state)
        return saved

    def latest(self) -> Saved | None:
        """Return the newest readable checkpoint, or None if there are no checkpoints; skipped ones are listed in
        `unreadable`. Raises UserError if another recipe made the checkpoint, or if none can be read.
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
            raise UserError(
                f"none of the {len(self.unreadable)} checkpoints can be read: {listed}. Restore them and start again, "
                f"or start over with another output folder or without {self._folder}"
            )
        return None

    def check_finished(self) -> None:
        """Raise UserError if the settings of a finished run have changed, because no step is left to apply them to."""
        self._allowed(f"the run in {self._folder.parent} has finished", finished=True)

    def _allowed(self, whose: str, finished: bool = False) -> list[Change]:
        refused, allowed = compare(self._recorded, self._origin, finished)
        if refused:
            raise UserError(
                f"{whose} with another {', '.join(map(str, refused))}: set another output folder in the recipe, or "
                f"remove {self._folder} to start over"
            )
        return allowed


def newest_checkpoint(folder: Path) -> Path | None:
    """Return ``folder`` if it is a checkpoint; otherwise the newest checkpoint in it, or None if there is none."""
    if (folder / _STATE).is_file() and (folder / _WEIGHTS).is_file():
        return folder
    return max((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), default=None)


def read_apart(folder: Path) -> tuple[dict[str, Any], Saved]:
    """Read a checkpoint without resuming its run; return the content of state.json, and the weights without moments.

    Raises UserError if anything is damaged, or if state.json lacks the recipe or the launch.
    """
    try:
        state, saved = _read(folder, moments=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"the checkpoint {folder} cannot be read ({error}): use another checkpoint") from error
    if not all(isinstance(state.get(name), dict) for name in ("recipe", "launch")):
        raise UserError(f"{folder / _STATE} does not contain a recipe: resume the run and export its final/")
    return state, saved


def _read(folder: Path, verify: bool = True, moments: bool = True) -> tuple[dict[str, Any], Saved]:
    """Read state.json and the tensors; raise UserError or OSError for damage."""
    if verify:
        check_seal(folder)
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    match state:
        case {"identity": dict(), "stretches": [*_], "step": int() as step, "tokens": int() as tokens}:
            progress = Progress(step, tokens)
        case _:
            raise UserError(f"{_STATE} lacks entries of a checkpoint")
    saved = Saved(progress, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER) if moments else {})
    if verify and (broken := saved.non_finite()):
        raise UserError(f"{broken[0]} contains values that are not finite")
    return state, saved


def _read_best(folder: Path, state: Mapping[str, Any]) -> Best | None:
    best = state.get("best")
    if best is None:
        return None
    texts = tuple((tokens, passes) for tokens, passes in best.get("texts", ()))
    return Best(Progress(best["step"], best["tokens"]), best["figure"], load_file(folder / _BEST), texts)


def _continued(stretches: list[dict[str, Any]], step: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stretches of a run that resumes at ``step``. A new stretch is added if the settings changed."""
    done = [stretch for stretch in stretches if stretch["first_step"] < step]
    before = {name: value for name, value in done[-1].items() if name != "first_step"} if done else None
    return done if before == settings else [*done, {"first_step": step if done else 0, **settings}]
