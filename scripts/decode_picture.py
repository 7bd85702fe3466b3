"""The animated picture of decoding: an SVG with CSS animations, drawn from a report of `record_decode.py`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

PLAYED = 9.0
"""Approximate duration of the slower run in the picture, in seconds. The measured time is multiplied by a whole number
to come close to this duration.
"""
LEAD, HOLD = 0.8, 4.5
"""Seconds before the first token, and seconds after the last token."""
CHARACTER, LINE = 8.4, 20.0
"""Width of a character and height of a line, in user units."""
COLUMNS = 41
"""Largest number of characters in a line."""
LETTER = 0.56
"""Average width of a letter in a sans-serif font, relative to the font size; few fonts are wider."""
RUNS = ("plain", "speculative")
INSET, HEADER, MARGIN = 14.0, 66.0, 16.0


class Mark(NamedTuple):
    """A token with the column and line (from 0) of its first character, and the step that wrote it."""

    text: str
    column: int
    line: int
    step: int
    drafted: bool


def laid_out(steps: Sequence[Mapping[str, Any]], columns: int = COLUMNS) -> list[Mark]:
    """Lay out the tokens of a report's steps in lines of at most ``columns`` characters, broken between tokens."""
    marks, column, line = [], 0, 0
    for number, step in enumerate(steps):
        for place, text in enumerate(step["tokens"]):
            for part, newline in _lines(text.expandtabs(4)):
                word = part.strip(" ")
                before = len(part) - len(part.lstrip(" "))
                for begin in range(0, len(word), columns):
                    piece = word[begin : begin + columns]
                    if column + before + len(piece) > columns:
                        column, line, before = 0, line + 1, 0
                    marks.append(Mark(piece, column + before, line, number, place < step["accepted"]))
                    column, before = column + before + len(piece), 0
                column += len(part) - len(part.rstrip(" ")) if word else len(part)
                if newline:
                    column, line = 0, line + 1
    return marks


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a token's text, each with True if a newline ends it."""
    *whole, last = text.split("\n")
    yield from ((part, True) for part in whole)
    yield last, False


class Counter(NamedTuple):
    """Figures of a run, each of which is shown from one moment until the next; moments are in percent of the loop."""

    text: str
    at: float
    until: float


class Panel(NamedTuple):
    """One run in the picture: its corner, its tokens, and the moments of its steps in percent of the loop.

    ``key`` is the prefix of the names of the panel's animations. ``share``: the seconds of this run divided by the
    seconds of the slower run.
    """

    key: str
    title: str
    x: float
    y: float
    marks: list[Mark]
    moments: list[float]
    counters: list[Counter]
    took: str
    share: float


class Clock(NamedTuple):
    """Time in the picture: a real second takes ``stretch`` seconds, and the picture restarts after ``loop`` seconds."""

    stretch: int
    loop: float

    @staticmethod
    def of(report: Mapping[str, Any]) -> "Clock":
        slower = max(report[run]["seconds"] for run in RUNS)
        stretch = max(1, round(PLAYED / slower))
        return Clock(stretch, LEAD + slower * stretch + HOLD)

    def moment(self, seconds: float) -> float:
        """Return how much of the loop, in percent, has passed this many seconds after the first token appears."""
        return 100 * (LEAD + seconds * self.stretch) / self.loop


def picture(report: Mapping[str, Any], narrow: bool = False) -> str:
    """Return the SVG of a report: two runs next to each other, or one above the other if ``narrow``."""
    clock = Clock.of(report)
    marks = {run: laid_out(report[run]["steps"]) for run in RUNS}
    width = COLUMNS * CHARACTER + 2 * INSET
    height = HEADER + (max(mark.line for each in marks.values() for mark in each) + 1) * LINE + INSET
    full = (1 if narrow else 2) * (width + MARGIN) + MARGIN
    prompt = _wrapped(report["prompt"], 14, full - 2 * MARGIN)
    caption = _wrapped(_told(report, clock), 13, full - 2 * MARGIN)
    top = MARGIN + (len(prompt) + len(caption)) * LINE + 8
    right, down = (0.0, height + MARGIN) if narrow else (width + MARGIN, 0.0)
    panels = [
        _panel(report, run, (MARGIN + place * right, top + place * down), marks[run], clock)
        for place, run in enumerate(RUNS)
    ]
    bottom = panels[-1].y + height
    rendered: str = _template().render(
        report=report,
        prompt=prompt,
        caption=caption,
        panels=panels,
        stretch=clock.stretch,
        loop_seconds=clock.loop,
        speedup=f"{report['speedup']:.2f}×",
        narrow=narrow,
        full=full,
        tall=bottom + (24 if narrow else 0) + 24 + MARGIN,
        width=width,
        height=height,
        bottom=bottom,
    )
    return rendered


def _told(report: Mapping[str, Any], clock: Clock) -> str:
    """Return the line below the prompt: models, machine, and by how much time is stretched."""
    threads = report["hardware"]["threads"]
    machine = f"{report['hardware']['processor']}, {threads} thread{'s' * (threads > 1)}"
    return f"{report['target']} · {report['drafter']} · {machine} · slowed {clock.stretch} times"


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sizes = {"character": CHARACTER, "line_height": LINE, "inset": INSET, "header": HEADER, "margin": MARGIN}
    environment.globals.update(sizes)
    environment.filters["px"] = lambda value: f"{value:.2f}".rstrip("0").rstrip(".")
    environment.filters["share"] = lambda value: f"{value:.3f}%"
    return environment.get_template("decode_picture.svg.j2")


def _panel(report: Mapping[str, Any], run: str, corner: tuple[float, float], marks: list[Mark], clock: Clock) -> Panel:
    told = report[run]
    ends = list(accumulate(step["seconds"] for step in told["steps"]))
    moments = [clock.moment(end) for end in ends]
    first, *later = accumulate(len(step["tokens"]) for step in told["steps"])  # rates exclude the token of the prefill
    texts = [f"{first} token"]
    for passes, (tokens, end) in enumerate(zip(later, ends[1:], strict=True), start=1):
        written = tokens - first
        texts.append(f"{tokens} tokens · {written / passes:.2f} per pass · {written / end:.0f} tokens/s")
    slower = max(report[each]["seconds"] for each in RUNS)
    return Panel(
        run[0],
        f"{run} decoding",
        *corner,
        marks,
        moments,
        [Counter(*each) for each in zip(texts, moments, [*moments[1:], 100.0], strict=True)],
        f"{told['seconds']:.3f} s",
        told["seconds"] / slower,
    )


def _wrapped(text: str, size: int, width: float) -> list[str]:
    """Break a text with letters of this size into lines between words."""
    columns, lines = int(width / (LETTER * size)), [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > columns and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
