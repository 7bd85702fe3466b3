"""The report as a self-contained HTML page: the answer and pictures first, then folded tables and settings."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from decoding.measure.figures import (
    PLAIN,
    answers,
    caption,
    estimate,
    greedy_sentence,
    is_peer,
    named,
    settings,
    speed_of,
    times,
)
from decoding.measure.markdown import one_line, visible
from decoding.measure.report.curves import acceptance_curves, cost_curve, load_curves, speedup_curves
from decoding.measure.report.style import css
from decoding.measure.report.tables import page_tables
from decoding.measure.results import Figure, Report, ReportRow


def write_html(report: Report, path: Path) -> None:
    """Write the page as one file without external resources."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # No-break spaces keep a figure next to its interval or count.
    broken = re.compile(r" (?=[\[(])|(?<=,) (?=\d+\.\d+\])|(?<=median) | (?=/ )|(?<= /) ")
    environment.filters["whole"] = lambda cell: broken.sub("\N{NO-BREAK SPACE}", cell)
    lead, *others = answers(report)
    page = environment.get_template("report.html.j2").render(
        title=one_line(report.title or "Headstart report"),
        colours=css(),
        lead=lead,
        others=others,
        caption=caption(report),
        sentences=[*filter(None, [greedy_sentence(report)]), *report.notes],
        speedups=bar_charts(report),
        over=f"Over {'concurrency' if report.served else 'batch size'}",
        over_batch=[*speedup_curves(report, "batch_size"), *load_curves(report)],
        over_context=speedup_curves(report, "context"),
        acceptance=acceptance_curves(report),
        cost=cost_curve(report),
        samples=_samples(report),
        tables=page_tables(report),
        about=_about(report),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


class Bar(NamedTuple):
    """The bar of a speed-up, with lengths in percent of the bar's track; parts that were not measured are None."""

    name: str
    shown: str
    kind: str
    """CSS classes: "peer" or "ours", and "lossy"."""
    width: float | None
    interval: tuple[float, float] | None
    """Start and length of the part of the bar that shows the interval."""


class BarChart(NamedTuple):
    """The bars of one setting, and the position of a speed-up of 1 in percent of the track."""

    setting: str
    one: float
    bars: list[Bar]


def bar_charts(report: Report) -> list[BarChart]:
    """Return a chart per setting, all with the same scale."""
    rows = report.rows
    highest = (row.speedup_of_totals.high or 0.0 for row in rows if row.speedup_of_totals)
    longest = max([1.0, *highest, *(speed_of(row) or 0.0 for row in rows)])
    scale = 100 / longest / 1.02
    return [
        BarChart(one_line(setting), scale, [_bar(row, scale) for row in named(rows, setting) if row.method != PLAIN])
        for setting in settings(report)
    ]


def _bar(row: ReportRow, scale: float) -> Bar:
    totals, speed = row.speedup_of_totals or Figure(None), speed_of(row)
    low, high = totals.low, totals.high
    return Bar(
        name=one_line(row.method),
        shown=times(speed) if totals.value is None else estimate(totals, "×"),
        kind=("peer" if is_peer(row) else "ours") + (" lossy" if row.label == "lossy" else ""),
        width=None if speed is None else speed * scale,
        interval=None if low is None or high is None else (low * scale, (high - low) * scale),
    )


def _samples(report: Report) -> list[dict[str, Any]]:
    return [
        {
            "heading": ", ".join(map(one_line, filter(None, (sample.setting, sample.method, sample.task)))),
            "prompt": visible(sample.prompt),
            "pieces": [(visible(piece), drafted) for piece, drafted in sample.pieces],
        }
        for sample in report.samples
    ]


def _about(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return a description of how the report was made: headings, each with (name, value) pairs."""
    parts = [
        ("Prompts", report.asked),
        ("Command", {"command": report.command} if report.command else {}),
        ("Settings", report.settings),
        ("Fingerprints", report.fingerprints),
        ("Revisions on the Hub", report.revisions),
        ("Machine", report.hardware),
        ("Versions", report.versions),
    ]
    return [
        (heading, [(one_line(name), one_line(value)) for name, value in values.items() if value is not None])
        for heading, values in parts
        if values
    ]
