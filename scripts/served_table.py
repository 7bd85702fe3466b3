"""The table of docs/serving.md: engines and artefacts, as `benchmarks/served.py` compares them."""

from typing import Any

from decoding.measure.figures import NONE
from decoding.measure.markdown import text

Report = dict[str, Any]


def served_table(report: Report) -> str:
    """Return a row for every engine, artefact and batch size: equal texts, and both sides' counts."""
    lines = [
        "| engine | artefact | drafted at a time | batch | texts equal to ours | passes: theirs, ours "
        "| accepted at each position: theirs, ours | start |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        speculation = row["speculation"] or {}
        cells = (
            text(row["engine"]),
            text(row["artefact"]),
            str(speculation.get("num_speculative_tokens") or speculation.get("tokens") or NONE),
            str(row.get("batch_size", 1)),
            f"**{row['equal']}/{row['prompts']}**",
            ", ".join(_count(row[side].get("passes")) for side in ("theirs", "ours")),
            ", ".join(_accepted(row[side]) for side in ("theirs", "ours")),
            f"{row['setup_seconds']:.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    engines = ", ".join(dict.fromkeys(f"{row['engine']}: {row['version']}" for row in report["rows"]))
    machine = report["hardware"]
    return "\n".join(lines) + (
        f"\n\n{text(report['target'])} in fp32, greedy; {report['prompts']} prompts of {text(report['set'])}, up to "
        f"{report['max_new_tokens']} new tokens each, on {machine['cores']} cores of {text(machine['processor'])}; "
        f"{text(engines)}; commit {text(report['commit'])}."
    )


def _accepted(side: Report) -> str:
    """Write accepted drafts by position, or their total where an engine counts no more."""
    accepted = side.get("accepted")
    if isinstance(accepted, list):
        return "/".join(map(str, accepted)) or NONE
    return _count(accepted)


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
