"""A text as it is decoded: plain in a pipe, coloured by origin above a live line on a terminal."""

import time
from collections.abc import Callable, Container, Iterable
from itertools import groupby
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from decoding.generate import Step
from decoding.measure.markdown import visible
from decoding.stopping import TextDecoder
from decoding.stream import Detokenizer, Piece, step_pieces

DRAFTED = "green"
WRITTEN = "bold"
"""Styles of tokens by their origin; weight tells them apart where colours do not."""
REFRESH_SECONDS = 1 / 30
"""Least time between two drawings of the live part."""


class Pace:
    """A pace of drawings: `REFRESH_SECONDS` apart, or three times as long as the last one took, as a long text does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = float("-inf")

    def draw(self, drawing: Callable[[], None]) -> None:
        """Call ``drawing`` unless the last one is too recent."""
        begun = self._clock()
        if begun >= self._next:
            drawing()
            ended = self._clock()
            self._next = ended + max(REFRESH_SECONDS, 3 * (ended - begun))


def has_colours(console: Console) -> bool:
    """Return True where styles are printed: on a terminal that is not dumb, without NO_COLOR."""
    return console.color_system is not None


def is_live(console: Console) -> bool:
    """Return True where lines can be redrawn: on a terminal that is not dumb. Colours forced upon a pipe are not it."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


def legend() -> Text:
    """Return a line that says which style is which."""
    return Text.assemble(
        ("green", DRAFTED), ": accepted draft tokens; ", ("bold", WRITTEN), ": tokens that the target wrote itself"
    )


def styled(pieces: Iterable[Piece]) -> Text:
    """Return pieces as a terminal shows them, in the style of their origin."""
    text = Text()
    for drafted, run in groupby(pieces, key=lambda piece: piece.drafted):
        text.append("".join(piece.text for piece in run), DRAFTED if drafted else WRITTEN)
    return text


def folded(text: Text, width: int) -> list[Text]:
    """Split a text of one line where a terminal of this width would."""
    offsets, used = [], 0
    for place, character in enumerate(text.plain):
        cells = cell_len(character)
        if used + cells > width:
            offsets.append(place)
            used = 0
        used += cells
    return list(text.divide(offsets))


class StreamedText:
    """A growing text on a console, between ``with`` and its end, which ends its last line.

    Where lines can be redrawn, ``status`` returns the line below the text, asked at each drawing; finished lines are
    printed above, each as one line, and only the text's last line is redrawn. Elsewhere the text alone is written: in
    a pipe as the model wrote it, on a dumb terminal without its control characters.
    """

    def __init__(self, console: Console, status: Callable[[], str] = str, coloured: bool = True) -> None:
        self._console, self._status = console, status
        self._coloured = coloured and has_colours(console)
        self._last_line = Text()
        self._ends_line = True
        self._pace = Pace()
        self._live: Live | None = None
        if is_live(console):
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )

    def __enter__(self) -> "StreamedText":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if self._last_line:
                self._print(self._last_line)
        elif not self._ends_line and not isinstance(error, BrokenPipeError):
            self._write("\n")

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append the pieces of a step, and draw them unless the last drawing is too recent."""
        pieces = list(pieces)
        plain = "".join(piece.text for piece in pieces)
        if not plain:
            return
        self._ends_line = plain.endswith("\n")
        text = styled(pieces) if self._coloured else Text(plain)
        if self._live is not None:
            self._draw(self._live, text)
        elif self._coloured:  # forced upon a pipe
            self._console.print(text, end="", soft_wrap=True)
        else:
            self._write(plain)

    def _draw(self, live: Live, text: Text) -> None:
        *lines, rest = text.split("\n", allow_blank=True)
        for line in lines:
            finished, self._last_line = self._last_line + line, Text()
            live.update(self._region())
            self._print(finished)
        self._last_line = self._last_line + rest
        self._pace.draw(lambda: live.update(self._region(), refresh=True))

    def _write(self, text: str) -> None:
        self._console.file.write(visible(text) if self._console.is_terminal else text)
        self._console.file.flush()

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _region(self) -> Group:
        """Return the part that is redrawn: the end of the last line, as much as the screen holds, and the status."""
        line = self._last_line.copy()
        line.expand_tabs(8)
        width, height = self._console.size
        rows = folded(line, width)[-max(1, height - 2) :]
        return Group(*rows, Text(self._status()[: width - 1], style="dim"))


def show_steps(
    console: Console,
    steps: Iterable[Step],
    tokenizer: TextDecoder,
    hidden: Container[int] = (),
    status: Callable[[], str] = str,
    coloured: bool = True,
) -> None:
    """Show the text of one text's steps, each as soon as it is done; the options are those of `StreamedText`."""
    detokenizer = Detokenizer(tokenizer)
    with StreamedText(console, status, coloured) as text:
        for step in steps:
            text.add(step_pieces(step, detokenizer, hidden))
        if rest := detokenizer.flush():
            text.add([Piece(rest, drafted=False)])
