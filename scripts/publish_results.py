"""Copy a report to benchmarks/results/<hardware>/ and renew the tables and pictures that show it.

Usage: scripts/publish_results.py REPORT NAME; NAME is a key of `PAGES`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure as Picture
from result_pictures import crossover_figure, curve_figure, policies_figure

from decoding.measure.figures import NONE, caption, estimate, number
from decoding.measure.markdown import text
from decoding.measure.results import Figure, report_from_json

ROOT = Path(__file__).resolve().parent.parent
Report = dict[str, Any]


def results_folder(report: Report) -> Path:
    """Return benchmarks/results/<hardware>."""
    machine = report["hardware"]
    name = machine.get("gpu") or f"{machine['processor']} {machine['cores']} cores"
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def machine_of(report: Report) -> str:
    """Name the hardware and the commits of a report."""
    machine = report["hardware"]
    commits = report.get("commits") or [report["commit"]]
    name = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    return text(f"{name}; commit {', '.join(commits)}.")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: int) -> str:
    """Write a Markdown table; its last ``numbers`` columns are right-aligned."""
    head = list(head)
    marks = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def _estimate(figure: Mapping[str, Any] | None, unit: str = "") -> str:
    return estimate(Figure(**figure) if figure else None, unit)


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value: float | None = (row.get(name) or {}).get("value")
    return value


# --- the quickstart ---------------------------------------------------------------------------------------------------


def short_table(report: Report) -> str:
    """Return a table with a row for each method (first drafters, then others) and two columns for each setting.

    The last column counts the greedy texts that equal the texts of plain decoding.
    """
    row_of = {(row["method"], row["setting"]): row for row in report["rows"]}
    methods, settings = (list(dict.fromkeys(names)) for names in zip(*row_of, strict=True))
    methods.sort(key=lambda method: (method == "plain", method.startswith("transformers")))
    columns = (("tokens per target pass", "tokens_per_pass", ""), ("speed-up", "speedup_of_totals", "×"))
    same = {row["method"]: row["identical_to_plain"] for row in report["rows"] if row["setting"] == "greedy"}
    head = ["method", *(f"{name}, {setting}" for setting in settings for name, _, _ in columns)]
    head += ["same text, greedy"] * bool(same)
    cells = (
        [
            text(method),
            *(_estimate(row_of[method, setting].get(key), unit) for setting in settings for _, key, unit in columns),
            *([f"{same[method]['identical']} of {same[method]['of']}"] if same else []),
        ]
        for method in methods
    )
    return f"{table(map(text, head), cells, len(head) - 1)}\n\n{text(caption(report_from_json(report)))}."


# --- evaluations ------------------------------------------------------------------------------------------------------


def tasks_table(report: Report) -> str:
    """Return a table of methods by tasks for each setting: speed-up over plain decoding, and tokens per target pass."""
    rows = [{**row, "task": "all"} for row in report["rows"]] + report["tasks"]
    rows = [row for row in rows if not row["method"].startswith(("plain", "transformers")) and _gain(row) != NONE]
    tasks = sorted(dict.fromkeys(row["task"] for row in rows), key=lambda task: task == "all")
    parts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        gains = {(row["method"], row["task"]): _gain(row) for row in rows if row["setting"] == setting}
        methods = dict.fromkeys(method for method, _ in gains)
        cells = ([text(method), *(gains.get((method, task), NONE) for task in tasks)] for method in methods)
        parts.append(table([text(setting), *map(text, tasks)], cells, len(tasks)))
    parts.append(f"Cells show speed-up over plain decoding and tokens per target pass. {conditions(report)}")
    return "\n\n".join(parts)


def conditions(report: Report) -> str:
    """Describe an evaluation in words: its target, prompts and machine."""
    cut = f" ({report['prompts_cut']} of them cut to fit)" if report.get("prompts_cut") else ""
    return (
        f"{report['parameters'] / 1e6:.0f}M-parameter target in {report['dtype']}; {report['prompts']} prompts{cut}, "
        f"up to {report['max_new_tokens']} new tokens; {machine_of(report)}"
    )


def _gain(row: Report) -> str:
    passes, gain = _value(row, "tokens_per_pass"), _value(row, "speedup_of_totals")
    parts = [f"{number(gain)}×"] if gain is not None else []
    return " · ".join([*parts, *([number(passes)] if passes is not None else [])]) or NONE


# --- benchmarks -------------------------------------------------------------------------------------------------------


def served_table(report: Report) -> str:
    """Return a table with a row for each engine, artefact and batch size: equal texts, and counts of both sides."""

    def compared(theirs: str, ours: str) -> str:
        return f"{theirs}, as here" if theirs == ours else f"{theirs}; here {ours}"

    rows = []
    for row in report["rows"]:
        if "error" in row:
            raise ValueError(f"{row['engine']} rejected {row['artefact']} ({row['error']}): fix this and measure again")
        drafted = row["speculation"] or {}
        theirs, ours = row["theirs"], row["ours"]
        rows.append(
            (
                text(row["engine"]),
                text(row["artefact"]),
                str(drafted.get("num_speculative_tokens") or drafted.get("tokens") or NONE),
                str(row["batch_size"]),
                f"**{row['equal']}/{row['prompts']}**",
                compared(f"{theirs['passes']:,}", f"{ours['passes']:,}"),
                compared(*("/".join(map(str, side["accepted"])) or "none" for side in (theirs, ours))),
            )
        )
    head = ("engine", "artefact", "drafted at a time", "batch", "texts equal", "target passes", "accepted by position")
    engines = ", ".join(dict.fromkeys(f"{row['engine']}: {row['version']}" for row in report["rows"]))
    return table(head, rows, 5) + (
        f"\n\n{text(report['target'])} in fp32, greedy; {report['prompts']} prompts of {text(report['set'])}, up to "
        f"{report['max_new_tokens']} new tokens each; {text(engines)}; {machine_of(report)}"
    )


def pooled_table(report: Report) -> str:
    """Return a table with a row for each group of drafters, a row of ratios, and a column for each set and setting."""
    rows = report["rows"]
    groups = list(rows[0]["tokens_per_pass"])
    cells = [[text(name), *(_estimate(row["tokens_per_pass"][name]) for row in rows)] for name in groups]
    if rows[0]["ratio"]:
        cells.append(["ratio", *(_estimate(row["ratio"]) for row in rows)])
    head = ("trained on answers to", *(f"{row['set']}, {row['setting']}" for row in rows))
    return f"{table(map(text, head), cells, len(rows))}\n\n{machine_of(report)}"


def curve_caption(report: Report) -> str:
    """Return the conditions of the curve."""
    return f"Up to {report['max_new_tokens']} new tokens; {machine_of(report)}"


def verified_table(report: Report) -> str:
    """Return a table with a row for each server of `benchmarks/verified.py`: findings of tests, and the verdict."""

    def cell(row: Report, *checks: str) -> str:
        findings = [finding for finding in row["findings"] if finding["check"] in checks]
        return ", ".join(_evidence(finding) for finding in findings) or NONE

    rows = [
        (
            text(row["engine"]),
            text(row["method"]),
            cell(row, "greedy identity"),
            cell(row, "mean log-probability"),
            cell(row, *(f"next token, position {position}" for position in (1, 2, 3))),
            f"**{row['verdict']}**",
        )
        for row in report["rows"]
    ]
    head = ("engine", "method", "greedy", "T=1: log-probability", "T=1: positions 1, 2, 3", "verdict")
    asked = f"{text(report['target'])} in fp32, {report['prompts']} prompts of {text(report['set'])}"
    return f"{table(head, rows, 0)}\n\n{asked}; {machine_of(report)}"


def _evidence(finding: Report) -> str:
    """Return a test's finding in a few words: the number of equal texts, or a p-value."""
    figures = finding["figures"]
    if finding["status"] == "open":
        return "open"
    if "identical" in figures:
        return f"{figures['identical']}/{figures['texts']}"
    return f"p = {figures['p_value']:.2g}" if figures["p_value"] > 1e-300 else "p < 1e-300"


