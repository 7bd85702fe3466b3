"""Pictures of HTML boxes, whose text keeps its size on a phone: speed-ups, tasks, accepted lengths, shares of time."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from decoding.measure.figures import NONE, estimate
from decoding.measure.markdown import one_line
from decoding.measure.names import PLAIN
from decoding.measure.report.rows import is_peer, methods, named, settings, speed_of
from decoding.measure.report.words import times

Row = dict[str, Any]
_MOST_LENGTHS = 9
"""Accepted lengths from this one on share a segment."""
_FULL_COLOUR = math.log(3)
"""|log speed-up| from which a cell has its full colour."""


class Bar(NamedTuple):
    """A speed-up; lengths are percentages of the track. A part that was not measured is None."""

    name: str
    shown: str
    median: str
    kind: str
    """CSS classes: "peer" or "ours", and "lossy"."""
    width: float | None
    interval: tuple[float, float] | None
    middle: float | None
    quartiles: tuple[float, float] | None


class Chart(NamedTuple):
    """The bars of one setting, and the place of speed-up 1 in their tracks, in percent."""

    setting: str
    one: float
    bars: list[Bar]


def speedups(report: Row) -> list[Chart]:
    """Return a chart for each setting, all to one scale."""
    rows = report["rows"]
    scale = 100 / max((*filter(None, (_longest(row) for row in rows)), 1.0)) / 1.02
    return [
        Chart(one_line(setting), scale, [_bar(row, scale) for row in named(rows, setting) if row["method"] != PLAIN])
        for setting in settings(report)
    ]


def _longest(row: Row) -> float | None:
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    return max(filter(None, (totals.get("value"), totals.get("high"), pairs.get("high_quartile"))), default=None)


def _bar(row: Row, scale: float) -> Bar:
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    value, median = totals.get("value"), pairs.get("median")
    return Bar(
        name=one_line(row["method"]),
        shown=estimate(totals, "×") if value is not None else times(speed_of(row)),
        median=times(median),
        kind=("peer" if is_peer(row) else "ours") + (" lossy" if row["label"] == "lossy" else ""),
        width=None if value is None else value * scale,
        interval=_pair(totals, "low", "high", scale),
        middle=None if median is None else median * scale,
        quartiles=_pair(pairs, "low_quartile", "high_quartile", scale),
    )


def _pair(figure: Row, low: str, high: str, scale: float) -> tuple[float, float] | None:
    """Return (start, length) of a range in percent of the track."""
    if figure.get(low) is None or figure.get(high) is None:
        return None
    return figure[low] * scale, (figure[high] - figure[low]) * scale


class Cell(NamedTuple):
    """A speed-up in a matrix: its text, whether it is a gain, and the strength of its colour in percent."""

    shown: str
    kind: str
    strength: int


class Matrix(NamedTuple):
    """Speed-ups of one setting: a row of cells for each task, in the order of the methods."""

    setting: str
    methods: list[str]
    rows: list[tuple[str, str, list[Cell]]]
    """(task, number of prompts, cells)"""


def tasks(report: Row) -> list[Matrix]:
    """Return a matrix of tasks and methods, peers last, for each setting; none if the prompts have no tasks."""
    found = report.get("tasks") or []
    matrices = []
    for setting in dict.fromkeys(row["setting"] for row in found):
        rows = [row for row in named(found, setting) if speed_of(row) is not None and row["method"] != PLAIN]
        timed = {row["method"]: is_peer(row) for row in rows}
        names = sorted((name for name in methods(report) if name in timed), key=lambda name: timed[name])
        lines = []
        for task in dict.fromkeys(row["task"] for row in rows):
            mine = {row["method"]: row for row in rows if row["task"] == task}
            prompts = next((f"{row['prompts']:,}" for row in mine.values() if row.get("prompts")), NONE)
            lines.append((one_line(task), prompts, [_cell(mine.get(name)) for name in names]))
        if lines:
            matrices.append(Matrix(one_line(setting), [one_line(name) for name in names], lines))
    return matrices


def _cell(row: Row | None) -> Cell:
    speed = None if row is None else speed_of(row)
    if not speed:
        return Cell(NONE, "", 0)
    strength = min(abs(math.log(speed)) / _FULL_COLOUR, 1)
    return Cell(times(speed), "gain" if speed >= 1 else "loss", round(8 + 42 * strength))


class Segment(NamedTuple):
    """A part of a bar: its width in percent, the text that fits into it (or none), its description and CSS class."""

    width: float
    shown: str
    title: str
    kind: str


class Stack(NamedTuple):
    """A bar of segments that fill it, a name before it, and a figure behind it."""

    name: str
    segments: list[Segment]
    figure: str


def accepted_lengths(report: Row) -> list[tuple[str, list[Stack]]]:
    """Return for each setting a stack per drafter: the shares of target passes by their accepted draft tokens.

    Segments are labelled by the accepted length; those of at least `_MOST_LENGTHS` tokens share one.
    """
    return _stacks(report, _lengths)


def _lengths(row: Row) -> Stack | None:
    counts = {int(length): count for length, count in (row.get("accepted_length_histogram") or {}).items() if count}
    passes = sum(counts.values())
    if not passes or not row.get("conditional_acceptance"):
        return None
    grouped: dict[int, int] = {}
    for length in sorted(counts):
        place = min(length, _MOST_LENGTHS)
        grouped[place] = grouped.get(place, 0) + counts[length]
    segments = []
    for place, count in grouped.items():
        share = 100 * count / passes
        name = f"{place}+" if place == _MOST_LENGTHS and max(counts) > place else str(place)
        title = f"{name} accepted: {share:.0f}% of {passes:,} passes"
        segments.append(Segment(share, name if share >= 5 else "", title, f"length-{place}"))
    return Stack(one_line(row["method"]), segments, estimate(row.get("tokens_per_pass")))


def time_splits(report: Row) -> list[tuple[str, list[Stack]]]:
    """Return for each setting a stack per method: the shares of decoding time by what takes it."""
    return _stacks(report, _split)


def _split(row: Row) -> Stack | None:
    split = row.get("time_split")
    if not split:
        return None
    segments = []
    for part in ("draft", "verify", "overhead"):
        share = 100 * split[part]
        if share > 0:
            shown = f"{share:.0f}%" if share >= 11 else ""
            segments.append(Segment(share, shown, f"{part}: {share:.1f}%", f"time-{part}"))
    return Stack(one_line(row["method"]), segments, "")


def _stacks(report: Row, stack: Any) -> list[tuple[str, list[Stack]]]:
    found = []
    for setting in settings(report):
        stacks: Sequence[Stack | None] = [stack(row) for row in named(report["rows"], setting)]
        drawn = [each for each in stacks if each is not None]
        if drawn:
            found.append((one_line(setting), drawn))
    return found


def lengths_shown(stacks: Sequence[tuple[str, Sequence[Stack]]]) -> list[int]:
    """Return the accepted lengths that have a segment anywhere, for the legend."""
    kinds = {segment.kind for _, drawn in stacks for stack in drawn for segment in stack.segments}
    return [length for length in range(_MOST_LENGTHS + 1) if f"length-{length}" in kinds]
