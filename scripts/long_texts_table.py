"""The table of docs/how-to/drafts.md on long texts: drafts with and without a window, by `benchmarks/long_texts.py`."""

from typing import Any

from decoding.measure.figures import NONE, estimate, number
from decoding.measure.markdown import text

Report = dict[str, Any]


def long_texts_table(report: Report) -> str:
    """Return a row for each context, a column for each method, and a sentence on models, prompts and machine."""
    methods = list(dict.fromkeys(row["method"] for row in report["rows"]))
    lines = [f"| context | {' | '.join(map(text, methods))} |", "|---:|" + "---|" * len(methods)]
    for context in dict.fromkeys(row["context"] for row in report["rows"]):
        rows = {row["method"]: row for row in report["rows"] if row["context"] == context}
        cells = [_cell(rows[method]) if method in rows else NONE for method in methods]
        stretched = "" if next(iter(rows.values()))["stretched"] == 1 else ", stretched"
        lines.append(f"| {context:,}{stretched} | {' | '.join(cells)} |")
    machine, settings = report["hardware"], report["settings"]
    return "\n".join(lines) + (
        "\n\nTokens per target pass; CPU milliseconds a step; tokens/s over plain decoding, the prompt left out. "
        f"Greedy, {settings['tokens']} tokens a draft, {text(settings['dtype'])}, {settings['limit']} prompts "
        f"({settings['long_limit']} where stretched: untrained there, it tells the time alone), {settings['rounds']} "
        f"round{'s' * (settings['rounds'] > 1)}, {settings['max_new_tokens']} new tokens each; "
        f"{_millions(report, 'target')} target, {_millions(report, 'draft')} draft; "
        f"{report['threads']} of {machine['cores']} cores of {text(machine.get('gpu') or machine['processor'])}; "
        f"commit {text(report['commit'])}."
    )


def _cell(row: Report) -> str:
    time = f"{row['cpu_ms_per_step']:.1f} ms"
    if row["method"] == "plain":
        return time
    tokens = row["tokens_per_pass"]
    written = estimate(tokens) if tokens["observations"] > 1 else number(tokens["value"])  # one text has no interval
    return f"{written}; {time}; {number(row['over_plain']['value'])}×"


def _millions(report: Report, name: str) -> str:
    return f"{report['parameters'][name] / 1e6:.1f}M"
