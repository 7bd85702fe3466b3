"""Texts side by side as they are decoded, each with its own clock."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from decoding.generate import Step
from decoding.stopping import TextDecoder
from decoding.stream import Detokenizer, Piece, step_pieces
from decoding.tally import Tally
from trainer.terminal.streaming import Pace, has_colours, is_live, styled

LEAST_COLUMN = 38
"""Fewest characters of a column that is worth reading."""


class Lane:
    """One of several texts that are decoded in turns: its steps, and all that they have made so far."""

    def __init__(
        self, name: str, steps: Iterable[Step], tokenizer: TextDecoder, hidden: Sequence[int], drafts: bool
    ) -> None:
        """``hidden``: tokens without text, the EOS. ``drafts``: False for plain decoding, which has no colours."""
        self.name, self.drafts = name, drafts
        self.tally, self.tokens = Tally(), list[int]()
        self._hidden, self._detokenizer = hidden, Detokenizer(tokenizer)
        self._steps = iter(steps)
        self.done = False

    @property
    def seconds(self) -> float:
        """Seconds of its own steps, the prefill included."""
        return self.tally.prefill_seconds + self.tally.total_seconds

    def speed(self) -> str:
        """Return its speed so far in words."""
        return f"{self.tally.tokens_per_second:.0f} tokens/s after {len(self.tokens)} tokens"

    def advance(self) -> list[Piece]:
        """Run one step; return its pieces of text, at the end those that were held back."""
        step = next(self._steps, None)
        if step is None:
            self.done = True
            rest = self._detokenizer.flush()
            return [Piece(rest, drafted=False)] if rest else []
        self.tally.add(step)
        self.tokens += step.tokens
        return list(step_pieces(step, self._detokenizer, self._hidden))


def in_turns(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, list[Piece]]]:
    """Yield each lane's steps, the next one always of the lane whose own clock is behind.

    So the lanes advance beside each other as they would on machines of their own, and no step runs while another does.
    """
    while running := [lane for lane in lanes if not lane.done]:
        lane = min(running, key=lambda lane: lane.seconds)
        yield lane, lane.advance()


def one_by_one(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, list[Piece]]]:
    """Yield all steps of the first lane, then those of the next."""
    for lane in lanes:
        while not lane.done:
            yield lane, lane.advance()


def fits_columns(console: Console, count: int = 2) -> bool:
    """Return True where this many columns can be redrawn side by side."""
    return is_live(console) and console.width >= count * (LEAST_COLUMN + 2)


class Columns:
    """Lanes side by side on a terminal, between ``with`` and its end, which prints them whole."""

    def __init__(self, console: Console, lanes: Sequence[Lane]) -> None:
        self._console, self._lanes = console, lanes
        self._texts = {id(lane): Text() for lane in lanes}
        self._pace = Pace()
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> "Columns":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        self._console.print(self._table(None))

    def add(self, lane: Lane, pieces: Sequence[Piece]) -> None:
        """Append a lane's pieces, and draw all lanes unless the last drawing is too recent."""
        coloured = lane.drafts and has_colours(self._console)
        text = styled(pieces) if coloured else Text("".join(piece.text for piece in pieces))
        self._texts[id(lane)] += text
        most = max(1, self._console.height - 4)
        self._pace.draw(lambda: self._live.update(self._table(most), refresh=True))

    def _table(self, most: int | None) -> Table:
        """Return the columns, of each text the last ``most`` rows (None: all)."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="bold underline")
        width = (self._console.width - 2 * (len(self._lanes) - 1)) // len(self._lanes)
        cells = []
        for lane in self._lanes:
            table.add_column(Text(lane.name), width=width, overflow="fold")
            rows = list(self._texts[id(lane)].wrap(self._console, width, overflow="fold", tab_size=8))
            cells.append(Group(*(rows if most is None else rows[-most:]), Text(lane.speed(), style="dim")))
        table.add_row(*cells)
        return table
