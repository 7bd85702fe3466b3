"""Plots for pages of text, each in one picture on paper: the speed-ups alone, and the speed-ups over batch size."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decoding.measure.markdown import one_line
from decoding.measure.report.rows import cells, is_peer, methods, named, settings
from decoding.measure.report.style import COLOURS, series, shade_below_one
from decoding.measure.report.words import curve, times


@matplotlib.rc_context({"text.parse_math": False})  # a dollar sign in a name is printed, and starts no formula
def speedup_figure(report: dict[str, Any]) -> Figure:
    """Draw a bar per method under each setting: the ratio of all tokens/s with its interval; lossy methods hatched.

    A dot marks the median of paired runs, its line the quartiles.
    """
    groups = [(setting, named(report["rows"], setting)[::-1]) for setting in settings(report)]
    counts = [len(rows) for _, rows in groups]
    figure = Figure(figsize=(7.5, 0.8 + 0.34 * sum(counts)))
    all_axes = figure.subplots(len(groups), 1, height_ratios=counts, sharex=True, squeeze=False)
    for axes, (setting, rows) in zip(all_axes[:, 0], groups, strict=True):
        for position, row in enumerate(rows):
            _draw(axes, position, row)
        axes.set_yticks(range(len(rows)), [one_line(row["method"]) for row in rows], fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(one_line(setting), loc="left", fontsize=10)
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel(
        "speed-up over plain decoding: bar and label, all tokens/s with 95% interval;\n"
        "dot and line, median and quartiles of paired runs (hatched: lossy)"
    )
    figure.tight_layout()
    return figure


@matplotlib.rc_context({"text.parse_math": False})
def crossover_figure(report: dict[str, Any]) -> Figure:
    """Draw the speed-up over the batch size, a line per method, in a panel for each setting and context."""
    places = [(setting, context) for setting in settings(report) for context in _contexts(report)]
    figure = Figure(figsize=(1.2 + 2.9 * len(places), 3.9), layout="constrained")
    panels = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for axes, (setting, context) in zip(panels, places, strict=True):
        rows = {row["method"]: row for row in named(cells(report), setting) if row.get("context") == context}
        for index, method in enumerate(methods(report)):
            if method in rows and len(points := curve(report, rows[method], "batch_size")) > 1:
                axes.plot(*zip(*points, strict=True), label=one_line(method), **series(index))
        axes.set_xscale("log", base=2)
        sizes = sorted({row["batch_size"] for row in cells(report)})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)
        axes.set_title(
            one_line(setting if context is None else f"{setting}, {context:,} tokens"), loc="left", fontsize=10
        )
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:  # with the limits that all of them have come to share
        shade_below_one(axes)
    panels[0].set_ylabel("speed-up over plain decoding")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _contexts(report: dict[str, Any]) -> list[int | None]:
    return list(dict.fromkeys(row.get("context") for row in cells(report)))


def _draw(axes: Axes, position: int, row: dict[str, Any]) -> None:
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    right = 0.0
    if totals.get("value") is not None:
        value = totals["value"]
        low, high = (value if totals[end] is None else totals[end] for end in ("low", "high"))
        axes.barh(
            position,
            value,
            xerr=[[max(value - low, 0)], [max(high - value, 0)]],
            color="#bbbbbb" if is_peer(row) else COLOURS[0],
            hatch="//" if row["label"] == "lossy" else None,
            edgecolor="white",
            error_kw={"linewidth": 1, "capsize": 2},
        )
        right = high
    if pairs.get("median") is not None:
        ends = (pairs["low_quartile"], pairs["high_quartile"])
        axes.plot(ends, (position + 0.22,) * 2, color=COLOURS[1], linewidth=1)
        axes.plot(pairs["median"], position + 0.22, "o", color=COLOURS[1], markersize=3)
        right = max(right, pairs["high_quartile"])
    shown = totals.get("value") if totals.get("value") is not None else pairs.get("median")
    if shown is not None:
        axes.text(right + 0.03, position, times(shown), va="center", fontsize=8)
