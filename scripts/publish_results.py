"""Put a report's figures where readers see them: benchmarks/results/, the README and the pages of docs/.

Usage: scripts/publish_results.py REPORT NAME; the pages show those with NAME quickstart,
accepted, drafts, spec_bench, spec_bench_sampled, crossover, planned, served, speed, long_texts, and those of
docs/results/scale.md.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from choosing_page import page as choosing_page
from drafts_page import publish as publish_drafts
from evaluated_tables import cells_table, predictions_table, tasks_table, trees_table
from long_texts_table import long_texts_table
from matplotlib import pyplot as plt
from scale_tables import TABLES as SCALE
from served_table import served_table
from speed_table import drafters_table, goals_table

from decoding.measure.figures import NONE, estimate, greedy_sentence, number
from decoding.measure.markdown import text
from decoding.measure.report import caption, crossover_figure, markdown_table, speedup_figure

ROOT = Path(__file__).resolve().parent.parent
MOST_DRAFTERS = 4  # rows of the README's table, beside plain decoding and transformers
Report = dict[str, Any]


def results_folder(report: Report) -> Path:
    """Return benchmarks/results/<hardware>."""
    machine = report["hardware"]
    name = machine.get("gpu") or f"{machine['processor']} {machine['cores']} cores"
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def headline(report: Report) -> str:
    """Return one sentence with one figure: the fastest trained drafter of the report's first setting."""
    setting = report["rows"][0]["setting"]
    rows = {row["method"]: row for row in report["rows"] if row["setting"] == setting and row.get("artefact")}
    method = max((name for name in rows if not name.startswith("transformers")), key=lambda name: _speedup(rows[name]))
    return (
        f"**{estimate(rows[method]['speedup_of_totals'], '×')} the speed of plain decoding** ({text(method)}, "
        f"{text(setting)}), after minutes of training by `make demo`: a target of {report['parameters'] / 1e6:.0f}M "
        f"parameters on {_machine(report)}."
    )


