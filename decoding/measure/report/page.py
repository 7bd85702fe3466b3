"""The report as a self-contained HTML page: the answer and pictures first, then folded tables and settings."""

import re
from pathlib import Path
from typing import NamedTuple

import jinja2

from decoding.measure.figures import (
    PLAIN,
    Report,
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
        title=one_line(report.get("title") or "Headstart report"),
        colours=css(),
        lead=lead,
        others=others,
        caption=caption(report),
        sentences=[*filter(None, [greedy_sentence(report)]), *(report.get("notes") or [])],
        speedups=bar_charts(report),
        over=f"Over {'concurrency' if report.get('served') else 'batch size'}",
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
    """A speed-up's bar, in percent of its track; unmeasured parts are None."""

    name: str
    shown: str
    kind: str
    """CSS classes: "peer" or "ours", and "lossy"."""
    width: float | None
    interval: tuple[float, float] | None
    """Start and length."""


class BarChart(NamedTuple):
    """The bars of one setting, and the position of speed-up 1, in percent of the track."""

    setting: str
    one: float
    bars: list[Bar]


def bar_charts(report: Report) -> list[BarChart]:
    """Return a chart per setting, all with the same scale."""
    rows = report["rows"]
    totals = [row.get("speedup_of_totals") or {} for row in rows]
    longest = max([1.0, *(each.get(end) or 0.0 for each in totals for end in ("value", "high")), *map(_speed, rows)])
    scale = 100 / longest / 1.02
    return [
        BarChart(one_line(setting), scale, [_bar(row, scale) for row in named(rows, setting) if row["method"] != PLAIN])
        for setting in settings(report)
    ]


def _speed(row: Report) -> float:
    return speed_of(row) or 0.0


def _bar(row: Report, scale: float) -> Bar:
    totals, speed = row.get("speedup_of_totals") or {}, speed_of(row)
    low, high = totals.get("low"), totals.get("high")
    return Bar(
        name=one_line(row["method"]),
        shown=times(speed) if totals.get("value") is None else estimate(totals, "×"),
        kind=("peer" if is_peer(row) else "ours") + (" lossy" if row["label"] == "lossy" else ""),
        width=None if speed is None else speed * scale,
        interval=None if low is None or high is None else (low * scale, (high - low) * scale),
    )


def _samples(report: Report) -> list[Report]:
    return [
        {
            "heading": ", ".join(one_line(sample[key]) for key in ("setting", "method", "task") if sample.get(key)),
            "prompt": visible(sample.get("prompt") or ""),
            "pieces": [(visible(piece), drafted) for piece, drafted in sample["pieces"]],
        }
        for sample in report.get("samples") or []
    ]


def _about(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return how the report was made: headings, each with (name, value) pairs."""
    parts = [
        ("Prompts", report.get("asked")),
        ("Command", {"command": report["command"]} if report.get("command") else None),
        ("Settings", report.get("settings")),
        ("Fingerprints", report.get("fingerprints")),
        ("Revisions on the Hub", report.get("revisions")),
        ("Machine", report.get("hardware")),
        ("Versions", report.get("versions")),
    ]
    return [
        (heading, [(one_line(name), one_line(value)) for name, value in values.items() if value is not None])
        for heading, values in parts
        if values
    ]
