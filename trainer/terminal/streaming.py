"""A text as it is decoded: plain in a pipe, coloured by origin above a live line of figures on a terminal.

`CtrlC` ends the text, not the program.
"""

import signal
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable
from itertools import accumulate
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from decoding.generate import Step
from decoding.measure.markdown import visible
from decoding.stream import Piece, Tally, stream_pieces
from decoding.text import TextDecoder

DRAFTED = "green"
OWN = "bold"
"""Styles of accepted draft tokens and of the target's own; weight tells them apart if there are no colours."""
REFRESH_SECONDS = 1 / 30
"""Least time between two drawings of the live part."""


def is_live(console: Console) -> bool:
    """Return True if lines can be redrawn: on a terminal that is not dumb."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


def shows_styles(console: Console) -> bool:
    """Return True if tokens are coloured by origin: on a terminal that is not dumb, without NO_COLOR."""
    return is_live(console) and console.color_system is not None


def legend() -> Text:
    """Return a line that says which style is which."""
    return Text.assemble(("green", DRAFTED), ": accepted draft tokens; ", ("bold", OWN), ": the target's own tokens")


def show_steps(
    console: Console,
    steps: Iterable[Step],
    tokenizer: TextDecoder,
    hidden: Container[int] = (),
    status: Callable[[], str] = str,
    coloured: bool = True,
) -> None:
    """Show the text of one text's steps, each as soon as it is done, and end its last line.

    If lines can be redrawn, ``status`` returns the line below the text. Elsewhere the text alone is written: in a pipe
    as the model wrote it, on a dumb terminal without its control characters. Tokens in ``hidden`` have no text.
    """
    pieces = stream_pieces(steps, tokenizer, hidden)
    if is_live(console):
        _show_live(console, pieces, status, coloured and shows_styles(console))
    else:
        _write(console, pieces)


def _write(console: Console, pieces: Iterable[Piece]) -> None:
    last = "\n"
    try:
        for last, _ in pieces:
            console.file.write(visible(last) if console.is_terminal else last)
            console.file.flush()
    finally:
        if not last.endswith("\n"):
            console.file.write("\n")


def _show_live(console: Console, pieces: Iterable[Piece], status: Callable[[], str], coloured: bool) -> None:
    """Print each finished line as one line, and redraw the text's last line with the status below it."""
    line, next_drawing = Text(), 0.0
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    try:
        with live:
            for text, drafted in pieces:
                style = (DRAFTED if drafted else OWN) if coloured else ""
                *ends, rest = Text(text, style).split("\n", allow_blank=True)
                for end in ends:
                    finished, line = line.append_text(end), Text()
                    live.update(_region(console, line, status()))
                    console.print(finished, soft_wrap=True)
                line.append_text(rest)
                if time.monotonic() >= next_drawing:
                    live.update(_region(console, line, status()), refresh=True)
                    next_drawing = time.monotonic() + REFRESH_SECONDS
    finally:
        if line:
            console.print(line, soft_wrap=True)


def _region(console: Console, line: Text, status: str) -> Group:
    """Return the part that is redrawn: the end of the last line, as much as the screen holds, and the status."""
    line = line.copy()
    line.expand_tabs(8)
    width, height = console.size
    offsets = list(accumulate(map(len, chop_cells(line.plain, width))))[:-1]
    rows = line.divide(offsets)[-max(1, height - 2) :]
    return Group(*rows, Text(status[: width - 1], style="dim"))


# --- figures ----------------------------------------------------------------------------------------------------------


class PlainSpeed(NamedTuple):
    """Measured speed of plain decoding; ``origin`` says on what."""

    tokens_per_second: float
    origin: str = ""


def live_line(tally: Tally, plain: PlainSpeed | None) -> str:
    """Return the figures of a growing text; empty before its first pass."""
    if not tally.passes:
        return ""
    line = f"{tally.tokens_per_pass:.2f} tokens per pass, {tally.tokens_per_second:.0f} tokens/s"
    return line if plain is None else f"{line}, {_gain(tally, plain)}"


def summary(tally: Tally, plain: PlainSpeed | None, name: str) -> str:
    """Return one line: tokens per target pass, tokens/s, speed-up; ``name`` is that of the drafter with its label."""
    if not tally.passes:
        return f"{name}: no token behind the prefill"
    line = (
        f"{name}: {tally.tokens_per_pass:.2f} tokens per target pass "
        f"({tally.accepted} of {tally.tokens} tokens drafted), {tally.tokens_per_second:.0f} tokens/s"
    )
    if plain is not None:
        line += f", {_gain(tally, plain)} ({plain.tokens_per_second:.0f} tokens/s{plain.origin})"
    return line


def _gain(tally: Tally, plain: PlainSpeed) -> str:
    return f"{tally.tokens_per_second / plain.tokens_per_second:.2f}× plain decoding"


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


class CtrlC:
    """Handler of Ctrl-C between ``with`` and its end; ``asked`` is True once it was pressed.

    The first Ctrl-C ends `until_asked` after the running item. A second one ends the block at once. Threads other than
    the main one leave the handler alone, and so does a process that ignores Ctrl-C, as one that a script began with &.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "CtrlC":
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        return self.asked and isinstance(error, KeyboardInterrupt)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def until_asked(self, items: Iterable[Item]) -> Generator[Item, None, None]:
        """Yield the items until Ctrl-C, none behind one; a generator among ``items`` is closed at the end."""
        source = iter(items)
        try:
            if self.asked:
                return
            for item in source:
                yield item
                if self.asked:
                    return
        finally:
            if isinstance(source, Generator):
                source.close()
