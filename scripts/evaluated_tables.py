"""Tables of docs/results/measured.md and docs/how-to/plan.md: an evaluation by task, by cell, and as predicted."""

from collections.abc import Callable, Iterable
from typing import Any

from decoding.measure.figures import NONE, estimate, number
from decoding.measure.markdown import text

Report = dict[str, Any]


def tasks_table(report: Report) -> str:
    """Return for each setting a row per method and a column per task: speed-up over plain, and tokens per pass."""
    rows = [{**row, "task": "all"} for row in report["rows"]] + report["tasks"]
    tasks = dict.fromkeys(row["task"] for row in report["tasks"])
    columns = {task: (lambda row, task=task: row["task"] == task) for task in (*tasks, "all")}
    return _by_setting(report, rows, columns)


def cells_table(report: Report) -> str:
    """Return for each setting a row per method and a column per batch size and context."""
    rows = report["rows"] + report["grid"]
    cells = sorted({(row["context"] or 0, row["batch_size"]) for row in rows})
    columns = {
        f"{context or 'own'} tokens, batch {size}": (
            lambda row, cell=(context, size): (row["context"] or 0, row["batch_size"]) == cell
        )
        for context, size in cells
    }
    return _by_setting(report, rows, columns)


def _by_setting(report: Report, rows: Iterable[Report], columns: dict[str, Callable[[Report], bool]]) -> str:
    rows = [row for row in rows if _value(row, "speedup_of_totals") is not None or _value(row, "tokens_per_pass")]
    parts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        lines = [f"| {text(setting)} | {' | '.join(map(text, columns))} |", "|---|" + "---:|" * len(columns)]
        for method in dict.fromkeys(row["method"] for row in mine if row["method"] != "plain"):
            own = [row for row in mine if row["method"] == method]
            cells = [next((_gain(row) for row in own if fits(row)), NONE) for fits in columns.values()]
            lines.append(f"| {text(method)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    untimed = any(_value(row, "speedup_of_totals") is None for row in rows)
    without = " Rows without a speed-up show acceptance only." if untimed else ""
    parts.append(
        f"Speed-up over plain decoding, and behind the dot tokens per target pass.{without} {_measured(report)}"
    )
    return "\n\n".join(parts)


def _measured(report: Report) -> str:
    """Describe what was measured, without the batch size and the context of the first cell."""
    cut = f" ({report['prompts_cut']} too long, cut)" if report.get("prompts_cut") else ""
    return text(
        f"{report['parameters'] / 1e6:.0f}M-parameter target in {report['dtype']} on {_place(report)}; "
        f"{report['prompts']} prompts{cut}, up to {report['max_new_tokens']} new tokens; "
        f"commit {', '.join(report['commits'])}."
    )


def _gain(row: Report) -> str:
    passes, gain = number(_value(row, "tokens_per_pass")), _value(row, "speedup_of_totals")
    return (NONE if gain is None else f"{number(gain)}×") + ("" if passes == NONE else f" · {passes}")


def _value(row: Report, name: str) -> float | None:
    found: float | None = (row.get(name) or {}).get("value")
    return found


def predictions_table(report: Report) -> str:
    """Return a row for each pair that `benchmarks/planned.py` planned for and then measured, with the form chosen."""
    lines = [
        "| target | drafter | batch | planned | tokens per pass: predicted, measured | predicted | measured | ratio |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in report["pairs"]:
        tokens = row["tokens_per_pass"]
        measured = row["measured"]
        cells = (
            text(row["target"]),
            text(row["drafter"]),
            str(row["batch_size"]),
            _form(row["spec"]),
            f"{number(tokens['predicted'])}, {number(tokens['measured'])}",
            f"{number(row['predicted'])}×",
            f"{estimate(measured, '×') if measured['observations'] > 1 else number(measured['value']) + '×'}",
            number(row["ratio"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    within = sum(row["within"] for row in report["pairs"])
    return "\n".join(lines) + (
        f"\n\n{within} of {len(report['pairs'])} within 10%. Ratio: predicted over measured; intervals over groups of "
        f"prompts, where there is more than one. {_about(report)}"
    )


def _form(spec: str) -> str:
    """Return the shape that a spec asks for: its options ``tree`` (paths) or ``tokens``."""
    options = dict(item.split("=", 1) for item in spec.partition(":")[2].split(",") if "=" in item)
    if "tree" in options:
        depths = [path.count(".") + 1 for path in options["tree"].split("/")]
        return f"chain of {len(depths)}" if max(depths) == len(depths) else f"tree of {len(depths)}"
    return f"chain of {options['tokens']}" if "tokens" in options else "its own"


def trees_table(report: Report) -> str:
    """Return a row for each tree that the same heads decoded with: the published one, and two calibrated ones."""
    lines = [
        "| target | heads | tree | nodes | depth | tokens per pass | speed-up | over the published tree |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for each in report["trees"]:
        for form in each["forms"]:
            cells = (
                text(each["target"]),
                text(each["heads"]),
                text(form["tree"]),
                str(form["nodes"]),
                str(form["depth"]),
                number(form["tokens_per_pass"]),
                estimate(form["speedup"], "×"),
                estimate(form["over_published"], "×"),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _about(report: Report) -> str:
    settings = report["settings"]
    return text(
        f"{settings['prompts']} prompts, half to plan on and half to check on, up to {settings['max_new_tokens']} new "
        f"tokens, temperature {settings['temperature']:g}, {settings['dtype']}, on {_place(report)}; "
        f"commit {report['commit']}."
    )


def _place(report: Report) -> str:
    machine = report["hardware"]
    return str(machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}")
