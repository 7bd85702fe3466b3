"""Tables of a report, as text: the main one for Markdown and the page, and those that only the page folds away."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from decoding.measure.figures import NONE, estimate, number, shares, speedup
from decoding.measure.markdown import one_line, text
from decoding.measure.names import PLAIN
from decoding.measure.report.words import times

Report = dict[str, Any]

COLUMNS = (
    "setting",
    "method",
    "promise",
    "tokens per target pass",
    "accepted at 1, 2, … (of)",
    "tokens/s",
    "speed-up",
    "over transformers",
)


class Table(NamedTuple):
    """A table for the page: its heading, its columns, those of them (from the left) that hold names, and its rows."""

    heading: str
    columns: tuple[str, ...]
    names: int
    rows: Sequence[tuple[str, ...]]


def markdown_table(report: Report) -> str:
    """Write the table in Markdown, for a README or a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
    lines += ["| " + " | ".join([*map(text, row[:3]), *row[3:]]) + " |" for row in table_rows(report)]
    return "\n".join(lines)


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the report's figures as text, a tuple per method in the order of `COLUMNS`."""
    return [_main(row) for row in report["rows"]]


def _main(row: Report) -> tuple[str, ...]:
    return (
        one_line(row["setting"]),
        one_line(row["method"]),
        promise(row),
        estimate(row.get("tokens_per_pass")),
        shares(row.get("conditional_acceptance"), most=5),
        number((row.get("tokens_per_second") or {}).get("value"), digits=0),
        speedup(row),
        speedup(row, "speedup_over_transformers"),
    )


def promise(row: Report) -> str:
    """Return the row's label, lossless or lossy; for greedy texts with the count identical to plain decoding's."""
    same = row.get("identical_to_plain")
    if not same or row["method"] == PLAIN:
        return str(row["label"])
    return f"{row['label']}, {same['identical']}/{same['of']} same"


def tables(report: Report) -> list[Table]:
    """Return every table that the page folds away and the report has rows for."""
    found = [
        Table("All figures", COLUMNS, 3, table_rows(report)),
        _acceptance_table(report),
        _speed_table(report),
        _cells_table(report),
        _tasks_table(report),
    ]
    return [table for table in found if table.rows]


def _acceptance_table(report: Report) -> Table:
    columns = (
        "setting",
        "method",
        "passes",
        "tokens per target pass",
        "accepted per pass",
        "acceptance length, 1 + Σ",
        "ended in a draft",
        "reached 1, 2, …",
        "accepted per drafted (of)",
    )
    rows = [
        (
            one_line(row["setting"]),
            one_line(row["method"]),
            _count(row.get("passes")),
            estimate(row.get("tokens_per_pass")),
            estimate(row.get("accepted_per_pass")),
            _acceptance_length(row),
            _count(row.get("ended_in_draft")),
            " ".join(number(each["value"]) for each in row.get("reached") or []) or NONE,
            _share(row["accepted_per_drafted"]) if row.get("accepted_per_drafted") else NONE,
        )
        for row in report["rows"]
        if row.get("conditional_acceptance")
    ]
    return Table("Acceptance, counted both ways", columns, 2, rows)


def _acceptance_length(row: Report) -> str:
    found = row.get("acceptance_length")
    return estimate(found) if isinstance(found, dict) else number(found)


def _share(figure: Report) -> str:
    return f"{estimate(figure)} ({figure['observations']:,})"


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _speed_table(report: Report) -> Table:
    columns = ("setting", "method", "speed-up with the prefill", "speed-up predicted from the cost curve")
    rows = [
        (
            one_line(row["setting"]),
            one_line(row["method"]),
            speedup(row, "speedup_with_prefill"),
            times(row.get("predicted_speedup")),
        )
        for row in report["rows"]
        if row.get("conditional_acceptance")
    ]
    return Table("Speed with the prefill, and as predicted", columns, 2, rows)


def _cells_table(report: Report) -> Table:
    columns = ("setting", "method", "batch", "context", "prompts", "tokens per target pass", "tokens/s", "speed-up")
    rows = [
        (
            one_line(row["setting"]),
            one_line(row["method"]),
            _count(row.get("batch_size")),
            _count(row.get("context")),
            _count(row.get("prompts")),
            *_figures(row),
        )
        for row in report.get("grid") or []
    ]
    return Table("Other batch sizes and contexts", columns, 2, rows)


def _tasks_table(report: Report) -> Table:
    columns = ("task", "setting", "method", "prompts", "tokens per target pass", "tokens/s", "speed-up")
    rows = [
        (
            one_line(row["task"]),
            one_line(row["setting"]),
            one_line(row["method"]),
            _count(row.get("prompts")),
            *_figures(row),
        )
        for row in report.get("tasks") or []
    ]
    return Table("By task", columns, 3, rows)


def _figures(row: Report) -> tuple[str, str, str]:
    speed = number((row.get("tokens_per_second") or {}).get("value"), digits=0)
    return estimate(row.get("tokens_per_pass")), speed, speedup(row)
