"""The log of a training run: metrics.jsonl, trackers and a progress bar.

metrics.jsonl contains each step once. When a run resumes, the lines of repeated steps are moved to
metrics.superseded.jsonl.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers
from rich.console import Console

from decoding.errors import UserError, first_line
from decoding.files.hub import shortened
from decoding.files.stored import read_object
from trainer.files.folders import write_text
from trainer.learning.spans import StepTimes
from trainer.recipe.reading import AnyRecipe
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.terminal.console import ProgressBar, say

METRICS = "metrics.jsonl"
"""Name of the file with a run's figures, in its output folder."""
_RUNS = "trackers.json"
"""Name of the file, in a run's output folder, that lists the names that trackers gave the run."""
_RUN_OF: dict[str, Callable[[Any], str]] = {
    "wandb": lambda run: str(run.id),
    "trackio": lambda run: str(run.name),
    "mlflow": lambda run: str(run.info.run_id),
}
"""For each tracker, a function from its run to the name that continues the run later; TensorBoard needs no name."""


class Evaluation(NamedTuple):
    """Held-out figures by name, the drafter's label, and the numbers of new tokens and passes for each prompt."""

    figures: dict[str, float]
    drafter: str
    texts: tuple[tuple[int, int], ...] = ()


class Log:
    """Writer of figures to metrics.jsonl, to the trackers and to a progress bar (without a terminal, it prints lines).

    Only the main process writes. The trackers start in `begun`, once all checks have passed.
    """

    def __init__(self, recipe: AnyRecipe, accelerator: Accelerator, console: Console) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._console = console
        self._active = accelerator.is_main_process
        self._file = Path(recipe.output) / METRICS
        self._bar = ProgressBar(console, f"{recipe.name}, steps", recipe.training.steps, active=self._active)
        self._tokens = 0

    def __enter__(self) -> "Log":
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)
        if exception[0] is None:
            self._tell_trackers(lambda tracker: tracker.finish())
            self._accelerator.trackers.clear()  # otherwise `end_training` would finish the trackers again

    def begun(self, progress: Progress, checkpoints: Checkpoints) -> None:
        """Start the trackers.

        If the run resumes, also print the step, changed settings and skipped checkpoints. Only the main process calls
        this. Raises UserError if a tracker cannot start.
        """
        self._start_trackers(progress)
        self._supersede(progress)
        if not progress.step:
            return
        self._tokens = progress.tokens
        self._bar.begin(progress.step)
        steps = self._recipe.training.steps
        passed_over = checkpoints.unreadable.items()
        lines = [f"{folder} is unreadable ({reason}); it was skipped, not deleted" for folder, reason in passed_over]
        lines.append(f"{self._recipe.name}: resuming from step {progress.step} of {steps}")
        lines += [f"changed from this step: {change}" for change in checkpoints.changes]
        say(self._console, *lines)

    def note(self, line: str) -> None:
        if self._active:
            say(self._console, line)

    def _supersede(self, progress: Progress) -> None:
        """Move the lines of steps and evaluations that will be repeated out of metrics.jsonl."""
        if not self._file.exists():
            return
        at_end = progress.step == self._recipe.training.steps
        evaluates = at_end or progress.step % self._recipe.evaluation.every == 0
        lines = self._file.read_text().splitlines()
        superseded = [line for line in lines if _is_repeated(line, progress.step, evaluates)]
        if superseded:
            with self._file.with_name("metrics.superseded.jsonl").open("a") as file:
                file.write("".join(f"{line}\n" for line in superseded))
            write_text(self._file, "".join(f"{line}\n" for line in lines if line not in superseded))

    def step(self, progress: Progress, figures: dict[str, float], times: StepTimes | None) -> None:
        """Log a step's figures. If the step's time is known, also log its speed and the target's share of the time.

        The speed counts each trained token of the texts once, even if heads or a draft predict the token several times.
        """
        tokens, self._tokens = progress.tokens - self._tokens, progress.tokens
        note = f"loss {figures['loss']:.3f}"
        if times is not None:
            speed, share = tokens / times.seconds, times.share("target")
            figures = {**figures, "tokens_per_second": speed, "data_share": times.share("data"), "target_share": share}
            note += f", {speed:,.0f} tokens/s" + (f", target {share:.0%}" if share else "")
        self._write(progress, figures)
        self._bar.update(progress.step, note=note)

    def evaluation(self, progress: Progress, evaluation: Evaluation, step: int | None = None) -> None:
        """Log and print the held-out figures; ``step`` is the step of the weights if they are not the last weights."""
        step, temperature = progress.step if step is None else step, self._recipe.evaluation.temperature
        kept = "the best weights, of " if step < progress.step else ""
        figures = {f"heldout/{name}": value for name, value in evaluation.figures.items()}
        if step < progress.step:
            figures["heldout/step"] = step
        self._write(progress, figures)
        say(
            self._console,
            f"{self._recipe.name}: {kept}step {step}, held out, {f'T={temperature:g}' if temperature else 'greedy'} "
            f"({evaluation.drafter}): "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in evaluation.figures.items()),
        )

    def _write(self, progress: Progress, figures: dict[str, float]) -> None:
        if self._active:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"step": progress.step, "tokens": progress.tokens, **figures}) + "\n")
            self._tell_trackers(lambda tracker: tracker.log(figures, step=progress.step))

    def _start_trackers(self, progress: Progress) -> None:
        """Start the trackers. If a run resumes, each tracker that can do so continues its earlier record of the run."""
        name, stored = self._recipe.name, self._file.with_name(_RUNS)
        remedy = f"remove {stored} to begin a new run in the trackers"
        runs = read_object(stored, remedy) if progress.step and stored.is_file() else {}
        named = {
            "wandb": {"name": name, "dir": self._recipe.output, "id": runs.get("wandb"), "resume": "allow"},
            "trackio": {"name": runs.get("trackio", name), "resume": "allow" if "trackio" in runs else "never"},
            "mlflow": {"run_name": name, "run_id": runs.get("mlflow")},
            "tensorboard": {"purge_step": progress.step + 1},
        }
        # In MLflow a run cannot change the settings that it began with.
        settings = None if runs else dict(_flat(self._recipe.model_dump(mode="json")))
        try:
            self._accelerator.init_trackers("headstart", settings, named)
            begun = {tracker.name: tracker.tracker for tracker in self._accelerator.trackers}
            names = {name: run_of(begun[name]) for name, run_of in _RUN_OF.items() if name in begun}
        except Exception as error:  # trackers raise different types of errors
            raise UserError(
                f"a tracker cannot start ({first_line(error)}): {remedy * bool(runs) or 'check its settings'}, or set "
                "tracking=none"
            ) from error
        if names:
            write_text(stored, json.dumps(names) + "\n")
        if "wandb" in begun and begun["wandb"].url is not None:
            say(self._console, f"figures also go to {begun['wandb'].url}")

    def _tell_trackers(self, work: Callable[[GeneralTracker], object]) -> None:
        """Call ``work`` with each tracker. A tracker that fails gets no more figures, and the run continues."""
        for tracker in tuple(self._accelerator.trackers):
            try:
                work(tracker)
            except Exception as error:  # noqa: BLE001  # trackers raise different types of errors
                self._accelerator.trackers.remove(tracker)
                self.note(
                    f"warning: {tracker.name} failed ({first_line(error)}), so it gets no more figures until the next "
                    f"start; {METRICS} has all figures"
                )


