"""Tables of a report: the main table for Markdown and the terminal, and the folded tables of the page."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import (
    NONE,
    PLAIN,
    answers,
    caption,
    estimate,
    greedy_sentence,
    named,
    number,
    settings,
    shares,
    speedup,
    times,
    value_of,
)
from decoding.measure.markdown import one_line, text
from decoding.measure.results import Figure, Report, ReportRow, SameTexts, TimeSplit

COLUMNS = (
    "setting",
    "method",
    "promise",
    "tokens per target pass",
    "per-position acceptance (of)",
    "tokens/s",
    "speed-up",
    "over transformers",
)
_NOTES = (
    "Same: greedy texts that are identical to those of plain decoding. Speed-up: the speed (total tokens over total "
    "seconds, without the target's prefill) divided by the speed of plain decoding, with its 95% interval over prompts "
    "or batches. Median: the median of paired runs."
)


# --- the main table ---------------------------------------------------------------------------------------------------


def markdown_table(report: Report) -> str:
    """Return the main table in Markdown, for a README or a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
    lines += ["| " + " | ".join([*map(text, row[:3]), *row[3:]]) + " |" for row in table_rows(report)]
    return "\n".join(lines)


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the report's figures as text: a tuple per method, ordered as `COLUMNS`."""
    return [
        (
            *_names(row),
            _promise(row),
            estimate(row.tokens_per_pass),
            shares(row.conditional_acceptance, most=5),
            _tokens_per_second(row),
            _speedup(row),
            speedup(row.speedup_over_transformers_of_totals, row.speedup_over_transformers),
        )
        for row in report.rows
    ]


def _names(row: ReportRow) -> tuple[str, str]:
    return one_line(row.setting), one_line(row.method)


def _promise(row: ReportRow) -> str:
    """Return "lossless" or "lossy". For greedy texts, also say how many of them are identical to texts of plain
    decoding.
    """
    same = row.identical_to_plain
    return row.label if not same or row.method == PLAIN else f"{row.label}, {_same(same)} same"


def _speedup(row: ReportRow) -> str:
    return speedup(row.speedup_of_totals, row.speedup)


def _split(row: ReportRow) -> list[str]:
    return [f"{100 * part:.0f}%" for part in astuple(row.time_split)] if row.time_split else [NONE] * 3


def _values(figures: Sequence[Figure]) -> str:
    return " ".join(number(figure.value) for figure in figures)


def _same(compared: SameTexts) -> str:
    return f"{compared.identical}/{compared.of}"


def _tokens_per_second(row: ReportRow) -> str:
    return number(value_of(row.tokens_per_second), digits=0)


@dataclass(frozen=True)
class TerminalReport:
    """A report for rich consoles: a table of at most 80 columns, followed by sentences."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        report = self.report
        yield Text(one_line(report.title), style="bold")
        yield load_table(report) if report.served else terminal_table(report)
        notes = report.notes if report.served else [_NOTES]
        lines = (*answers(report), f"{caption(report)}.", *(notes or ()), greedy_sentence(report))
        yield Text("\n".join(filter(None, lines)), style="table.caption")


def terminal_table(report: Report) -> Table:
    """Make the main table for 80 columns, with a heading per setting."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in ("same", "tokens\n/pass", "tokens\n/s", "speed-up [95%]", "median"):
        table.add_column(column, justify="right", no_wrap=True)
    for setting in settings(report):
        table.add_section()
        table.add_row(Text(one_line(setting), style="bold"))
        for row in named(report.rows, setting):
            same, lossy = row.identical_to_plain, row.label == "lossy"
            shown = (
                one_line(row.method) + " (lossy)" * lossy,
                _same(same) if same and row.method != PLAIN else "",
                number(value_of(row.tokens_per_pass)),
                _tokens_per_second(row),
                estimate(row.speedup_of_totals, "×"),
                times(row.speedup.median if row.speedup else None),
            )
            table.add_row(*map(Text, shown), style="yellow" if lossy else None)
    return table


