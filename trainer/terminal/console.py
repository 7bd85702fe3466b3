"""Consoles that print text literally, without rich's markup; progress of long work; and silencing of libraries."""

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from decoding.measure.markdown import visible


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again, because the command has an exit code for it."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Pass every text through `visible`, so that control characters in texts do not reach the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def standard_output(**options: Any) -> Console:
    """Return a console for results, without any style if NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        options.setdefault("color_system", None)  # by itself rich removes colours but keeps bold
    return _Console(markup=False, highlight=False, emoji=False, **options)


def standard_error(**options: Any) -> Console:
    """Return a console for errors, progress and notes."""
    return standard_output(stderr=True, **options)


def wide(console: Console, width: int = 190) -> Console:
    """Return a console wide enough for tables if output goes to a file or pipe; otherwise return ``console`` itself."""
    return (
        console if console.is_terminal or "COLUMNS" in os.environ else standard_output(file=console.file, width=width)
    )


def title(text: str) -> Text:
    """Return a table's title in rich's style."""
    return Text(text, style="table.title")


def say(console: Console, *lines: str | Text, style: str | None = None) -> None:
    """Print each line literally, without wrapping."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def say_error(console: Console, message: str) -> None:
    """Print one sentence after a red ``error:``."""
    say(console, Text.assemble(("error:", "bold red"), f" {message}"))


def is_terminal() -> bool:
    """Return True if standard error is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def waiting(work: str) -> Iterator[None]:
    """If standard error is a terminal, show ``work`` there until the block ends. Uses no thread and no spinner."""
    shown = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if shown:
        sys.stderr.write(f"{visible(work)} …"[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


_LIBRARIES = ("accelerate", "datasets", "fsspec", "huggingface_hub", "peft", "tokenizers", "torch", "transformers")
_VARIABLES = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # we tokenize texts one by one; otherwise this library would warn at every fork
    "WANDB_SILENT": "true",
}
"""Variables that libraries read on import; values set by the user stay."""


def quiet_libraries() -> None:
    """Silence libraries, except for errors and download bars on a terminal; call this before importing them."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its own level when accelerate imports it.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})\b")


LINE_SECONDS = 15.0
"""Seconds between lines if there is no terminal."""


class ProgressBar:
    """The progress of one task, shown as a bar or as lines such as "answering: 120/1,792, 310 tokens/s, about 12 min
    left".

    ``completed`` of ``total`` items were done before; ``total`` is None if it is not known yet. Only an ``active`` bar
    shows anything; if there are several processes, one of them has such a bar. ``clock`` returns seconds.
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
        """Start the clock with ``completed`` items already done, which do not count for the pace."""
        self.completed = self._before = completed
        self._began = self._last_line = self._clock()
        self._bar.reset(self._task, completed=completed, total=self._total)

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more items as done."""
        self.update(self.completed + count)

    def update(self, completed: int | None = None, *, total: int | None = None, note: str | None = None) -> None:
        """Set the number of finished items, the total and the note; None keeps the old value."""
        self.completed = self.completed if completed is None else completed
        self._total = self._total if total is None else total
        self._note = self._note if note is None else note
        self._bar.update(self._task, completed=self.completed, total=self._total, note=self._note)
        if self._lines and self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            done = f"{self.completed:,}" if self._total is None else f"{self.completed:,}/{self._total:,}"
            say(self._console, ", ".join(filter(None, (f"{self._description}: {done}", self._note, self._left()))))

    def _left(self) -> str:
        """Estimate the time left from the pace so far; empty if unknown."""
        done = self.completed - self._before
        if self._total is None or done <= 0 or self.completed >= self._total:
            return ""
        left = self.seconds / done * (self._total - self.completed)
        if left < 90:
            return f"about {left:.0f} s left"
        return f"about {left / 60:.0f} min left" if left < 90 * 60 else f"about {left / 3600:.1f} h left"
