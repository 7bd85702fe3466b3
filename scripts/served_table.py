"""The table of docs/how-to/serving.md: engines and artefacts, as `benchmarks/served.py` compares them."""

from collections.abc import Callable
from typing import Any

from decoding.measure.figures import NONE
from decoding.measure.markdown import text

Report = dict[str, Any]


def served_table(report: Report) -> str:
    """Return a row for every engine, artefact and batch size: equal texts, and the counts of both sides."""
    lines = [
        "| engine | artefact | drafted at a time | batch | texts equal | target passes | accepted at each position "
        "| seconds to start |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        if "error" in row:
            raise ValueError(f"{row['engine']} refused {row['artefact']} ({row['error']}): mend that, measure again")
        speculation = row["speculation"] or {}
        cells = (
            text(row["engine"]),
            text(row["artefact"]),
            str(speculation.get("num_speculative_tokens") or speculation.get("tokens") or NONE),
            str(row["batch_size"]),
            f"**{row['equal']}/{row['prompts']}**",
            *(_beside(write(row["theirs"][key]), write(row["ours"][key])) for key, write in _COUNTS.items()),
            f"{row['setup_seconds']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    engines = ", ".join(dict.fromkeys(f"{row['engine']}: {row['version']}" for row in report["rows"]))
    machine = report["hardware"]
    return "\n".join(lines) + (
        f"\n\n{text(report['target'])} in fp32, greedy; {report['prompts']} prompts of {text(report['set'])}, up to "
        f"{report['max_new_tokens']} new tokens each, on {machine['cores']} cores of {text(machine['processor'])}; "
        f"{text(engines)}; commit {text(report['commit'])}."
    )


def _beside(theirs: str, ours: str) -> str:
    return f"{theirs}, as here" if theirs == ours else f"{theirs}; here {ours}"


_COUNTS: dict[str, Callable[[Any], str]] = {
    "passes": lambda count: f"{count:,}",
    "accepted": lambda counts: "/".join(map(str, counts)) or "none",
}