def load_table(report: Report) -> Table:
    """Make the table of servers under load: a row per endpoint and concurrency."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in _LOAD:
        table.add_column(column.replace(" ms, ", " ms\n").replace(", ", "\n", 1), justify="right", no_wrap=True)
    for setting in settings(report):
        table.add_section()
        for shown in _load_rows(report, setting):
            table.add_row(*map(Text, shown))
    return table


_LOAD = (
    *("setting", "endpoint", "requests, at a time", "tokens/s, total", "tokens/s, per request", "speed-up [95%]"),
    *(f"{name} ms, p50 / p90 / p99" for name in ("TTFT", "TPOT", "ITL")),
    "tokens per pass, accepted 1, 2, …",
)


def _load_rows(report: Report, setting: str) -> list[tuple[str, ...]]:
    rows = sorted(named(report.cells, setting), key=lambda row: row.batch_size or 0)
    return [
        (
            *_names(row),
            _count(row.batch_size),
            _tokens_per_second(row),
            number(latency.tokens_per_second_of_a_request.value, 1),
            NONE if row.method == PLAIN else estimate(row.speedup_of_totals, "×"),
            *(
                " / ".join(number(value, 1) for value in (of.p50, of.p90, of.p99))
                for of in (latency.ttft_ms, latency.tpot_ms, latency.itl_ms)
            ),
            ": ".join(filter(None, [number(row.acceptance_length), _values(row.reached)])),
        )
        for row in rows
        if (latency := row.latency) is not None
    ]


# --- tables of the page -----------------------------------------------------------------------------------------------


class PageTable(NamedTuple):
    """A table of the page; its first ``names`` columns contain names."""

    heading: str
    columns: tuple[str, ...]
    names: int
    rows: Sequence[tuple[str, ...]]


def page_tables(report: Report) -> list[PageTable]:
    """Return the folded tables of the page, except empty ones."""
    rows, grid, tasks = report.rows, report.grid, report.tasks
    drafted = [row for row in rows if row.conditional_acceptance]
    acceptance = (
        *("setting", "method", "rule", "drafted as", "drafts", "passes", "tokens per target pass"),
        *("1 + accepted tokens per pass", "texts ended in a draft", "passes that accepted 1, 2, …"),
        "accepted / drafted tokens (texts)",
    )
    parts = (field.name for field in fields(TimeSplit))
    speed = ("setting", "method", "speed-up with prefill", "predicted from the cost curve", *parts)
    ends = ("prompts", "tokens per target pass", "tokens/s", "speed-up")
    loads = []
    if report.served:  # the table of loads contains all figures
        loads, grid = [row for setting in settings(report) for row in _load_rows(report, setting)], ()
    tables = [
        PageTable("Under load", _LOAD, 2, loads),
        PageTable("All figures", COLUMNS, 3, [] if loads else table_rows(report)),
        PageTable("Counts of drafted and accepted tokens", acceptance, 5, [_acceptance(row) for row in drafted]),
        PageTable(
            "Speed-up with prefill, predicted speed-up, and time split",
            speed,
            2,
            [
                (
                    *_names(row),
                    speedup(row.speedup_with_prefill_of_totals, row.speedup_with_prefill),
                    times(row.predicted_speedup),
                    *_split(row),
                )
                for row in drafted
            ],
        ),
        PageTable(
            "Other batch sizes and contexts",
            ("setting", "method", "batch", "context", *ends),
            2,
            [(*_names(row), _count(row.batch_size), _count(row.context), *_ends(row)) for row in grid],
        ),
        PageTable(
            "By task",
            ("task", "setting", "method", *ends),
            3,
            [(one_line(row.task or ""), *_names(row), *_ends(row)) for row in tasks],
        ),
    ]
    return [table for table in tables if table.rows]


def _acceptance(row: ReportRow) -> tuple[str, ...]:
    drafted = row.accepted_per_drafted
    return (
        *_names(row),
        *(one_line(name or NONE) for name in (row.rule, row.shape, row.drafts)),
        _count(row.passes),
        estimate(row.tokens_per_pass),
        number(row.acceptance_length),
        _count(row.ended_in_draft),
        _values(row.reached) or NONE,
        f"{estimate(drafted)} ({drafted.observations:,})" if drafted else NONE,
    )


def _ends(row: ReportRow) -> tuple[str, ...]:
    return (_count(row.prompts), estimate(row.tokens_per_pass), _tokens_per_second(row), _speedup(row))


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
