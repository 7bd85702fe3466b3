"""A report as sentences, tables, pictures and a page, which claim no more than the data shows."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from full_report import COUNTS, DRAFT, HEADS, PEER, estimate, full_report, row
from rich.console import Console

from decoding.measure import figures
from decoding.measure.figures import answers, greedy_sentence, methods
from decoding.measure.report.page import bar_charts, write_html
from decoding.measure.report.tables import TerminalReport, page_tables, table_rows, terminal_table
from decoding.measure.results import Figure, Quartiles, Report, report_from_json

REPORT = report_from_json(full_report())


def of_rows(*compared: dict[str, Any] | None, **facts: Any) -> Report:
    """Make a report with a greedy row for each of these comparisons, by default in bf16 on a CPU."""
    spread = {"median": 1.75, "low_quartile": 1.5, "high_quartile": 2.0, "observations": 12}
    rows = [
        {
            "setting": "greedy",
            "method": f"method {index}",
            "label": "lossless",
            "identical_to_plain": each,
            "tokens_per_second": estimate(2.5),
            "speedup": spread,
        }
        for index, each in enumerate(compared)
    ]
    about: dict[str, Any] = {
        "hardware": {"processor": "X", "cores": 1, "threads": 1},
        "dtype": "bfloat16",
        "parameters": 1e6,
    }
    about |= {"prompts": 1, "max_new_tokens": 4, "commit": "c", "versions": {}, **facts, "rows": rows}
    return report_from_json(about)


def parted(same: int, of: int, margin: float | None, early: int = 0) -> dict[str, Any]:
    return {"identical": same, "of": of, "largest_margin": margin, "ended_early": early}


def shown(report: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(TerminalReport(report))
    return console.export_text()


def page_of(report: Report, folder: Path) -> str:
    write_html(report, folder / "report.html")
    return (folder / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ").replace("&#39;", "'")


# --- figures and sentences --------------------------------------------------------------------------------------------


def test_figures_say_their_interval_and_count_and_are_a_dash_if_not_measured() -> None:
    share, nothing = Figure(0.887, 0.8, 0.9, 1312), Figure(None)
    assert figures.shares([share, nothing, share], most=2) == "0.89 (1,312) –"
    assert figures.estimate(Figure(2.5, 2.25, 2.75), "×") == "2.50× [2.25, 2.75]"
    assert figures.estimate(Figure(2.5, None, 2.75)) == "2.50"
    both = figures.speedup(Figure(2.0, 1.8, 2.2), Quartiles(2.75, 2.5, 3.0))
    assert both == "2.00× [1.80, 2.20]; median 2.75× [2.50, 3.00]", "the totals come first"
    for dash in (figures.number(None), figures.estimate(nothing), figures.shares([]), figures.speedup(None, None)):
        assert dash == "–"


def test_the_answer_names_the_fastest_method_and_where_it_no_longer_pays() -> None:
    """At T=1 the draft model gains 2.5 × 0.8 at 512 tokens of context, and 0.4 of this at 8,192."""
    assert answers(REPORT) == [
        "Fastest: draft model, 4 tokens, 2.50× [2.25, 2.75] plain decoding, greedy, batch 1.",
        "Fastest: draft model, 4 tokens, 2.00× [1.80, 2.20] plain decoding, T=1, batch 1; "
        "below 1× at 8,192 tokens of context and above.",
        "Fastest: draft model, 4 tokens (lossy), 2.00× [1.80, 2.20] plain decoding, T=1, typical, batch 1.",
    ]
    without = replace(REPORT, rows=tuple(row for row in REPORT.rows if row.method != DRAFT))
    assert answers(without)[0].endswith(
        "below 1× at batch 16 and above; below 1× at 8,192 tokens of context and above."
    )


def test_an_answer_promises_no_gain_that_was_not_measured() -> None:
    rows = [row("greedy", "plain"), row("greedy", PEER)]

    def said() -> list[str]:
        return answers(report_from_json(full_report(rows=rows, grid=[])))

    assert said()[0].startswith("Nothing is faster than plain decoding; the best method is ")
    rows[1]["speedup_of_totals"] = estimate(1.05)
    assert "interval contains 1×, so these prompts do not show a gain" in said()[0]
    del rows[1]
    assert said() == ["Only plain decoding was timed (greedy)."]


@pytest.mark.parametrize(
    ("compared", "facts", "sentence"),
    [
        ([parted(4, 4, 0.0), parted(4, 4, 0.0)], {}, "All 8 greedy texts are identical to plain decoding."),
        ([parted(4, 4, 0.0), parted(3, 4, 0.125)], {}, "0.125 apart, near-ties that bfloat16 may round differently"),
        ([parted(3, 4, 4.5)], {}, "4.5 apart, more than rounding in bfloat16 can cause: look at these texts, and rep"),
        ([parted(2, 4, 0.001)], {"dtype": "float32"}, "0.001 apart. In fp32 on a CPU all texts must be equal: please"),
        ([parted(3, 4, None, early=1)], {}, "1 differ only in length, and rounding cannot cause that: please"),
        (
            [parted(3, 4, None)],
            {},
            "1 of 4 greedy texts differ from plain decoding (75% are equal), by a margin that was not",
        ),
    ],
)
def test_the_sentence_on_greedy_texts_is_made_of_this_reports_data_and_stands_in_every_view(
    compared: list[dict[str, Any] | None], facts: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    report = of_rows(*compared, **facts)
    assert sentence in greedy_sentence(report) and greedy_sentence(of_rows(None)) == ""
    gpu = of_rows(*compared, **facts, hardware={"processor": "X", "gpu": "Y", "cores": 1, "threads": 1})
    assert "on a CPU" not in greedy_sentence(gpu)
    assert sentence in page_of(report, tmp_path) and sentence in " ".join(shown(report, 600).split())


# --- tables -----------------------------------------------------------------------------------------------------------


def test_acceptance_counted_both_ways_and_the_split_of_the_time_stand_in_tables() -> None:
    """Of 100 passes of the draft, 20 each accepted 0, 1, 2, 3 and 4 tokens, which is 2 on average; 5 texts ended inside
    the draft.
    """

    def cells(heading: str) -> dict[str, str]:
        table = next(table for table in page_tables(REPORT) if table.heading.startswith(heading))
        found = next(cells for cells in table.rows if cells[:2] == ("greedy", DRAFT))
        return dict(zip(table.columns, found, strict=True))

    both, speed = cells("Counts"), cells("Speed")
    assert both["1 + accepted tokens per pass"] == "3.00"
    assert both["tokens per target pass"].startswith("2.95 ") and both["texts ended in a draft"] == "5"
    assert both["passes that accepted 1, 2, …"] == "0.80 0.60 0.40 0.20"
    assert [speed[part] for part in ("draft", "verify", "overhead")] == ["30%", "60%", "10%"]


def test_a_terminal_of_80_columns_shows_every_figure_whole() -> None:
    lines = [line.rstrip() for line in shown(REPORT).splitlines()]
    assert max(map(len, lines)) <= 80
    (best,) = [line for line in lines if "2.50× [2.25, 2.75]" in line and "Fastest" not in line]
    assert best.split()[-6:] == ["2.95", "250", "2.50×", "[2.25,", "2.75]", "2.75×"]
    assert terminal_table(REPORT).row_count == len(REPORT.rows) + 3, "a heading for each setting"


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_bar_is_as_long_as_its_speed_up_and_all_settings_have_one_scale() -> None:
    greedy, sampled, typical = bar_charts(REPORT)
    by_name = {bar.name: bar for bar in greedy.bars}
    assert list(by_name) == methods(REPORT) and "plain" not in by_name, "its speed-up is the line at 1"
    assert by_name[HEADS].width == pytest.approx(2 * greedy.one) and greedy.one == sampled.one
    assert by_name[DRAFT].shown == "2.50× [2.25, 2.75]"
    assert by_name[PEER].kind == "peer" and {bar.kind for bar in typical.bars} == {"ours lossy"}
    assert max(sum(bar.interval or ()) for chart in (greedy, sampled, typical) for bar in chart.bars) < 100


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone_holds_every_figure_and_marks_drafted_tokens(tmp_path: Path) -> None:
    page = page_of(replace(REPORT, title="a <b>title</b>"), tmp_path)
    assert "Zoe<mark> has 3 + 4 =</mark> 7<mark> apples.</mark>\n<mark>The answer is</mark> 7.</div>" in page
    assert "default-src 'none'" in page and "a &lt;b&gt;title" in page
    assert not any(word in page for word in ("src=", "<script", "<link", "@import", "url(http", "None", "nan"))
    assert page.index("<details") > page.index('class="lead"')
    assert all(f">{cell}</td>" in page for cells in table_rows(REPORT) for cell in cells)


def test_what_was_not_measured_is_a_dash_and_parts_without_data_are_left_out(tmp_path: Path) -> None:
    nothing, no_pairs = Figure(None), Quartiles(None)
    (row,) = of_rows(parted(0, 1, None, early=1)).rows
    row = replace(row, speedup_of_totals=nothing, tokens_per_second=nothing, tokens_per_pass=nothing)
    row = replace(row, speedup=no_pairs, speedup_with_prefill=no_pairs, speedup_over_transformers=no_pairs)
    row = replace(row, conditional_acceptance=(nothing,), accepted_per_drafted=nothing)
    report = replace(of_rows(None), rows=(row,), cost_curve_ms={1: 1.0})
    assert table_rows(report)[0][3:] == ("–",) * 5
    page = page_of(report, tmp_path)
    assert not any(part in page for part in ("None", "By task", "Over batch size", "with accepted drafts marked"))
    assert set(COUNTS) & set(methods(report)) == set()