EVENING = {
    "card": "{card}, {memory} GB",
    "method": "{method}",
    "weights of the server, texts at a time": "{serve}, {texts}",
    "rows": "{rows:,}",
    "hours: answers, target's states, training": "{write_h:.1f}, {read_h:.1f}, {train_h:.2f}",
    "hours together": "**{hours:.1f}**",
    "disk": "{disk_gb:.0f} GB",
}


def evening_table(report: Report) -> str:
    """Return a table with a column for each card of `benchmarks/one_gpu.py`."""
    head, *body = [(name, *(form.format_map(card) for card in report["cards"])) for name, form in EVENING.items()]
    return table(head, body, len(head) - 1) + "\n\nComputed, not measured."


def stored_by_token(report: Report) -> str:
    """Return the bytes that trainers store per token, and the day on which the figures of other trainers were read."""
    rows = ((what, " / ".join(f"{size:,}" for size in sizes)) for what, *sizes in report["stored"])
    read = f"Figures of other trainers were read on {report['read']} at the linked commits."
    return f"{table(('stored for each token (Qwen3-8B)', 'bytes'), rows, 1)}\n\n{read}"


def recipes_table(report: Report) -> str:
    """Return a table of the recipes with published hyperparameters: the memory needed, and the hours on each card."""
    cards = [(card["card"], card["memory"]) for card in report["cards"]]
    head = ["recipe", "trained weights", "memory", *(f"hours, {name}, {memory} GB" for name, memory in cards)]
    rows = (
        [
            f"`{row['recipe']}`",
            f"{row['trained'] / 1e6:,.0f}M",
            f"{row['memory_gb']:.0f} GB",
            *(f"{hours:,.0f}" if (hours := row["hours"][name]) else "too little memory" for name, _ in cards),
        ]
        for row in report["recipes"]
    )
    return table(head, rows, len(head) - 1) + "\n\nComputed, not measured."


