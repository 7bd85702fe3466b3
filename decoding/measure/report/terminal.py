"""The report in a terminal of any width: the methods by setting, the tasks under them, and sentences."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import NONE, estimate, greedy_sentence, number
from decoding.measure.markdown import one_line
from decoding.measure.names import PLAIN
from decoding.measure.report.bars import tasks
from decoding.measure.report.rows import settings, speed_of
from decoding.measure.report.tables import COLUMNS, table_rows
from decoding.measure.report.words import answers, asked, caption, enough, notes, times

Report = dict[str, Any]
WIDE = 150
"""Columns from which the table has every column of `COLUMNS`."""
_NARROW_NOTES = (
    "Same: greedy texts identical to plain decoding's. Speed-up: all tokens over all seconds, divided by plain "
    "decoding's, prefill left out, 95% interval over prompts or batches. Median: of the ratios of paired runs."
)
_TASK_WIDTH, _METHOD_WIDTH = 21, 12


@dataclass(frozen=True)
class TerminalReport:
    """A report for rich's consoles, which it asks for their width when it is printed."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        report, width = self.report, options.max_width
        yield Text(one_line(report.get("title") or ""), style="bold")
        yield wide_table(report) if width >= WIDE else narrow_table(report)
        yield from _task_tables(report, width)
        explained = notes(report) if width >= WIDE else f"{_NARROW_NOTES} {greedy_sentence(report)}"
        lines = (*answers(report), f"{caption(report)}.", asked(report), *enough(report), explained)
        yield Text("\n".join(filter(None, lines)), style="table.caption")


def terminal_table(report: Report) -> TerminalReport:
    """Make what a terminal shows of the report: tables that fit its width, and sentences under them."""
    return TerminalReport(report)


def wide_table(report: Report) -> Table:
    """Make the table with every column."""
    table = Table()
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 3 else "right", overflow="fold")
    previous = None
    for row in table_rows(report):
        if previous is not None and row[0] != previous:
            table.add_section()
        previous = row[0]
        style = "yellow" if row[2].startswith("lossy") else None
        table.add_row(*(Text(cell.replace("; ", "\n")) for cell in row), style=style)
    return table


def narrow_table(report: Report) -> Table:
    """Make the table for 80 columns: a heading for each setting, and the figures that decide."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in ("same", "tokens\n/pass", "tokens\n/s", "speed-up [95%]", "median"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = report["rows"]
    for setting in settings(report):
        table.add_section()
        table.add_row(Text(one_line(setting), style="bold"))
        for row in rows:
            if row["setting"] == setting:
                table.add_row(*map(Text, _narrow(row)), style="yellow" if row["label"] == "lossy" else None)
    return table


def _narrow(row: Report) -> tuple[str, ...]:
    same = row.get("identical_to_plain")
    return (
        one_line(row["method"]) + (" (lossy)" if row["label"] == "lossy" else ""),
        f"{same['identical']}/{same['of']}" if same and row["method"] != PLAIN else "",
        number((row.get("tokens_per_pass") or {}).get("value")),
        number((row.get("tokens_per_second") or {}).get("value"), digits=0),
        estimate(row.get("speedup_of_totals"), "×"),
        times((row.get("speedup") or {}).get("median")),
    )


def _task_tables(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield a table of tasks and methods for each setting, with as many methods as fit, the fastest first."""
    for matrix in tasks(report):
        fit = max(1, (width - _TASK_WIDTH - 2) // (_METHOD_WIDTH + 1))
        speeds = {
            one_line(row["method"]): speed_of(row) or 0.0
            for row in report["rows"]
            if one_line(row["setting"]) == matrix.setting
        }
        ranked = sorted(range(len(matrix.methods)), key=lambda place: -speeds.get(matrix.methods[place], 0.0))[:fit]
        left_out = len(matrix.methods) - len(ranked)
        heading = f"Speed-up by task, {matrix.setting}" + (f" ({left_out} slower methods left out)" if left_out else "")
        table = Table(
            title=Text(heading, style="bold"), title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False
        )
        table.add_column("task (prompts)", overflow="fold", max_width=_TASK_WIDTH, min_width=_TASK_WIDTH)
        for place in ranked:
            table.add_column(Text(matrix.methods[place]), justify="right", overflow="fold", max_width=_METHOD_WIDTH)
        for task, prompts, cells in matrix.rows:
            styles = [cells[place] for place in ranked]
            shown = [Text(cell.shown, style={"gain": "green", "loss": "red"}.get(cell.kind, "")) for cell in styles]
            table.add_row(Text(task + (f" ({prompts})" if prompts != NONE else "")), *shown)
        yield table
