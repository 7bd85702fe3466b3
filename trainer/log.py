"""What a run says while it trains: metrics.jsonl, the tracker, and a progress bar."""

import json
import time
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console

from trainer.checkpoint import Progress
from trainer.console import say
from trainer.progress import ProgressBar
from trainer.recipe import AnyRecipe


class Log:
    """metrics.jsonl, the tracker, and a progress bar (lines, where there is no terminal). Main process only."""

    def __init__(self, recipe: AnyRecipe, accelerator: Accelerator, console: Console) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._console = console
        self._active = accelerator.is_main_process
        self._file = Path(recipe.output) / "metrics.jsonl"
        self._bar = ProgressBar(console, f"{recipe.name}, steps", recipe.training.steps, active=self._active)
        self._last_step: tuple[float, int] | None = None

    def __enter__(self) -> "Log":
        wandb = {"name": self._recipe.name, "dir": self._recipe.output}
        self._accelerator.init_trackers("headstart", self._recipe.model_dump(mode="json"), {"wandb": wandb})
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(*exception)

    def step(self, progress: Progress, figures: dict[str, float]) -> None:
        """Note a step's figures and its speed."""
        now = time.perf_counter()
        if self._last_step is not None:
            before, tokens = self._last_step
            figures = {**figures, "tokens_per_second": (progress.tokens - tokens) / (now - before)}
        self._last_step = (now, progress.tokens)
        self._write(progress, figures)
        if not self._bar.completed:
            self._bar.begin(progress.step - 1)  # of a run that goes on
        speed = f", {figures['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in figures else ""
        self._bar.update(progress.step, note=f"loss {figures['loss']:.3f}{speed}")

    def evaluation(self, progress: Progress, figures: dict[str, float], step: int | None = None) -> None:
        """Note the held-out figures, and say them; ``step`` is that of the weights, where it is not the last."""
        step, temperature = progress.step if step is None else step, self._recipe.evaluation.temperature
        earlier = {"heldout/step": step} if step < progress.step else {}
        self._write(progress, {**{f"heldout/{name}": value for name, value in figures.items()}, **earlier})
        say(
            self._console,
            f"{self._recipe.name}: step {step}, held out, {f'T={temperature:g}' if temperature else 'greedy'}: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items()),
        )
        self._last_step = None  # the clock of the next step would include the evaluation

    def _write(self, progress: Progress, figures: dict[str, float]) -> None:
        self._accelerator.log(figures, step=progress.step)
        if self._active:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"step": progress.step, "tokens": progress.tokens, **figures}) + "\n")