def stored_sentence(report: Report) -> str:
    """Return one sentence on what heads, drafts and the last of the other trainers store for each token."""
    (_, heads, *_), (_, draft, whole), *_, (peer, theirs) = report["stored"]
    return (
        f"Training needs no stored states. If you store the states of Qwen3-8B in int8, a token takes {heads:,} bytes "
        f"for heads and {draft:,} for a DSpark draft, or {whole:,} in bf16 ([comparison](docs/how-to/one-gpu.md)). "
        f"{peer.split(',')[0]} documents {theirs:,} for six states (read on {report['read']})."
    )


# --- the comparison of all arms ---------------------------------------------------------------------------------------


def headline(report: Report) -> str:
    """Return two sentences on the trained drafter with the largest mean speed-up over the settings."""
    gains: dict[str, dict[str, Report]] = {}
    for row in report["rows"]:
        if row["method"] in report["trained"]:
            gains.setdefault(row["method"], {})[row["setting"]] = row["speedup_of_totals"]
    best = max(gains, key=lambda method: sum(gain["value"] for gain in gains[method].values()))
    trained, machine = report["trained"][best], report["hardware"]
    target, questions = report["title"].split(" on ")
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    return (
        f"**Speculative decoding is {_estimate(gains[best]['greedy'], '×')} as fast as plain decoding** if greedy, and "
        f"{_estimate(gains[best]['T=1'], '×')} as fast at temperature 1. The drafter is {text(best)}, measured on "
        f"{report['prompts']} prompts of {text(Path(questions).stem)} after {trained['steps']:,} training steps on "
        f"{trained['rows']:,} answers of the target to other questions ({text(target)}, {hardware})."
    )


def accepted_table(report: Report) -> str:
    """Return a table of tokens per target pass by arm and drafting, with a column for each prompt set and setting."""
    return _by_prompt_set(report, lambda row: _estimate(row["tokens_per_pass"]), "tokens_per_pass")


def gained_table(report: Report) -> str:
    """Return a table of speed-ups on the first target over plain decoding, and in brackets over assisted generation."""
    target = next(iter(report["rows"][0]["speed"]), None) or "storyteller-11m"

    def cell(row: Report) -> str:
        if (timed := row["speed"].get(target)) is None:
            return NONE
        return f"{_estimate(timed['over_plain'], '×')} ({number(_value(timed, 'over_assisted'))}×)"

    return f"{_by_prompt_set(report, cell, 'speed')}\n\n{text(target)}; {machine_of(report)}"


