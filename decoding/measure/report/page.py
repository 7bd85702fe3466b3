"""The report as one HTML page without external resources: answer and pictures first, tables and settings folded."""

import re
from pathlib import Path
from typing import Any

import jinja2

from decoding.measure.figures import greedy_sentence, identical
from decoding.measure.markdown import one_line, visible
from decoding.measure.report import bars, curves
from decoding.measure.report.style import css
from decoding.measure.report.tables import tables
from decoding.measure.report.words import DEFINITIONS, answers, asked, caption, enough

Report = dict[str, Any]


def write_html(report: Report, path: Path) -> None:
    """Write the page: pictures, tables, settings and versions, in one file without external resources."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["whole"] = _whole
    page = environment.get_template("report.html.j2").render(
        title=one_line(report.get("title") or "Headstart report"),
        colours=css(),
        **_sentences(report),
        **_pictures(report),
        samples=_samples(report),
        tables=tables(report),
        greedy=[
            (one_line(row["setting"]), one_line(row["method"]), identical(row["identical_to_plain"]))
            for row in report["rows"]
            if row.get("identical_to_plain")
        ],
        about=_about(report),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _whole(cell: str) -> str:
    """Return the text with no-break spaces that keep a figure together with its interval or its count."""
    return re.sub(r" (?=[\[(])|(?<=,) (?=\d+\.\d+\])|(?<=median) ", "\N{NO-BREAK SPACE}", cell)


def _sentences(report: Report) -> Report:
    lead, *others = answers(report)
    return {
        "lead": lead,
        "others": others,
        "caption": caption(report),
        "asked": asked(report),
        "enough": enough(report),
        "sentence": greedy_sentence(report),
        "definitions": DEFINITIONS,
    }


def _pictures(report: Report) -> Report:
    lengths = bars.accepted_lengths(report)
    return {
        "speedups": bars.speedups(report),
        "tasks": bars.tasks(report),
        "over_batch": curves.curves(report, "batch_size"),
        "over_context": curves.curves(report, "context"),
        "acceptance": curves.acceptance(report),
        "lengths": lengths,
        "lengths_shown": bars.lengths_shown(lengths),
        "time": bars.time_splits(report),
        "cost": curves.cost(report),
        "predictions": curves.predictions(report),
    }


def _samples(report: Report) -> list[Report]:
    """Return the samples with their neighbouring pieces of one kind joined, so that a marked run has no seams."""
    samples = []
    for sample in report.get("samples") or []:
        pieces: list[tuple[str, bool]] = []
        for piece, drafted in sample["pieces"]:
            if pieces and pieces[-1][1] == bool(drafted):
                pieces[-1] = (pieces[-1][0] + visible(piece), bool(drafted))
            else:
                pieces.append((visible(piece), bool(drafted)))
        told = [one_line(sample[key]) for key in ("setting", "method", "task") if sample.get(key)]
        samples.append({"told": ", ".join(told), "prompt": visible(sample.get("prompt") or ""), "pieces": pieces})
    return samples


def _about(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, its names with their values) of what the report says of its own making."""
    parts = [
        ("What was asked", report.get("asked")),
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
