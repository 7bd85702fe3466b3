"""What a full report says and draws: its answer, its crossings, its bars and its texts, in a page and in a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from full_report import COUNTS, DRAFT, HEADS, LOOKUP, PEER, estimate, full_report, row
from rich.console import Console

from decoding.measure.report import bars, curves, terminal_table, write_html
from decoding.measure.report.rows import methods
from decoding.measure.report.style import COLOURS, GRID, INK, css, panel, series, shade_below_one, styled, svg
from decoding.measure.report.tables import tables
from decoding.measure.report.terminal import narrow_table
from decoding.measure.report.words import answers, asked, below_from, caption, crossing, curve, enough

ROOT = Path(__file__).parent.parent
REPORT = full_report()


def found(setting: str, method: str) -> dict[str, Any]:
    return next(row for row in REPORT["rows"] if (row["setting"], row["method"]) == (setting, method))


# --- sentences ------------------------------------------------------------------------------------------------------


def test_the_answer_names_the_fastest_method_and_where_it_no_longer_pays() -> None:
    """At T=1 the draft model gains 2.5 × 0.8 at 512 tokens of context, and 0.4 of this at 8,192."""
    assert answers(REPORT) == [
        "Fastest: draft model, 4 tokens, 2.50× [2.25, 2.75] plain decoding, greedy, batch 1.",
        "Fastest: draft model, 4 tokens, 2.00× [1.80, 2.20] plain decoding, T=1, batch 1; "
        "below 1× from 8,192 tokens of context on.",
        "Fastest: draft model, 4 tokens (lossy), 2.00× [1.80, 2.20] plain decoding, T=1, typical, batch 1.",
    ]
    without = full_report(rows=[row for row in REPORT["rows"] if row["method"] != DRAFT])
    assert answers(without)[0] == (
        "Fastest: heads, tree of 12, 2.00× [1.80, 2.20] plain decoding, greedy, batch 1; below 1× from batch 16 on; "
        "below 1× from 8,192 tokens of context on."
    )


def test_an_answer_promises_no_gain_that_was_not_measured() -> None:
    rows = [row("greedy", "plain"), row("greedy", PEER)]
    assert answers(full_report(rows=rows, grid=[])) == [
        "Nothing is faster than plain decoding: at best transformers generate, 0.90× [0.81, 0.99] plain decoding, "
        "greedy, batch 1."
    ]
    rows[1]["speedup_of_totals"] = estimate(1.05)
    assert answers(full_report(rows=rows, grid=[]))[0].endswith(
        "; its interval holds 1×, so these prompts do not show a gain."
    )
    assert answers(full_report(rows=rows[:1], grid=[])) == ["Nothing but plain decoding was timed, greedy."]


def test_a_curve_crosses_1_between_two_measured_places() -> None:
    """From 1.2 at batch 4 to 0.4 at 16 a line over log2 of the batch size crosses 1 at a quarter: 4 × 4^(1/4)."""
    points = curve(REPORT, found("greedy", HEADS), "batch_size")
    assert points == [(1, 2.0), (4, pytest.approx(1.2)), (16, pytest.approx(0.4))]
    assert crossing(points, "batch") == "falls below 1× between batch 4 and 16 (about 5.7)"
    assert crossing([(1, 0.5), (4, 1.5), (16, 0.5)], "batch") == (
        "rises above 1× between batch 1 and 4 (about 2.0), then falls below 1× between batch 4 and 16 (about 8.0)"
    )
    assert crossing([(1, 2.0), (16, 1.0)], "batch") == "at or above 1× up to batch 16"
    assert crossing([(1, 0.9), (16, 0.8)], "batch") == "below 1× everywhere, also at batch 1"
    assert crossing([(512, 1.2), (8192, 0.4)], "context").endswith("(about 1,000)")


def test_a_method_stays_below_1_from_the_first_place_without_a_gain_behind_it() -> None:
    assert below_from([(1, 2.0), (4, 0.9), (16, 0.8)]) == 4
    assert below_from([(1, 2.0), (4, 0.9), (16, 1.0)]) is None
    assert below_from([(1, 0.5)]) is None, "one place is no curve"


def test_a_curve_keeps_the_other_axis_where_its_row_has_it() -> None:
    assert curve(REPORT, row("greedy", DRAFT, batch=16), "context") == [(512, 1.5), (8192, pytest.approx(0.6))]


def test_one_line_says_what_was_asked() -> None:
    assert asked(REPORT) == (
        "Asked: chat template; thinking off; first turns; rule greedy, token rejection and typical acceptance; "
        "drafted as tree and chain; drafts greedy, deterministic and sampled."
    )
    assert asked({"rows": [{"method": "plain"}]}) == "", "older reports do not say"
    assert "batch 1;" in caption(REPORT) and "80 prompts of 512 tokens," in caption(REPORT)


def test_the_caption_tells_of_machines_commits_processes_and_turns_that_were_left_out() -> None:
    about = {"processors": ["Another", "Some processor"], "commits": ["a", "b"], "processes": 2}
    told = caption(full_report(**about, prompts_left_out=1, later_turns_left_out=3))
    assert "Some processor, 8 cores, 8 threads, and before on Another, 2 processes side by side;" in told
    assert "(4 too long, left out)" in told and told.endswith("commits a and b")
    assert caption(full_report(commits=["a"])).endswith("commit a")


def test_the_two_fastest_methods_are_told_apart_by_so_many_prompts() -> None:
    assert enough(REPORT) == [
        "greedy: draft model, 4 tokens is 1.25× [1.12, 1.38] the speed of heads, tree of 12; 43 prompts tell them "
        "apart at 95% with 80% power (80 were measured).",
        "T=1: draft model, 4 tokens is 1.01× [0.91, 1.11] the speed of heads, tree of 12; no number of prompts was "
        "found that would tell them apart.",
    ]


# --- pictures -------------------------------------------------------------------------------------------------------


def test_a_bar_is_as_long_as_its_speed_up_and_all_settings_have_one_scale() -> None:
    greedy, sampled, typical = bars.speedups(REPORT)
    by_name = {bar.name: bar for bar in greedy.bars}
    assert list(by_name) == methods(REPORT) and "plain" not in by_name, "its speed-up is the line at 1"
    assert by_name[HEADS].width == pytest.approx(2 * greedy.one) and greedy.one == sampled.one
    assert by_name[DRAFT].shown == "2.50× [2.25, 2.75]" and by_name[DRAFT].median == "2.75×"
    assert by_name[PEER].kind == "peer" and {bar.kind for bar in typical.bars} == {"ours lossy"}
    ends = [sum(bar.quartiles or ()) for chart in (greedy, sampled, typical) for bar in chart.bars]
    assert max(ends) < 100


def test_accepted_lengths_fill_a_bar_and_long_ones_share_a_segment() -> None:
    _, stacks = bars.accepted_lengths(REPORT)[0]
    by_name = {stack.name: stack.segments for stack in stacks}
    assert [(part.shown, part.width) for part in by_name[HEADS]] == [("0", 40), ("1", 30), ("2", 20), ("3", 10)]
    assert by_name[HEADS][1].title == "1 accepted: 30% of 100 passes"
    long = {**row("greedy", LOOKUP), "accepted_length_histogram": {"0": 97, "9": 1, "12": 2}}
    ((_, (stack,)),) = bars.accepted_lengths(full_report(rows=[long]))
    assert [(part.title, part.shown) for part in stack.segments] == [
        ("0 accepted: 97% of 100 passes", "0"),
        ("9+ accepted: 3% of 100 passes", ""),
    ]


def test_the_shares_of_the_time_fill_a_bar() -> None:
    for _, stacks in bars.time_splits(REPORT):
        assert all(sum(part.width for part in stack.segments) == pytest.approx(100) for stack in stacks)
        assert [part.shown for part in stacks[0].segments] == ["30%", "60%", ""]


def test_a_task_shows_losses_apart_from_gains_and_strong_ones_stronger() -> None:
    greedy, sampled = bars.tasks(REPORT)
    task, prompts, cells = greedy.rows[0]
    assert (greedy.setting, sampled.setting) == ("greedy", "T=1") and greedy.methods == [HEADS, DRAFT, LOOKUP, PEER]
    assert (task, prompts) == ("mt_bench", "10")
    shown = dict(zip(greedy.methods, greedy.rows[-1][2], strict=True))
    assert shown[LOOKUP].shown == "0.66×" and shown[LOOKUP].kind == "loss" and shown[HEADS].kind == "gain"
    assert cells[0].strength > shown[HEADS].strength
    assert bars.tasks(full_report(tasks=[])) == []


def test_a_curve_is_drawn_for_each_setting_and_the_first_place_on_the_other_axis_stays_unfolded() -> None:
    drawn = curves.curves(REPORT, "batch_size")
    assert [(picture.heading, picture.main) for picture in drawn] == [
        ("greedy, context 512", True),
        ("greedy, context 8,192", False),
        ("T=1, context 512", True),
        ("T=1, context 8,192", False),
    ]
    words = {entry.name: entry.words for entry in drawn[0].legend}
    assert words[HEADS] == "falls below 1× between batch 4 and 16 (about 5.7)" and len(words) == 4
    assert len({(entry.colour, entry.glyph) for entry in drawn[0].legend}) == 4
    assert curves.curves(full_report(grid=[]), "batch_size") == []


def test_predictions_within_a_tenth_are_counted_and_numbered() -> None:
    """The builder predicts 5% too much for heads, 8% too little for the draft, 30% too much for lookup."""
    picture = curves.predictions(full_report(rows=[row("greedy", method) for method in ("plain", *COUNTS)]))
    assert picture is not None and picture.heading == "2 of 3 predictions are within 10% (the band)"
    assert [(entry.name, entry.words) for entry in picture.legend] == [
        ("1 heads, tree of 12, greedy", "predicted 2.10×, measured 2.00× (+5% ✓)"),
        ("2 draft model, 4 tokens, greedy", "predicted 2.30×, measured 2.50× (-8% ✓)"),
        ("3 prompt lookup, greedy", "predicted 1.56×, measured 1.20× (+30%)"),
    ]


@styled
def _picture() -> str:
    figure, axes = panel()
    for index in range(10):
        axes.plot([1, 2], [index, 1], **series(index))
    shade_below_one(axes)
    axes.set_title("a <b> & $x^2$")
    return svg(figure, 'an "apt" title')


def test_a_pictures_ink_and_colours_are_the_pages() -> None:
    drawn = _picture()
    assert drawn.startswith('<svg role="img" aria-label="an &quot;apt&quot; title"') and drawn == _picture()
    assert not any(colour in drawn for colour in (*COLOURS, INK)) and "currentColor" in drawn and "var(--c7)" in drawn
    assert drawn.count(GRID) == drawn.count(f"var(--grid, {GRID})") > 0
    assert "a &lt;b&gt; &amp; $x^2$</text>" in drawn, "text, not paths, and no formula"
    assert "http" not in drawn.replace("http://www.w3.org", "") and "<script" not in drawn
    light, dark = css().split("@media (prefers-color-scheme: dark)")
    assert light.count("--c") == dark.count("--c") == len(COLOURS)
    assert series(0) != series(8) and series(8)["color"] == series(0)["color"]


# --- tables, texts ------- -------------------------------------------------------------------------------------------


def test_both_counts_stand_in_one_table() -> None:
    """Of 100 passes of the draft 20 each accepted 0 to 4 tokens: 2 on average, and 5 texts ended inside the draft."""
    both = next(table for table in tables(REPORT) if table.heading.startswith("Acceptance"))
    cells = dict(zip(both.columns, next(cells for cells in both.rows if cells[:2] == ("greedy", DRAFT)), strict=True))
    assert cells["accepted per pass"].startswith("2.00 ") and cells["acceptance length, 1 + Σ"] == "3.00"
    assert cells["tokens per target pass"].startswith("2.95 ") and cells["ended in a draft"] == "5"
    assert cells["reached 1, 2, …"] == "0.80 0.60 0.40 0.20"
    headings = [table.heading for table in tables(REPORT)]
    assert headings[-2:] == ["Other batch sizes and contexts", "By task"]
    assert all(len(cells) == len(table.columns) for table in tables(REPORT) for cells in table.rows)


def test_the_page_marks_drafted_tokens_and_is_closed_to_everything_from_elsewhere(tmp_path: Path) -> None:
    write_html(REPORT, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Zoe<mark> has 3 + 4 =</mark> 7<mark> apples.</mark>\n<mark>The answer is</mark> 7.</div>" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert not any(word in page for word in ("src=", "<script", "<link", "@import", "url(http", "None", "nan"))
    assert page.index("<details") > page.index('class="lead"')


def test_a_report_without_the_newer_keys_leaves_their_parts_out(tmp_path: Path) -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("*/quickstart.json")
    write_html(json.loads(path.read_text()), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Accepted in a pass" in page
    assert not any(part in page for part in ("By task", "Over batch size", "and what was drafted", "Asked:", "None"))


# --- the terminal ---------------------------------------------------------------------------------------------------


def test_a_terminal_of_80_columns_shows_every_figure_whole() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(terminal_table(REPORT))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    (best,) = [line for line in lines if "2.50× [2.25, 2.75]" in line and "Fastest" not in line]
    assert best.split()[-6:] == ["2.95", "250", "2.50×", "[2.25,", "2.75]", "2.75×"]
    assert "mt_bench (10) 3.25× 2.60× 1.56× 1.17×" in [" ".join(line.split()) for line in lines], "the fastest first"
    assert narrow_table(REPORT).row_count == len(REPORT["rows"]) + 3


def test_a_wide_terminal_shows_every_column() -> None:
    console = Console(file=io.StringIO(), width=190, record=True)
    console.print(terminal_table(REPORT))
    text = console.export_text()
    assert "over transformers" in text and "lossless, 80/80 same" in text and "0.80 (100) 0.75 (80)" in text
