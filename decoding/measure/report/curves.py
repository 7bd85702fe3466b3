"""Plots of the speed-up against batch size and context, the acceptance by position, server load, and v(n)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from decoding.measure.figures import OTHER, PLAIN, Axis, at, curve, methods, named, settings, speed_of, value_of
from decoding.measure.markdown import one_line
from decoding.measure.report.style import panel, series, shade_below_one, styled, svg, swatch
from decoding.measure.results import Report, ReportRow

_AXES: dict[Axis, tuple[str, str]] = {
    "batch_size": ("batch size", "batch"),
    "context": ("tokens of context", "context"),
}


class Legend(NamedTuple):
    """A method with its colour (CSS) and its marker (a character)."""

    name: str
    colour: str
    glyph: str


class Picture(NamedTuple):
    """An SVG element with heading and legend. The page folds a picture that is not ``main``."""

    heading: str
    svg: str
    legend: list[Legend]
    main: bool = True


@styled
def speedup_curves(report: Report, axis: Axis) -> list[Picture]:
    """Draw the speed-up against ``axis``, with a picture for each setting and each value of the other axis.

    A method needs at least two measured points. All pictures have the same scale.
    """
    other = OTHER[axis]
    pictures = []
    for setting in settings(report):
        for fixed in dict.fromkeys(at(row, other) for row in named(report.cells, setting)):
            figure, axes = panel(3.5, 2.6)
            if drawn := draw_speedups(axes, report, setting, axis, fixed):
                axes.set_ylabel("speed-up over plain decoding")
                shade_below_one(axes)
                heading = one_line(setting if fixed is None else f"{setting}, {_AXES[other][1]} {fixed:,}")
                picture = svg(figure, f"Speed-up over {_AXES[axis][0]}, {heading}")
                main = fixed == at(report.rows[0], other)
                pictures.append(Picture(heading, picture, _legend(report, drawn), main))
    return pictures


def draw_speedups(axes: Axes, report: Report, setting: str, axis: Axis, fixed: int | None) -> list[str]:
    """Draw a line for each method that was timed at two or more points of ``axis``; return the methods' names."""
    other = OTHER[axis]
    rows = {row.method: row for row in named(report.cells, setting) if at(row, other) == fixed}
    lines = {name: curve(report, rows[name], axis) for name in methods(report) if name in rows}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=one_line(name), **series(methods(report).index(name)))
    label = "requests at a time" if report.served and axis == "batch_size" else _AXES[axis][0]
    over_sizes(axes, sorted({size for points in lines.values() for size, _ in points}), label)
    top = 1.08 * max((speed_of(row) or 0.0 for row in report.cells if row.method != PLAIN), default=1.0)
    axes.set_ylim(0, max(top, 1.3))
    return list(lines)


@styled
def load_curves(report: Report) -> list[Picture]:
    """Draw a server's throughput, time to first token and time per token against its load, for each setting."""
    pictures = []
    names = [*methods(report), PLAIN]
    for setting in settings(report) if report.served else ():
        for heading, figure_of in _LOADED.items():
            loaded = named(report.cells, setting)
            lines = {
                name: [
                    (row.batch_size or 1, value)
                    for row in loaded
                    if row.method == name and (value := figure_of(row)) is not None
                ]
                for name in names
            }
            lines = {name: points for name, points in lines.items() if len(points) > 1}
            if not lines:
                continue
            figure, axes = panel(3.5, 2.5)
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), **series(names.index(name)))
            over_sizes(axes, sorted({size for points in lines.values() for size, _ in points}), "requests at a time")
            axes.set_ylim(bottom=0)
            legend = [Legend(one_line(name), *swatch(names.index(name))) for name in lines]
            title = one_line(f"{heading}, {setting}")
            pictures.append(Picture(title, svg(figure, title), legend))
    return pictures


_LOADED: dict[str, Callable[[ReportRow], float | None]] = {
    "Total output tokens/s": lambda row: value_of(row.tokens_per_second),
    "Median ms to the first token": lambda row: row.latency.ttft_ms.p50 if row.latency else None,
    "Median ms per further token": lambda row: row.latency.tpot_ms.p50 if row.latency else None,
}


def over_sizes(axes: Axes, sizes: Sequence[int], label: str) -> None:
    """Give the plot a logarithmic x axis (base 2) with these sizes as ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(axis="y")


def _legend(report: Report, names: Sequence[str]) -> list[Legend]:
    every = methods(report)
    return [Legend(one_line(name), *swatch(every.index(name))) for name in every if name in names]


def acceptance_curves(report: Report) -> list[Picture]:
    """Draw per-position acceptance with 95% intervals, with a picture for each setting and a line for each drafter."""
    rows = [row for row in report.rows if row.conditional_acceptance]
    return [
        _acceptance_picture(report, setting, mine) for setting in settings(report) if (mine := named(rows, setting))
    ]


@styled
def _acceptance_picture(report: Report, setting: str, rows: Sequence[ReportRow]) -> Picture:
    figure, axes = panel(3.5, 2.5)
    every = methods(report)
    for row in rows:
        figures, style = row.conditional_acceptance, series(every.index(row.method))
        ends = [(figure.value, figure.low, figure.high) for figure in figures]
        value, low, high = ([math.nan if end is None else end for end in column] for column in zip(*ends, strict=True))
        positions = range(1, len(figures) + 1)
        axes.plot(positions, value, **style)
        axes.fill_between(positions, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("per-position acceptance")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y")
    picture = svg(figure, f"Per-position acceptance, {one_line(setting)}")
    return Picture(one_line(setting), picture, _legend(report, [row.method for row in rows]))


@styled
def cost_curve(report: Report) -> Picture | None:
    """Draw v(n), the cost of a target pass over n tokens in units of a one-token pass; None if it was not measured."""
    curve = report.cost_curve_ms
    if 1 not in curve:
        return None
    figure, axes = panel()
    costs = [value / curve[1] for value in curve.values()]
    axes.plot(list(curve), costs, **series(0))
    over_sizes(axes, list(curve), "tokens in the pass")
    axes.set_ylim(0, 1.1 * max(costs))
    axes.set_ylabel("v(n), in passes over one token")
    heading = f"v(n): a pass over {max(curve)} tokens costs as much as {costs[-1]:.2f} passes over one"
    return Picture(heading, svg(figure, heading), [])