def _by_prompt_set(report: Report, cell: Callable[[Report], str], needed: str) -> str:
    timed = {row["set"] for row in report["rows"] if row["speed"]} or {row["set"] for row in report["rows"]}
    rows = [row for row in report["rows"] if row[needed] and row["set"] in timed]
    columns = sorted({(row["set"], row["setting"]) for row in rows}, key=lambda pair: (pair[0], pair[1] != "greedy"))
    cell_of = {(row["arm"], row["drafting"], row["set"], row["setting"]): cell(row) for row in rows}
    ways = dict.fromkeys((row["arm"], row["drafting"]) for row in rows)
    cells = ([*map(text, way), *(cell_of.get((*way, *column), NONE) for column in columns)] for way in ways)
    head = ["arm", "drafted", *(f"{text(name)}, {setting}" for name, setting in columns)]
    return table(head, cells, len(columns))


def policies_caption(report: Report) -> str:
    """Describe the report of `benchmarks/policies.py` in words: target, prompts, worst cell and machine."""
    ratios = [row["default_over_plain"] for row in report["rows"]]
    kept = sum(ratio >= 0.97 for ratio in ratios)
    return (
        f"{text(report['rows'][0]['target'])} in {report['dtype']}; prompts of {text(report['set'])}, "
        f"{report['max_new_tokens']} new tokens; the default policy has at least 0.97× in {kept} of {len(ratios)} "
        f"cells, and its lowest ratio is {number(min(ratios))}×; {machine_of(report)}"
    )


Blocks = tuple[tuple[str, Callable[[Report], str]], ...]
RESULTS = "docs/results.md"
PAGES: dict[str, dict[str, Blocks]] = {
    "quickstart": {"README.md": (("table", short_table),)},
    "spec_bench": {RESULTS: (("spec_bench", tasks_table),)},
    "crossover": {RESULTS: (("crossover", conditions),)},
    "policies": {RESULTS: (("policies", policies_caption),)},
    "equal_budget": {RESULTS: (("equal_budget", short_table),)},
    "experimental": {RESULTS: (("experimental", short_table),)},
    "curve": {RESULTS: (("curve", curve_caption),)},
    "self_written": {"docs/how-to/data.md": (("self_written", pooled_table),)},
    "verified": {"docs/how-to/verify.md": (("verified", verified_table),)},
    "served": {"docs/how-to/serving.md": (("served", served_table),)},
    "one_gpu": {
        "docs/how-to/one-gpu.md": (("one_gpu", evening_table), ("bytes", stored_by_token)),
        "recipes/README.md": (("recipes", recipes_table),),
        "README.md": (("stored", stored_sentence),),
    },
    "accepted": {RESULTS: (("accepted", accepted_table), ("gained", gained_table))},
    "smollm2": {"README.md": (("headline", headline),), RESULTS: (("smollm2", short_table),)},
}
"""For each name of a report, maps pages to their marked blocks, each with the function that writes the block."""
PICTURES: dict[str, Callable[[Report], Picture]] = {
    "crossover": crossover_figure,
    "curve": curve_figure,
    "policies": policies_figure,
}
MAKER = "scripts/publish_results.py"


def block(name: str, content: str, maker: str = MAKER) -> str:
    """Return a block between the marks that `renewed` looks for; the marks name the script that writes the block."""
    return f"<!-- {name}: {maker} -->\n{content}\n<!-- end of {name} -->"


def renewed(page: str, name: str, content: str, maker: str = MAKER) -> str:
    """Return the page with new content in a block; raise ValueError unless the page has exactly one such block."""
    begin, end = (re.escape(mark) for mark in block(name, "\n", maker).split("\n\n\n"))
    changed, count = re.subn(rf"{begin}.*?{end}", lambda _: block(name, content, maker), page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} blocks marked {name!r}, but must have exactly one")
    return changed


def main(source: str, name: str) -> None:
    """Copy the report; renew its blocks in the pages and its picture."""
    report = json.loads(Path(source).read_text())
    pages = {}
    for page, blocks in PAGES.get(name, {}).items():
        pages[page] = (ROOT / page).read_text()
        for marked, write in blocks:
            pages[page] = renewed(pages[page], marked, write(report))
    destination = results_folder(report) / f"{name}.json"
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text(json.dumps(report, indent=1) + "\n")
    for page, content in pages.items():  # all pages are complete before any is written
        (ROOT / page).write_text(content)
    if name in PICTURES:
        plt.rcParams["svg.hashsalt"] = name  # equal figures make equal files
        picture = ROOT / "docs" / "pictures" / f"{name}.svg"
        PICTURES[name](report).savefig(picture, bbox_inches="tight", metadata={"Date": None})
    print(f"written: {destination.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
