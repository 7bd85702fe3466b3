"""Tables of `benchmarks/speed.py` in docs/results/measured.md: figures wanted and measured, every way to draft."""

from typing import Any

from decoding.measure.figures import NONE, number
from decoding.measure.markdown import text
from decoding.measure.names import PLAIN

Report = dict[str, Any]


def goals_table(report: Report) -> str:
    """Return a row for each goal, and a sentence on the machine, the prompts and the rounds."""
    lines = ["| | wanted | measured | met |", "|---|---:|---:|---|"]
    for goal in report["goals"]:
        measured = NONE if goal["measured"] is None else number(goal["measured"], 3)
        bound = f"{'≤' if goal['at_most'] else '≥'} {goal['wanted']:g}"
        lines.append(f"| {text(goal['goal'])} | {bound} | {measured} | {'yes' if goal['met'] else '**no**'} |")
    machine = report["hardware"]
    processor = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    parts = [
        f"{text(name)}: {part['compared']['questions']} prompts ({part['drafters']['questions']} for all ways to draft)"
        for name, part in report["targets"].items()
    ]
    first = next(iter(report["targets"].values()))["compared"]
    return "\n".join(lines) + (
        f"\n\nMedians of paired runs, {first['rounds']} rounds, up to {first['max_new_tokens']} new tokens, "
        f"{text(first['dtype'])}, on {processor}. {'; '.join(parts)}. Commit {text(report['commit'])}."
    )


def drafters_table(report: Report) -> str:
    """Return a row for each way to draft and each peer, with a column for each target and setting."""
    parts = report["targets"].items()
    settings = list(dict.fromkeys(row["setting"] for _, part in parts for row in part["drafters"]["rows"]))
    places = [(name, setting) for name, _ in parts for setting in settings]
    lines = [
        f"| | {' | '.join(f'{text(name)}, {setting}' for name, setting in places)} |",
        "|---|" + "---:|" * len(places),
    ]
    found = {(n, row["setting"], row["method"]): row for n, part in parts for row in part["drafters"]["rows"]}
    for method in dict.fromkeys(method for _, _, method in found if method != PLAIN):
        cells = (_gain(found.get((*place, method))) for place in places)
        lines.append(f"| {text(method)} | {' | '.join(cells)} |")
    count = max(part["drafters"]["questions"] for _, part in parts)
    return "\n".join(lines) + (
        "\n\nMedian of paired speed-ups over plain decoding, and tokens per target pass; "
        f"{count} prompts only, which tell large differences."
    )


def _gain(row: Report | None) -> str:
    if row is None:
        return NONE
    kept = row.get("tokens_per_pass")
    return f"{number(row['speedup']['median'])}×" + (f" · {number(kept['value'])}" if kept else "")
