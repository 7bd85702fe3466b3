"""Tables of a report: the main one for Markdown and terminal, and the page's folded ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import (
    NONE,
    PLAIN,
    Figure,
    Report,
    answers,
    caption,
    cells,
    estimate,
    greedy_sentence,
    named,
    number,
    settings,
    shares,
    speedup,
    times,
)
from decoding.measure.markdown import one_line, text

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
    "Same: greedy texts identical to plain decoding's. Speed-up: total tokens over total seconds, divided by plain "
    "decoding's, without the target's prefill, 95% interval over prompts or batches. Median: of the ratios of paired "
    "runs."
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
            estimate(row.get("tokens_per_pass")),
            shares(row.get("conditional_acceptance"), most=5),
            _tokens_per_second(row),
            speedup(row),
            speedup(row, "speedup_over_transformers"),
        )
        for row in report["rows"]
    ]


def _names(row: Report) -> tuple[str, str]:
    return one_line(row["setting"]), one_line(row["method"])


def _promise(row: Report) -> str:
    """Return "lossless" or "lossy"; for greedy texts add how many are identical to plain decoding's."""
    same = row.get("identical_to_plain")
    return str(row["label"]) if not same or row["method"] == PLAIN else f"{row['label']}, {_same(same)} same"


def _same(compared: Report) -> str:
    return f"{compared['identical']}/{compared['of']}"


def _tokens_per_second(row: Report) -> str:
    return number((row.get("tokens_per_second") or {}).get("value"), digits=0)


@dataclass(frozen=True)
class TerminalReport:
    """A report for rich consoles: a table of at most 80 columns with sentences below."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        report = self.report
        yield Text(one_line(report.get("title") or ""), style="bold")
        yield load_table(report) if report.get("served") else terminal_table(report)
        notes = report.get("notes") if report.get("served") else [_NOTES]
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
        for row in named(report["rows"], setting):
            same, lossy = row.get("identical_to_plain"), row["label"] == "lossy"
            shown = (
                one_line(row["method"]) + " (lossy)" * lossy,
                _same(same) if same and row["method"] != PLAIN else "",
                number((row.get("tokens_per_pass") or {}).get("value")),
                _tokens_per_second(row),
                estimate(row.get("speedup_of_totals"), "×"),
                times((row.get("speedup") or {}).get("median")),
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
    rows = sorted(named(cells(report), setting), key=lambda row: row["batch_size"])
    return [
        (
            *_names(row),
            _count(row["batch_size"]),
            _tokens_per_second(row),
            number(row["latency"]["tokens_per_second_of_a_request"]["value"], 1),
            NONE if row["method"] == PLAIN else estimate(row.get("speedup_of_totals"), "×"),
            *(
                " / ".join(number(row["latency"][name][each], 1) for each in ("p50", "p90", "p99"))
                for name in ("ttft_ms", "tpot_ms", "itl_ms")
            ),
            ": ".join(
                [
                    number(row.get("acceptance_length")),
                    *filter(None, [" ".join(number(each["value"]) for each in row.get("reached") or [])]),
                ]
            ),
        )
        for row in rows
    ]


# --- tables of the page -----------------------------------------------------------------------------------------------


class PageTable(NamedTuple):
    """A table for the page; the first ``names`` columns contain names."""

    heading: str
    columns: tuple[str, ...]
    names: int
    rows: Sequence[tuple[str, ...]]


def page_tables(report: Report) -> list[PageTable]:
    """Return the page's folded tables that have rows."""
    rows, grid, tasks = report["rows"], report.get("grid") or [], report.get("tasks") or []
    drafted = [row for row in rows if row.get("conditional_acceptance")]
    acceptance = (
        *("setting", "method", "rule", "drafted as", "drafts", "passes", "tokens per target pass"),
        *("1 + accepted tokens per pass", "texts ended in a draft", "passes that accepted 1, 2, …"),
        "accepted / drafted tokens (of)",
    )
    parts = ("draft", "verify", "overhead")
    speed = ("setting", "method", "speed-up with prefill", "predicted from the cost curve", *parts)
    ends = ("prompts", "tokens per target pass", "tokens/s", "speed-up")
    loads = []
    if report.get("served"):  # the table of loads has all figures
        loads, grid = [each for setting in settings(report) for each in _load_rows(report, setting)], []
    found = [
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
                    speedup(row, "speedup_with_prefill"),
                    times(row.get("predicted_speedup")),
                    *(f"{100 * row['time_split'][part]:.0f}%" if row.get("time_split") else NONE for part in parts),
                )
                for row in drafted
            ],
        ),
        PageTable(
            "Other batch sizes and contexts",
            ("setting", "method", "batch", "context", *ends),
            2,
            [(*_names(row), _count(row.get("batch_size")), _count(row.get("context")), *_ends(row)) for row in grid],
        ),
        PageTable(
            "By task",
            ("task", "setting", "method", *ends),
            3,
            [(one_line(row["task"]), *_names(row), *_ends(row)) for row in tasks],
        ),
    ]
    return [table for table in found if table.rows]


def _acceptance(row: Report) -> tuple[str, ...]:
    drafted: Figure = row.get("accepted_per_drafted")
    return (
        *_names(row),
        *(one_line(row.get(key) or NONE) for key in ("rule", "shape", "drafts")),
        _count(row.get("passes")),
        estimate(row.get("tokens_per_pass")),
        number(row.get("acceptance_length")),
        _count(row.get("ended_in_draft")),
        " ".join(number(each["value"]) for each in row.get("reached") or []) or NONE,
        f"{estimate(drafted)} ({drafted['observations']:,})" if drafted else NONE,
    )


def _ends(row: Report) -> tuple[str, ...]:
    return (_count(row.get("prompts")), estimate(row.get("tokens_per_pass")), _tokens_per_second(row), speedup(row))


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
