"""Prints a text while it is decoded, and then its figures. Ctrl-C ends the text but not the program."""

import signal
import threading
from collections.abc import Container, Generator, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.style import Style
from rich.text import Text

from decoding.measure.markdown import visible
from decoding.text import Step, Tally, TextDecoder, stream_pieces

DRAFTED, OWN = Style.parse("green"), Style.parse("bold")
"""Styles of accepted draft tokens and of the target's tokens; bold is visible even without colours."""


def shows_styles(console: Console) -> bool:
    """Return True if tokens are coloured by origin: on a capable terminal, without NO_COLOR."""
    is_terminal = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
    return is_terminal and console.color_system is not None


def legend() -> Text:
    """Return a line that explains the styles."""
    return Text.assemble(("green", DRAFTED), ": accepted draft tokens; ", ("bold", OWN), ": the target's own tokens")


def show_steps(
    console: Console, steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = (), coloured: bool = True
) -> None:
    """Write a text step by step and end its last line; tokens in ``hidden`` are left out.

    A pipe receives the text as the model wrote it. On a terminal, control characters are removed.
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
    """Return one line with tokens per target pass and tokens/s; ``name`` is the name of the drafter, with its label."""
    if not tally.passes:
        return f"{name}: no token after the prefill"
    return (
        f"{name}: {tally.tokens_per_pass:.2f} tokens per target pass "
        f"({tally.accepted} of {tally.tokens} tokens drafted), {tally.tokens_per_second:.0f} tokens/s"
    )


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


class CtrlC:
    """Handler of Ctrl-C inside its context; ``asked`` is True once Ctrl-C was pressed.

    The first Ctrl-C ends `until_asked` after the current item; a second one ends the block immediately. The handler
    does nothing outside the main thread, or if the process ignores Ctrl-C, as in a background job of a script.
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
        """Yield items until Ctrl-C; close ``items`` at the end if it is a generator."""
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
