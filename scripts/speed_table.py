"""The table of `benchmarks/speed.py` in docs/measured.md: figures wanted beside transformers, and those measured."""

from typing import Any

from decoding.measure.figures import NONE, number
from decoding.measure.markdown import text

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
