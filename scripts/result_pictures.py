"""Pictures of results for the docs: speed-ups over batch size, context and policy."""

from typing import Any

from matplotlib.figure import Figure as Picture

from decoding.measure.figures import settings
from decoding.measure.markdown import one_line
from decoding.measure.report.curves import draw_speedups
from decoding.measure.report.style import COLOURS, series, shade_below_one, styled
from decoding.measure.results import report_from_json

Report = dict[str, Any]


@styled
def crossover_figure(measured: Report) -> Picture:
    """Draw the speed-up against the batch size, with a panel per setting and context, for the docs."""
    report = report_from_json(measured)
    contexts = list(dict.fromkeys(row.context for row in report.cells))
    cases = [(setting, context) for setting in settings(report) for context in contexts]
    figure = Picture(figsize=(1.2 + 2.9 * len(cases), 3.9), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for axes, (setting, context) in zip(panels, cases, strict=True):
        draw_speedups(axes, report, setting, "batch_size", context)
        shade_below_one(axes)
        axes.set_title(one_line(setting if context is None else f"{setting}, {context:,} tokens"))
    panels[0].set_ylabel("speed-up over plain decoding")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
    return figure


@styled
def curve_figure(report: Report) -> Picture:
    """Draw the tokens per target pass against the trained tokens, with a line per drafter and a panel per setting."""
    figure = Picture(figsize=(7.0, 3.4), layout="constrained")
    panels = figure.subplots(1, len(report["rows"]), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, report["rows"], strict=True):
        lines: dict[str, list[tuple[float, float, float, float]]] = {}
        for name, figures in row["tokens_per_pass"].items():
            drafter, _, tokens = name.partition("@")
            value, low, high = (figures[key] for key in ("value", "low", "high"))
            lines.setdefault(drafter, []).append((int(tokens), value, value - low, high - value))
        for index, (drafter, points) in enumerate(lines.items()):
            tokens, values, below, above = zip(*points, strict=True)
            axes.errorbar(tokens, values, (below, above), capsize=2, label=drafter, **series(index))
        axes.set_xscale("log")
        axes.set_title(row["setting"])
        axes.set_xlabel("trained tokens")
    panels[0].set_ylabel("tokens per target pass")
    panels[0].legend(frameon=False)
    return figure


@styled
def policies_figure(report: Report) -> Picture:
    """Draw the speed of the default policy and of constant drafting, with a panel per temperature."""
    figure = Picture(figsize=(7.0, 3.8), layout="constrained")
    temperatures = sorted({row["temperature"] for row in report["rows"]})
    panels = figure.subplots(1, len(temperatures), sharey=True)
    for axes, temperature in zip(panels, temperatures, strict=True):
        rows = [row for row in report["rows"] if row["temperature"] == temperature]
        for number_of, drafter in enumerate(dict.fromkeys(row["drafter"] for row in rows)):
            of_drafter = [row for row in rows if row["drafter"] == drafter]
            for way, name, style in (("default", "default policy", "o-"), ("fixed", "always drafting", "s:")):
                points = {str(row["batch_size"]): row[f"{way}_over_plain"] for row in of_drafter}
                axes.plot(points.keys(), points.values(), style, color=COLOURS[number_of], label=f"{drafter}, {name}")
        shade_below_one(axes)
        axes.set_title(f"T={temperature:g}" if temperature else "greedy")
        axes.set_xlabel("texts decoded together")
    panels[0].set_ylabel("speed-up over plain decoding")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
    return figure
