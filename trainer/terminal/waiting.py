"""A line that says what a command is busy with before it has anything to show."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from decoding.measure.markdown import visible


@contextmanager
def waiting(work: str) -> Iterator[None]:
    """Show ``work`` on standard error until the block ends, and erase it then; nothing where it is no terminal.

    It has no thread and no spinner: what the block prints itself stands behind it, and stays.
    """
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