def _is_repeated(line: str, step: int, evaluates: bool) -> bool:
    """Return True for a line without figures, and for a line that will be written again after a resume at ``step``."""
    try:
        row = json.loads(line)
        evaluation = any(name.startswith("heldout/") for name in row)
        return bool(row["step"] > step or (row["step"] == step and evaluation and evaluates))
    except (ValueError, TypeError, KeyError):  # the line is not a row of figures
        return True


# --- trackers ---------------------------------------------------------------------------------------------------------


def _flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a recipe's values under dotted names; for TensorBoard, values that are not numbers become text."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, int | float | str) else str(value)


def installed_trackers() -> list[str]:
    """Return the trackers that accelerate finds installed."""
    return [str(tracker) for tracker in get_available_trackers()]


def trackers_of(tracking: Sequence[str] | None) -> list[str]:
    """Return the requested trackers that are installed; None requests wandb if ``WANDB_API_KEY`` is set.

    wandb runs offline if there is no key in the environment or from ``wandb login``.
    """
    has_key, installed = bool(os.environ.get("WANDB_API_KEY")), installed_trackers()
    wanted = tracking if tracking is not None else ["wandb"] if has_key else []
    if "wandb" in wanted and "wandb" in installed:
        os.environ.setdefault("WANDB_SILENT", "true")
        if "WANDB_MODE" not in os.environ and not has_key and not _is_logged_in():
            os.environ["WANDB_MODE"] = "offline"
    return [name for name in wanted if name in installed]


def _is_logged_in() -> bool:
    """Return True if wandb has stored a key, in ~/.netrc or its settings.

    The check asks neither the user nor the network.
    """
    # This runs in a separate process, because a login changes the settings of later runs, and undoing the login waits
    # for earlier runs.
    ask = "import sys, wandb; sys.exit(0 if wandb.login(prompt=False, verify=False) else 3)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode not in (0, 3):
        reason = shortened(done.stderr.strip().rpartition("\n")[2])
        raise UserError(f"wandb cannot use its login ({reason}): run 'wandb login', or set tracking=none")
    return done.returncode == 0
