"""A text as it is decoded: plain in a pipe, coloured by origin on a terminal; and its figures.

`CtrlC` ends the text, not the program.
"""

import signal
import threading
from collections.abc import Container, Generator, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.style import Style
from rich.text import Text

from decoding.generate import Step
from decoding.measure.markdown import visible
from decoding.stream import Tally, stream_pieces
from decoding.text import TextDecoder

DRAFTED, OWN = Style.parse("green"), Style.parse("bold")
"""Styles of accepted draft tokens and of the target's own; weight tells them apart if there are no colours."""


def shows_styles(console: Console) -> bool:
    """Return True if tokens are coloured by origin: on a terminal that is not dumb, without NO_COLOR."""
    is_terminal = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
    return is_terminal and console.color_system is not None


def legend() -> Text:
    """Return a line that says which style is which."""
    return Text.assemble(("green", DRAFTED), ": accepted draft tokens; ", ("bold", OWN), ": the target's own tokens")


def show_steps(
    console: Console, steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = (), coloured: bool = True
) -> None:
    """Write the text of one text's steps, each as soon as it is done, and end its last line.

    In a pipe it is the text as the model wrote it, on a terminal it has no control characters. Tokens in ``hidden``
    have no text.
    """
    styled, last = coloured and shows_styles(console), "\n"
    try:
        for last, drafted in stream_pieces(steps, tokenizer, hidden):
            shown = visible(last) if console.is_terminal else last
            console.file.write((DRAFTED if drafted else OWN).render(shown) if styled else shown)
            console.file.flush()
    finally:
        if not last.endswith("\n"):
            console.file.write("\n")


# --- figures ----------------------------------------------------------------------------------------------------------


def summary(tally: Tally, name: str) -> str:
    """Return one line: tokens per target pass and tokens/s; ``name`` is that of the drafter with its label."""
    if not tally.passes:
        return f"{name}: no token behind the prefill"
    return (
        f"{name}: {tally.tokens_per_pass:.2f} tokens per target pass "
        f"({tally.accepted} of {tally.tokens} tokens drafted), {tally.tokens_per_second:.0f} tokens/s"
    )


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
