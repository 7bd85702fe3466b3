"""Put a report's figures where readers see them: benchmarks/results/, the README's table and its plot.

Usage: scripts/publish_results.py REPORT NAME, where the README's own figures are those of NAME=quickstart.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from decoding.measure.figures import greedy_sentence
from decoding.measure.markdown import text
from decoding.measure.report import caption, markdown_table, speedup_figure

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: scripts/publish_results.py -->", "<!-- end of results -->"


def results_folder(report: dict[str, Any]) -> Path:
    """benchmarks/results/<hardware>"""
    machine = report["hardware"]
    name = machine.get("gpu") or f"{machine['processor']} {machine['cores']} cores"
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def readme_block(report: dict[str, Any]) -> str:
    """What stands between the README's markers."""
    below = " ".join(filter(None, (f"{caption(report)}.", greedy_sentence(report))))
    return f"{BEGIN}\n{markdown_table(report)}\n\n{text(below)}\n{END}"


def main(source: str, name: str) -> None:
    """Copy the report; for the quickstart also renew the README."""
    report = json.loads(Path(source).read_text())
    destination = results_folder(report) / f"{name}.json"
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(json.dumps(report, indent=1) + "\n")
    if name == "quickstart":
        readme = ROOT / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        readme.write_text(before + readme_block(report) + after)
        picture = ROOT / "docs" / "speedup.svg"
        picture.parent.mkdir(exist_ok=True)
        plt.rcParams["svg.hashsalt"] = name  # the same figures, the same file
        speedup_figure(report).savefig(picture, bbox_inches="tight", metadata={"Date": None})
    print(f"written: {destination.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
