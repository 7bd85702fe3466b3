"""What a run says while it trains: metrics.jsonl, the tracker, and a progress bar."""

import json
import time
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from trainer.checkpoint import Progress
from trainer.recipe import AnyRecipe


class Log:
    """metrics.jsonl, the tracker, and a progress bar (lines, where there is no terminal). Main process only."""

    def __init__(self, recipe: AnyRecipe, accelerator: Accelerator, console: Console) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._console = console
        self._active = accelerator.is_main_process
        self._file = Path(recipe.output) / "metrics.jsonl"
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (self._active and console.is_terminal),
        )
        self._task = self._bar.add_task(recipe.name, total=recipe.training.steps, note="")
        self._last_line = time.monotonic()
        self._last_step: tuple[float, int] | None = None

    def __enter__(self) -> "Log":
        wandb = {"name": self._recipe.name, "dir": self._recipe.output}
        self._accelerator.init_trackers("headstart", self._recipe.model_dump(mode="json"), {"wandb": wandb})
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, progress: Progress, figures: dict[str, float]) -> None:
        """Note a step's figures and its speed."""
        now = time.perf_counter()
        if self._last_step is not None:
            before, tokens = self._last_step
            figures = {**figures, "tokens_per_second": (progress.tokens - tokens) / (now - before)}
        self._last_step = (now, progress.tokens)
        self._write(progress, figures)
        note = f"loss {figures['loss']:.3f}"
        self._bar.update(self._task, completed=progress.step, note=note)
        if self._active and not self._console.is_terminal and time.monotonic() - self._last_line > 15:
            self._last_line = time.monotonic()
            speed = f", {figures['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in figures else ""
            self._console.print(
                f"{self._recipe.name}: step {progress.step}/{self._recipe.training.steps}, {note}{speed}"
            )

    def evaluation(self, progress: Progress, figures: dict[str, float], step: int | None = None) -> None:
        """Note the held-out figures, and say them; ``step`` is that of the weights, where it is not the last."""
        step, temperature = progress.step if step is None else step, self._recipe.evaluation.temperature
        earlier = {"heldout/step": step} if step < progress.step else {}
        self._write(progress, {**{f"heldout/{name}": value for name, value in figures.items()}, **earlier})
        self._console.print(
            f"{self._recipe.name}: step {step}, held out, {f'T={temperature:g}' if temperature else 'greedy'}: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items()),
            soft_wrap=True,
        )
        self._last_step = None  # the clock of the next step would include the evaluation

    def _write(self, progress: Progress, figures: dict[str, float]) -> None:
        self._accelerator.log(figures, step=progress.step)
        if self._active:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"step": progress.step, "tokens": progress.tokens, **figures}) + "\n")
