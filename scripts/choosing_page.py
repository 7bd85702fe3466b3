"""The page that says which method to choose: written whole from the figures of `benchmarks/accepted.py`."""

from collections.abc import Iterator, Mapping
from typing import Any

from decoding.measure.figures import NONE, number
from decoding.measure.markdown import text

Report = dict[str, Any]
FAMILIES = ("heads", "parallel draft", "draft", "lookup", "with a lookup")
_NEEDS = {
    "heads": "a training on the target's hidden states; they fit that target alone",
    "parallel draft": "a training; one forward of the draft for all drafted tokens",
    "draft": "a training, or a small model of the same tokenizer; a forward for each drafted token; servers run it",
    "lookup": "nothing",
    "with a lookup": "heads or a draft, and a lookup in the same tree",
}


def family_of(report: Report, row: Report) -> str:
    """Return the row's family, one of `FAMILIES`."""
    arm = report["arms"][row["arm"]]
    if row["drafting"].startswith("with lookup"):
        return "with a lookup"
    if arm["recipe"] is None:
        return "lookup"
    if arm["recipe"] != "draft":
        return "heads"
    return "parallel draft" if any(each.startswith("draft.parallel=") for each in arm["overrides"]) else "draft"


def best_of(report: Report, target: str) -> dict[tuple[str, str], dict[str, Report]]:
    """Return (prompt set, setting) -> family -> the fastest of its rows that were timed on the most prompts."""
    found: dict[tuple[str, str], dict[str, Report]] = {}
    for row in report["rows"]:
        if target in row["speed"]:
            families = found.setdefault((row["set"], row["setting"]), {})
            family = family_of(report, row)
            if family not in families or _rank(row, target) > _rank(families[family], target):
                families[family] = row
    return found


def _rank(row: Report, target: str) -> tuple[int, float]:
    return int(row["speed"][target]["over_plain"]["observations"]), _gain(row, target)


def _gain(row: Report, target: str) -> float:
    return float(row["speed"][target]["over_plain"]["value"])


def page(report: Report) -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    targets = list(dict.fromkeys(target for row in report["rows"] for target in row["speed"]))
    yield "# Choosing\n"
    yield (
        "Heads, a parallel draft, an ordinary draft or lookup: the largest speed-up over plain decoding that each "
        "reached, one text at a time, by the best of those of its ways to draft that were timed on the most prompts; "
        "–: not timed there. Figures, intervals and machine are those of "
        "[accepted, arm by arm](../results/accepted.md). Your target and "
        "texts are others: `headstart evaluate` with several `--drafter` measures yours in the same way.\n"
    )
    yield "| method | needs |\n|---|---|"
    yield from (f"| {family} | {needs} |" for family, needs in _NEEDS.items())
    for target in targets:
        best = best_of(report, target)
        yield f"\n## {text(target)}\n"
        yield f"| texts | temperature | {' | '.join(FAMILIES)} | choose |"
        yield "|---|---|" + "---|" * (len(FAMILIES) + 1)
        for (prompt_set, setting), families in best.items():
            cells = [_cell(families.get(family), target) for family in FAMILIES]
            yield f"| {text(prompt_set)} | {setting} | {' | '.join(cells)} | {_choice(families, target)} |"
        yield ""
        yield from _sentences(best, target)


def _cell(row: Report | None, target: str) -> str:
    if row is None:
        return NONE
    count = row["speed"][target]["over_plain"]["observations"]
    return f"{number(_gain(row, target))}× ({text(row['arm'])}, {text(row['drafting'])}; {count} prompts)"


def _choice(families: Mapping[str, Report], target: str) -> str:
    """Name the best family, and those whose intervals reach its figure; plain decoding where none gains."""
    best = max(families, key=lambda family: _gain(families[family], target))
    top = _gain(families[best], target)
    if top <= 1:
        return "plain decoding"
    near = [family for family in families if family != best and _high(families[family], target) >= top]
    return " or ".join([best, *near])


def _high(row: Report, target: str) -> float:
    high = row["speed"][target]["over_plain"]["high"]
    return float(row["speed"][target]["over_plain"]["value"] if high is None else high)


def _sentences(best: Mapping[tuple[str, str], Mapping[str, Report]], target: str) -> Iterator[str]:
    """Yield for each family where it is the fastest, and where it is slower than plain decoding."""
    for family in FAMILIES:
        places = {place: families for place, families in best.items() if family in families}
        if not places:
            continue
        first = [
            p
            for p, all_ in places.items()
            if _gain(all_[family], target) == max(_gain(r, target) for r in all_.values())
        ]
        slower = [place for place, families in places.items() if _gain(families[family], target) < 1]
        line = f"- **{family.capitalize()}**: the fastest on {_named(first)}"
        yield line + (f"; slower than plain decoding on {_named(slower)}." if slower else ".")


def _named(places: list[tuple[str, str]]) -> str:
    return ", ".join(f"{text(prompt_set)} ({setting})" for prompt_set, setting in places) or "none"
