"""Put a report's figures where readers see them: benchmarks/results/, the README, docs/measured.md and its plot.

Usage: scripts/publish_results.py REPORT NAME; the pages take theirs from NAME=quickstart.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from decoding.measure.figures import estimate, greedy_sentence
from decoding.measure.markdown import text
from decoding.measure.report import caption, markdown_table, speedup_figure

ROOT = Path(__file__).resolve().parent.parent
MOST_DRAFTERS = 3  # rows of the README's table, beside plain decoding and transformers
Report = dict[str, Any]


def results_folder(report: Report) -> Path:
    """benchmarks/results/<hardware>"""
    machine = report["hardware"]
    name = machine.get("gpu") or f"{machine['processor']} {machine['cores']} cores"
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def headline(report: Report) -> str:
    """One sentence with one figure: the fastest trained drafter of the report's first setting."""
    setting = report["rows"][0]["setting"]
    rows = {row["method"]: row for row in report["rows"] if row["setting"] == setting and row.get("artefact")}
    method = max((name for name in rows if not name.startswith("transformers")), key=lambda name: _speedup(rows[name]))
    return (
        f"**{estimate(rows[method]['speedup_of_totals'], '×')} the speed of plain decoding** ({text(method)}, "
        f"{text(setting)}), after minutes of training by `make demo`: a target of {report['parameters'] / 1e6:.0f}M "
        f"parameters on {_machine(report)}."
    )


def short_table(report: Report) -> str:
    """Five rows and four columns: plain decoding, transformers at its best, and the first drafters.

    The columns hold the report's first two settings, which are greedy decoding and lossless sampling.
    """
    first, second = list(dict.fromkeys(row["setting"] for row in report["rows"]))[:2]
    by_setting = {
        setting: {row["method"]: row for row in report["rows"] if row["setting"] == setting}
        for setting in (first, second)
    }
    lines = [
        f"| method | tokens per target pass, {text(first)} | speed-up, {text(first)} | speed-up, {text(second)} |",
        "|---|---:|---:|---:|",
    ]
    for method in _short_methods(by_setting[first]):
        row, other = by_setting[first][method], by_setting[second].get(method, {})
        cells = (
            text(method),
            estimate(row.get("tokens_per_pass")),
            estimate(row.get("speedup_of_totals"), "×"),
            estimate(other.get("speedup_of_totals"), "×"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{text(caption(report))}."


def _short_methods(rows: Mapping[str, Report]) -> list[str]:
    """Plain decoding, the fastest method of transformers, and the drafters that the report has first."""
    peers = [name for name in rows if name.startswith("transformers")]
    drafters = [name for name in rows if name != "plain" and name not in peers]
    fastest = sorted(peers, key=lambda name: _speedup(rows[name]))[-1:]
    return ["plain", *fastest, *drafters[:MOST_DRAFTERS]]


def _speedup(row: Report) -> float:
    figure = row.get("speedup_of_totals") or {}
    return figure.get("value") or 0.0


def _machine(report: Report) -> str:
    machine = report["hardware"]
    return str(machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}")


def long_table(report: Report) -> str:
    """Every row of the report, its caption, and a sentence on its greedy texts."""
    below = " ".join(filter(None, (f"{caption(report)}.", greedy_sentence(report))))
    return f"{markdown_table(report)}\n\n{text(below)}"


PLACES: dict[str, tuple[tuple[str, Callable[[Report], str]], ...]] = {
    "README.md": (("headline", headline), ("table", short_table)),
    "docs/measured.md": (("quickstart", long_table),),
}
"""The page, and the marked blocks in it with the function that writes each."""


def block(name: str, content: str) -> str:
    """A block with the markers that `renewed` finds it by."""
    return f"<!-- {name}: scripts/publish_results.py -->\n{content}\n<!-- end of {name} -->"


def renewed(page: str, name: str, content: str) -> str:
    """The page with another content in its block; ValueError if the page has no such block."""
    begin, end = (re.escape(mark) for mark in block(name, "\n").split("\n\n\n"))
    changed, count = re.subn(rf"{begin}.*?{end}", lambda _: block(name, content), page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} blocks between the marks of {name!r}: give it one")
    return changed


def main(source: str, name: str) -> None:
    """Copy the report; for the quickstart also renew the pages and the plot."""
    report = json.loads(Path(source).read_text())
    destination = results_folder(report) / f"{name}.json"
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(json.dumps(report, indent=1) + "\n")
    if name == "quickstart":
        for place, blocks in PLACES.items():
            page = (ROOT / place).read_text()
            for marked, write in blocks:
                page = renewed(page, marked, write(report))
            (ROOT / place).write_text(page)
        plt.rcParams["svg.hashsalt"] = name  # the same figures, the same file
        picture = ROOT / "docs" / "speedup.svg"
        speedup_figure(report).savefig(picture, bbox_inches="tight", metadata={"Date": None})
    print(f"written: {destination.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
