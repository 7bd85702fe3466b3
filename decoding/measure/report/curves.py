"""Pictures with axes: speed-up over batch size and context, acceptance by position, v(n), predicted and measured."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from decoding.measure.markdown import one_line
from decoding.measure.names import PLAIN
from decoding.measure.report.rows import cells, methods, named, settings, speed_of
from decoding.measure.report.style import GRID, INK, panel, series, shade_below_one, styled, svg, swatch
from decoding.measure.report.words import agreement, crossing, curve, times, within

Row = dict[str, Any]


class Legend(NamedTuple):
    """A method with its colour (CSS) and its marker (a character), and a sentence on it or none."""

    name: str
    colour: str
    glyph: str
    words: str = ""


class Picture(NamedTuple):
    """An SVG element, a heading over it and the legend under it; the page folds those away that are not ``main``."""

    heading: str
    svg: str
    legend: list[Legend]
    main: bool = True


def legend(report: Row, names: Sequence[str]) -> list[Legend]:
    """Return an entry for each of the methods that is among ``names``."""
    every = methods(report)
    return [Legend(one_line(name), *swatch(every.index(name))) for name in every if name in names]


# --- speed-up over batch size and context ---------------------------------------------------------------------------

_AXES = {"batch_size": ("batch size", "batch"), "context": ("tokens of context", "context")}


def curves(report: Row, axis: str) -> list[Picture]:
    """Draw the speed-up over ``axis`` ("batch_size" or "context"): a picture for each setting and place on the other.

    Only where it was measured at two places or more, and all to one scale.
    """
    other = "context" if axis == "batch_size" else "batch_size"
    pictures = []
    top = 1.08 * max((speed_of(row) or 0.0 for row in cells(report) if row["method"] != PLAIN), default=1.0)
    for setting in settings(report):
        rows = named(cells(report), setting)
        for place in dict.fromkeys(row.get(other) for row in rows):
            here = [row for row in rows if row.get(other) == place and row["method"] != PLAIN]
            lines = [
                (row, points)
                for row in {row["method"]: row for row in here}.values()
                if len(points := curve(report, row, axis)) > 1
            ]
            if lines:
                told = f", {_AXES[other][1]} {place:,}" if place is not None else ""
                picture = _curve_picture(report, axis, one_line(f"{setting}{told}"), lines, max(top, 1.3))
                pictures.append(picture._replace(main=place == report["rows"][0].get(other)))
    return pictures


@styled
def _curve_picture(
    report: Row, axis: str, heading: str, lines: list[tuple[Row, list[tuple[int, float]]]], top: float
) -> Picture:
    figure, axes = panel(3.5, 2.7)
    every, entries = methods(report), []
    label, unit = _AXES[axis]
    for row, points in lines:
        index = every.index(row["method"]) if row["method"] in every else len(every)
        axes.plot(*zip(*points, strict=True), **series(index))
        entries.append(Legend(one_line(row["method"]), *swatch(index), crossing(points, unit)))
    places = sorted({place for _, points in lines for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(0, top)
    axes.grid(axis="y")
    shade_below_one(axes)
    title = f"Speed-up over {label}, {heading}: {'; '.join(f'{entry.name} {entry.words}' for entry in entries)}"
    return Picture(heading, svg(figure, title), entries)


# --- acceptance by position -----------------------------------------------------------------------------------------


def acceptance(report: Row) -> list[Picture]:
    """Draw unconditional acceptance at each position with 95% intervals: a picture per setting, a line per drafter."""
    rows = [row for row in report["rows"] if row.get("unconditional_acceptance")]
    return [
        _acceptance_picture(report, setting, mine) for setting in settings(report) if (mine := named(rows, setting))
    ]


@styled
def _acceptance_picture(report: Row, setting: str, rows: Sequence[Row]) -> Picture:
    figure, axes = panel(3.5, 2.5)
    every = methods(report)
    for row in rows:
        found, style = row["unconditional_acceptance"], series(every.index(row["method"]))
        positions = range(1, len(found) + 1)
        axes.plot(positions, _values(found, "value"), **style)
        axes.fill_between(
            positions, _values(found, "low"), _values(found, "high"), color=style["color"], alpha=0.13, linewidth=0
        )
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of drafts accepted so far")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y")
    picture = svg(figure, f"Acceptance by position, {one_line(setting)}")
    return Picture(one_line(setting), picture, legend(report, [row["method"] for row in rows]))


def _values(figures: Sequence[Row], key: str) -> list[float]:
    """Return ``figure[key]`` of each figure; NaN, a gap in the line, for a figure that was not measured."""
    return [math.nan if figure[key] is None else figure[key] for figure in figures]


# --- costs and predictions ------------------------------------------------------------------------------------------


@styled
def cost(report: Row) -> Picture | None:
    """Draw v(n): the cost of a target pass over n tokens, in passes over one token; None if it was not measured."""
    curve = {int(size): value for size, value in (report.get("cost_curve_ms") or {}).items()}
    if 1 not in curve:
        return None
    figure, axes = panel()
    costs = [value / curve[1] for value in curve.values()]
    axes.plot(list(curve), costs, **series(0))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(curve), [str(size) for size in curve])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(costs))
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("v(n), in passes over one token")
    axes.grid(axis="y")
    last = max(curve)
    heading = f"v(n): a pass over {last} tokens costs {curve[last] / curve[1]:.2f} passes over one"
    return Picture(heading, svg(figure, heading), [])


@styled
def predictions(report: Row) -> Picture | None:
    """Draw predicted against measured speed-up with the band of ±10%, a number per method; None without predictions."""
    rows = [row for row in report["rows"] if row.get("predicted_speedup") is not None and speed_of(row)]
    rows = [row for row in rows if row["method"] != PLAIN]
    if not rows:
        return None
    figure, axes = panel(3.5, 3.1)
    points = [(speed_of(row) or 0.0, row["predicted_speedup"]) for row in rows]
    low, high = min(map(min, points)), max(map(max, points))
    ends = [max(0.0, low - 0.15 * (high - low) - 0.1), high + 0.15 * (high - low) + 0.1]
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=GRID, alpha=0.2, linewidth=0
    )
    axes.plot(ends, ends, color=GRID, linewidth=1)
    order, entries = settings(report), []
    for index, (row, (x, y), (left, up)) in enumerate(zip(rows, points, _apart(points, *ends), strict=True), 1):
        place = order.index(row["setting"])
        style = series(place)
        axes.plot([x, (x + left) / 2], [y, (y + up) / 2], color=style["color"], linewidth=0.6)
        axes.plot(x, y, linestyle="", marker=style["marker"], color=style["color"], markersize=4)
        axes.text(left, up, str(index), ha="center", va="center", fontsize=8.5, color=INK)
        words = f"predicted {times(y)}, measured {times(x)} ({agreement(row)}{' ✓' if within(row) else ''})"
        colour, glyph = swatch(place)
        entries.append(Legend(one_line(f"{index} {row['method']}, {row['setting']}"), colour, glyph, words))
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("measured speed-up")
    axes.set_ylabel("predicted speed-up")
    axes.grid()
    heading = f"{sum(within(row) for row in rows)} of {len(rows)} predictions are within 10% (the band)"
    return Picture(heading, svg(figure, heading), entries)


def _apart(points: Sequence[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Return a place for each point's number: near the point, inside the axes, away from other numbers and points."""
    width, height = 0.07 * (high - low), 0.08 * (high - low)
    taken: list[tuple[float, float]] = []
    for x, y in points:
        turns = [(ring, turn * math.pi / 6) for ring in range(1, 12) for turn in range(12)]
        tried = [(x + 0.8 * width * r * math.sin(turn), y + 0.8 * height * r * math.cos(turn)) for r, turn in turns]
        inside = [
            (a, b)
            for a, b in tried
            if low + width / 2 < a < high - width / 2 and low + height / 2 < b < high - height / 2
        ]
        free = [
            (a, b)
            for a, b in inside
            if all(abs(a - c) > width or abs(b - d) > height for c, d in taken)
            and all(abs(a - c) > 0.6 * width or abs(b - d) > 0.6 * height for c, d in points)
        ]
        taken.append((free or inside or tried)[0])
    return taken
