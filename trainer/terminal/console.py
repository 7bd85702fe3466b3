"""Consoles that print text as it is: a name or a title with brackets in it is no markup."""

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text


def standard_output(**options: Any) -> Console:
    """A console for results."""
    return Console(markup=False, highlight=False, emoji=False, **options)


def standard_error(**options: Any) -> Console:
    """A console for errors and for what a run says on its way."""
    return standard_output(stderr=True, **options)


def wide(console: Console, width: int = 190) -> Console:
    """Where nobody set a width (a file, a pipe), a console with the room that a table needs."""
    return (
        console if console.is_terminal or "COLUMNS" in os.environ else standard_output(file=console.file, width=width)
    )


def title(text: str) -> Text:
    """A table's title, in the style that tables give theirs."""
    return Text(text, style="table.title")


def say(console: Console, *lines: str | Text, style: str | None = None) -> None:
    """Print each on a line of its own, however long, on whatever console the caller brought."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def say_error(console: Console, message: str) -> None:
    """Print one sentence behind a red ``error:``."""
    say(console, Text.assemble(("error:", "bold red"), f" {message}"))


def is_terminal() -> bool:
    """True where someone watches what is printed on the way."""
    return sys.stderr.isatty()
