"""Progress of long work: a bar on a terminal, elsewhere a line every 15 seconds."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.terminal.console import say

LINE_SECONDS = 15.0
"""Seconds between lines without a terminal."""


class ProgressBar:
    """One task's progress, as a bar or lines such as "answering: 120/1,792, 310 tokens/s, about 12 min left".

    ``completed`` of ``total`` items (None: not known yet) were done before. Only an ``active`` bar shows anything: one
    of several processes. ``clock`` returns seconds.
    """

    def __init__(
        self,
        console: Console,
        description: str,
        total: int | None,
        completed: int = 0,
        *,
        active: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._description, self._clock = console, description, clock
        self.completed, self._total, self._note = completed, total, ""
        self._before = completed
        self._lines = active and not console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not (active and console.is_terminal),
        )
        self._task = self._bar.add_task(description, total=total, completed=completed, note="")
        self._began = self._last_line = clock()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        self.begin(self.completed)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._began

    def begin(self, completed: int) -> None:
        """Start the clock with ``completed`` items already done; they do not count for the pace."""
        self.completed = self._before = completed
        self._began = self._last_line = self._clock()
        self._bar.reset(self._task, completed=completed, total=self._total)

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more items as done."""
        self.update(self.completed + count)

    def update(self, completed: int | None = None, *, total: int | None = None, note: str | None = None) -> None:
        """Set the items done, their total and the note; None keeps a value."""
        self.completed = self.completed if completed is None else completed
        self._total = self._total if total is None else total
        self._note = self._note if note is None else note
        self._bar.update(self._task, completed=self.completed, total=self._total, note=self._note)
        if self._lines and self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            say(self._console, self._line())

    def _line(self) -> str:
        done = f"{self.completed:,}" if self._total is None else f"{self.completed:,}/{self._total:,}"
        parts = [f"{self._description}: {done}", self._note, self._left()]
        return ", ".join(part for part in parts if part)

    def _left(self) -> str:
        """Estimate the time left from the pace so far; empty if unknown."""
        done = self.completed - self._before
        if self._total is None or done <= 0 or self.completed >= self._total:
            return ""
        return f"about {_duration(self.seconds / done * (self._total - self.completed))} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
