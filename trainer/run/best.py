"""The best weights so far by held-out acceptance, kept on disk, and the end of a run's patience.

Every new best gets a folder best/step-N of its own: the trained weights, and the step with its figure. An
evaluation's figure is a function of the weights, and each folder beats those of all earlier steps. So a run that was
killed and resumes at any checkpoint finds its best in these folders; an evaluation that is repeated drops the folders
from its own step on. A folder is removed when no checkpoint needs it any more. A folder that cannot be read stops the
run and stays: without it the run would finish other weights than the best.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import nn

from decoding.model.stored import check_finite
from trainer.files.folders import check_seal, write_folder
from trainer.recipe.common import EvaluationSection
from trainer.run.checkpoint import Progress
from trainer.run.state import gather_weights, load_weights

CRITERION = "tokens_per_pass"
_EVALUATION, _WEIGHTS = "evaluation.json", "weights.safetensors"


class Evaluated(NamedTuple):
    """Tokens per target pass on the held-out prompts, of the weights at a step."""

    progress: Progress
    figure: float


class Best:
    """The best evaluation of one run. Main process only, but for `restore`."""

    def __init__(
        self, folder: Path, section: EvaluationSection, identity: Any, checkpoint_steps: Callable[[], Sequence[int]]
    ) -> None:
        """``identity``: all that makes figures comparable, as JSON values; folders of another one do not count.

        ``checkpoint_steps`` gives the steps of the checkpoints on the disk.
        """
        self._folder, self._section = folder, section
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self._checkpoint_steps = checkpoint_steps

    def check(self) -> None:
        """Read all folders of this run; ValueError where one is damaged."""
        for step in self._known():
            _check_whole(self._place(step))

    @property
    def folder(self) -> Path:
        return self._folder

    def offer(self, progress: Progress, figure: float, module: nn.Module) -> bool:
        """Note an evaluation; True if it is a new best, which a tie is not. Parameters must be whole."""
        known = self._known()
        earlier = {step: found for step, found in known.items() if step < progress.step}
        best = earlier[max(earlier)] if earlier else None
        is_best = figure > (best.figure if best else float("-inf"))
        if is_best:
            self._write(Evaluated(progress, figure), module)
        resumable = [max((step for step in earlier if step <= c), default=0) for c in self._checkpoint_steps()]
        needed = {*map(self._place, {*resumable, progress.step} if is_best else earlier)}
        for folder in {*self._folder.glob("step-*")} - needed:
            shutil.rmtree(folder, ignore_errors=True)
        return is_best

    def latest(self) -> Evaluated | None:
        """Return the best of all that were offered; None where no evaluation had a figure."""
        known = self._known()
        return known[max(known)] if known else None

    def is_enough(self, step: int) -> bool:
        """Return True after ``patience`` evaluations without a new best, at this step."""
        if self._section.patience is None:
            return False
        best = self.latest()
        waited = step - (best.progress.step if best else 0)
        return waited >= self._section.patience * self._section.every

    def restore(self, module: nn.Module, step: int) -> None:
        """Load the weights of a step that was the best into a module that is whole; any process may."""
        place = self._place(step)
        _check_whole(place)
        load_weights(module, load_file(place / _WEIGHTS))

    def _place(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _write(self, evaluated: Evaluated, module: nn.Module) -> None:
        progress, figure = evaluated

        def write(folder: Path) -> None:
            if self._keeps_weights:
                weights = gather_weights(module)
                check_finite(weights, f"step {progress.step}", "lower training.learning_rate and start again to resume")
                save_file(weights, folder / _WEIGHTS)
            content = {"step": progress.step, "tokens": progress.tokens, CRITERION: figure, "identity": self._identity}
            (folder / _EVALUATION).write_text(json.dumps(content, indent=2) + "\n")

        write_folder(self._place(progress.step), write, sealed=True)

    @property
    def _keeps_weights(self) -> bool:
        return self._section.keep == "best"

    def _known(self) -> dict[int, Evaluated]:
        """Return the evaluations on the disk, by step, without those that another run left."""
        found = map(self._read, sorted(self._folder.glob("step-*")))
        return {each.progress.step: each for each in found if each is not None}

    def _read(self, folder: Path) -> Evaluated | None:
        """Return an evaluation; None if it is another run's. ValueError if it cannot be read."""
        try:
            content = json.loads((folder / _EVALUATION).read_text())
            evaluated = Evaluated(Progress(content["step"], content["tokens"]), content[CRITERION])
            return evaluated if content["identity"] == self._identity else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, error) from error


def _check_whole(folder: Path) -> None:
    try:
        check_seal(folder)
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}, the best weights up to its step, cannot be read ({error}). Nothing was changed: start again if the "
        "disk failed for a moment, else remove the folder, and the run goes on as if that evaluation had found less"
    )