def short_table(report: Report) -> str:
    """Return five rows and four columns: plain decoding, transformers at its best, and the first drafters.

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
    """Return plain decoding, the fastest method of transformers, and the drafters that the report has first."""
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
    """Return every row of the report, its caption, and a sentence on its greedy texts."""
    below = " ".join(filter(None, (f"{caption(report)}.", greedy_sentence(report))))
    return f"{markdown_table(report)}\n\n{text(below)}"


def lead_table(report: Report) -> str:
    """Return for each timed target the fastest greedy method on the first prompt set, and the same arm at T=1.

    Only methods that were timed on the most prompts compete.
    """
    lines = ["| target | method | greedy | T=1 | prompts |", "|---|---|---:|---:|---:|"]
    prompts = report["rows"][0]["set"]
    for target in dict.fromkeys(target for row in report["rows"] for target in row["speed"]):
        timed = [row for row in report["rows"] if target in row["speed"] and row["set"] == prompts]
        greedy = _fullest([row for row in timed if row["setting"] == "greedy"], target)
        if not greedy:
            continue
        best = max(greedy, key=lambda row: float(row["speed"][target]["over_plain"]["value"]))
        drawn = _fullest([row for row in timed if row["setting"] == "T=1" and row["arm"] == best["arm"]], target)
        beside = max(drawn, key=lambda row: float(row["speed"][target]["over_plain"]["value"]), default=None)
        at_one = NONE if beside is None else f"{_gains(beside['speed'][target])}, {text(beside['drafting'])}"
        method = f"*{text(best['arm'])}*, {text(best['drafting'])}"
        counts = [row["speed"][target]["over_plain"]["observations"] for row in (best, beside) if row is not None]
        count = " and ".join(str(each) for each in dict.fromkeys(counts))
        lines.append(f"| {text(target)} | {method} | {_gains(best['speed'][target])} | {at_one} | {count} |")
    return "\n".join(lines) + (
        "\n\nOver plain decoding, and in brackets over assisted generation of `transformers` with its defaults and the "
        f"ordinary draft of the same data and steps, on prompts of {text(prompts)} that no training saw. A *widened* "
        "target computes the same function at a larger one's cost. [Every method](docs/results/accepted.md); "
        "[which to choose](docs/how-to/choosing.md)."
    )


def _fullest(rows: list[Report], target: str) -> list[Report]:
    """Return the rows that were timed on the most prompts."""
    counts = [row["speed"][target]["over_plain"]["observations"] for row in rows]
    return [row for row, count in zip(rows, counts, strict=True) if count == max(counts)]


def _gains(speed: Report) -> str:
    return f"**{estimate(speed['over_plain'], '×')}** ({estimate(speed['over_assisted'], '×')})"


def accepted_table(report: Report) -> str:
    """Return tokens per pass of every arm and way to draft on every prompt set, as `benchmarks/accepted.py` counts.

    A figure of fewer prompts than others of its set has their number behind it.
    """
    most: dict[str, int] = {}
    for row in report["rows"]:
        if row["tokens_per_pass"] is not None:
            most[row["set"]] = max(most.get(row["set"], 0), row["tokens_per_pass"]["observations"])

    def cell(row: Report) -> str:
        count = row["tokens_per_pass"]["observations"]
        return estimate(row["tokens_per_pass"]) + (f" of {count}" if count < most[row["set"]] else "")

    prompts = ", ".join(f"{count} of {text(name)}" for name, count in most.items())
    below = f"Prompts: {prompts}; fewer where a figure ends in their number."
    return f"{_by_place(report, cell, 'tokens_per_pass')}\n\n{below}"


def compared_table(report: Report) -> str:
    """Return each arm's tokens per pass over its baseline's, paired by prompt."""
    return _by_place(report, lambda row: estimate(row["over_baseline"], "×"), "over_baseline")


def gained_tables(report: Report) -> str:
    """Return speed-ups over plain decoding, and in brackets over assisted generation, in a table for each target."""
    parts = []
    for target in dict.fromkeys(target for row in report["rows"] for target in row["speed"]):

        def cell(row: Report, target: str = target) -> str:
            timed = row["speed"].get(target)
            if timed is None:
                return NONE
            return f"{estimate(timed['over_plain'], '×')} ({estimate(timed['over_assisted'], '×')})"

        parts.append(f"**{text(target)}**\n\n{_by_place(report, cell)}")
    return "\n\n".join(parts)


def trained_table(report: Report) -> str:
    """Return what each arm learned: its overrides, seeds, and its trained tokens without those of an arm before it."""
    lines = ["| arm | recipe | overrides | seeds | trained tokens |", "|---|---|---|---:|---:|"]
    for name, arm in report["arms"].items():
        tokens = sorted({run["tokens"] for run in arm["seeds"].values()})
        overrides = " ".join(f"`{each}`" for each in arm["overrides"])
        spread = " to ".join(f"{count:,}" for count in dict.fromkeys((*tokens[:1], *tokens[-1:])))
        recipe = f"{arm['recipe'] or NONE}{', from ' + text(arm['after']) if arm['after'] else ''}"
        cells = (text(name), recipe, overrides or NONE, str(len(arm["seeds"])), spread or NONE)
        lines.append(f"| {' | '.join(cells)} |")
    settings = report["settings"]
    return "\n".join(lines) + (
        f"\n\n{settings['steps']} steps each, of which two stages share half and half, up to "
        f"{settings['max_new_tokens']} new tokens, on {_machine(report)}; commits {text(', '.join(report['commits']))}."
    )


def _by_place(report: Report, cell: Callable[[Report], str], needed: str | None = None) -> str:
    """Return a row for each arm and way to draft that has a figure, with a column for each prompt set and setting."""
    rows = [row for row in report["rows"] if needed is None or row[needed] is not None]
    places = sorted({(row["set"], row["setting"]) for row in rows}, key=lambda place: (place[0], place[1] != "greedy"))
    lines = [f"| arm | drafted | {' | '.join(f'{text(name)}, {setting}' for name, setting in places)} |"]
    lines.append("|---|---|" + "---:|" * len(places))
    for arm, drafting in dict.fromkeys((row["arm"], row["drafting"]) for row in rows):
        mine = {(row["set"], row["setting"]): row for row in rows if (row["arm"], row["drafting"]) == (arm, drafting)}
        cells = [cell(mine[place]) if place in mine else NONE for place in places]
        if set(cells) != {NONE}:
            lines.append(f"| {text(arm)} | {text(drafting)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _over_groups(ratio: Report) -> str:
    return estimate(ratio) if ratio["observations"] > 1 else number(ratio["value"])


Blocks = tuple[tuple[str, Callable[[Report], str]], ...]
PLACES: dict[str, dict[str, Blocks]] = {
    "quickstart": {
        "README.md": (("headline", headline), ("table", short_table)),
        "docs/results/measured.md": (("quickstart", long_table),),
    },
    "spec_bench": {"docs/results/measured.md": (("spec_bench", tasks_table),)},
    "spec_bench_sampled": {"docs/results/measured.md": (("spec_bench_sampled", tasks_table),)},
    "crossover": {"docs/results/measured.md": (("crossover", cells_table),)},
    "planned": {"docs/how-to/plan.md": (("planned", predictions_table), ("trees", trees_table))},
    "speed": {"docs/results/measured.md": (("speed", goals_table), ("drafters", drafters_table))},
    "served": {"docs/how-to/serving.md": (("served", served_table),)},
    "long_texts": {"docs/how-to/drafts.md": (("long_texts", long_texts_table),)},
    "accepted": {
        "README.md": (("lead", lead_table),),
        "docs/results/accepted.md": (
            ("choosing", lambda _: "[choosing](../how-to/choosing.md)."),
            ("accepted", accepted_table),
            ("compared", compared_table),
            ("gained", gained_tables),
            ("trained", trained_table),
        ),
    },
    **{name: {"docs/results/scale.md": ((name, write),)} for name, write in SCALE.items()},
}
"""Name of a report -> page -> the marked blocks in it, each with the function that writes it."""
PICTURES = {
    "quickstart": ("docs/results/speedup.svg", speedup_figure),
    "crossover": ("docs/results/crossover.svg", crossover_figure),
}
UNPUBLISHED = "Not published yet."


MAKER = "scripts/publish_results.py"


def block(name: str, content: str, maker: str = MAKER) -> str:
    """Return a block with the markers that `renewed` finds it by; they name the script that writes it."""
    return f"<!-- {name}: {maker} -->\n{content}\n<!-- end of {name} -->"


def renewed(page: str, name: str, content: str, maker: str = MAKER) -> str:
    """Return the page with another content in its block; ValueError if the page has no such block."""
    begin, end = (re.escape(mark) for mark in block(name, "\n", maker).split("\n\n\n"))
    changed, count = re.subn(rf"{begin}.*?{end}", lambda _: block(name, content, maker), page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} blocks between the marks of {name!r}: give it one")
    return changed


def main(source: str, name: str) -> None:
    """Copy the report, renew its blocks in the pages, and write what stands on it alone: plot, page of choices."""
    report = json.loads(Path(source).read_text())
    pages = {}
    for place, blocks in PLACES.get(name, {}).items():
        pages[place] = (ROOT / place).read_text()
        for marked, write in blocks:
            pages[place] = renewed(pages[place], marked, write(report))
    if name == "accepted":
        pages["docs/how-to/choosing.md"] = choosing_page(report)
    destination = results_folder(report) / f"{name}.json"
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(json.dumps(report, indent=1) + "\n")
    for place, page in pages.items():  # all of them were made before anything is written
        (ROOT / place).write_text(page)
    if name == "drafts":
        publish_drafts(report, ROOT / "docs" / "results")
    if name in PICTURES:
        picture, draw = PICTURES[name]
        plt.rcParams["svg.hashsalt"] = name  # the same figures, the same file
        draw(report).savefig(ROOT / picture, bbox_inches="tight", metadata={"Date": None})
    print(f"written: {destination.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
