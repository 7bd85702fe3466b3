"""Consoles that print text literally, without rich's markup, and the silencing of libraries."""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from decoding.measure.markdown import visible


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again: the command has an exit code for it."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with every text `visible`, to keep control characters in texts from the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def standard_output(**options: Any) -> Console:
    """Return a console for results, without any style if NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        options.setdefault("color_system", None)  # by itself rich drops colours but keeps bold
    return _Console(markup=False, highlight=False, emoji=False, **options)


def standard_error(**options: Any) -> Console:
    """Return a console for errors, progress and notes."""
    return standard_output(stderr=True, **options)


def wide(console: Console, width: int = 190) -> Console:
    """Return a console wide enough for tables in a file or pipe; else ``console`` itself."""
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
    """Show ``work`` on standard error until the block ends, if it is a terminal. Uses no thread and no spinner."""
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
    "TOKENIZERS_PARALLELISM": "false",  # we tokenize texts one by one; otherwise it warns at every fork
    "WANDB_SILENT": "true",
}
"""Variables that libraries read on import; values set by the user stay."""


def quiet_libraries() -> None:
    """Silence libraries except for errors and download bars on a terminal; call this before importing them."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its own level when accelerate imports it.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})\b")
