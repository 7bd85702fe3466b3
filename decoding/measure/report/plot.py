"""Views of a report (see `decoding.measure.evaluate`): a table for the terminal, and one HTML page with pictures."""

import io
import math
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import NONE, estimate, greedy_sentence, identical, number, shares, speedup
from decoding.measure.markdown import one_line, text

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito's palette, whose colours colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_SPLIT = {"draft": "#E69F00", "verify": "#0072B2", "overhead": "#999999"}

_literal = matplotlib.rc_context({"text.parse_math": False})
"""Decorator of a figure: a dollar sign in a name is printed, and starts no formula."""

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


def markdown_table(report: dict[str, Any]) -> str:
    """Write the table in Markdown, for a README or a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
    lines += ["| " + " | ".join([*map(text, row[:3]), *row[3:]]) + " |" for row in table_rows(report)]
    return "\n".join(lines)


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the report's figures as text, a tuple per method in the order of `COLUMNS`."""
    return [
        (
            one_line(row["setting"]),
            one_line(row["method"]),
            _promise(row),
            estimate(row.get("tokens_per_pass")),
            shares(row.get("conditional_acceptance"), most=5),
            number(row["tokens_per_second"]["value"], digits=0),
            speedup(row),
            speedup(row, "speedup_over_transformers"),
        )
        for row in report["rows"]
    ]


MORE_COLUMNS = (
    "setting",
    "method",
    "speed-up with the prefill",
    "speed-up predicted from the cost curve",
    "accepted per drafted (of)",
    "accepted lengths: passes",
)


def more_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the figures that only the page shows, a tuple per drafter in the order of `MORE_COLUMNS`."""
    return [
        (
            one_line(row["setting"]),
            one_line(row["method"]),
            speedup(row, "speedup_with_prefill"),
            f"{row['predicted_speedup']:.2f}×" if row.get("predicted_speedup") is not None else NONE,
            _share(row["accepted_per_drafted"]),
            ", ".join(f"{length}: {count}" for length, count in row["accepted_length_histogram"].items()),
        )
        for row in report["rows"]
        if row.get("conditional_acceptance")
    ]


def _share(figure: dict[str, Any]) -> str:
    return f"{estimate(figure)} ({figure['observations']:,})"


def _promise(row: dict[str, Any]) -> str:
    """Return the row's label, lossless or lossy; for greedy texts with the count identical to plain decoding's."""
    same = row.get("identical_to_plain")
    if not same or row["method"] == "plain":
        return str(row["label"])
    return f"{row['label']}, {same['identical']}/{same['of']} same"


def caption(report: dict[str, Any]) -> str:
    """Describe the target, the machine, the prompts and the commit."""
    machine = report["hardware"]
    prompts = f"{report['prompts']} prompts"
    if left_out := report.get("prompts_left_out"):
        prompts += f" ({left_out} too long, left out)"
    place = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    return one_line(
        f"{report['parameters'] / 1e6:.1f}M-parameter target in {report['dtype']} on {place}; "
        f"{prompts}, up to {report['max_new_tokens']} new tokens, batch 1; commit {report['commit']}"
    )


def notes(report: dict[str, Any]) -> str:
    """Explain the columns, and compare the greedy texts with plain decoding's."""
    return " ".join(filter(None, (_NOTES, greedy_sentence(report))))


_NOTES = (
    "Tokens per target pass: 95% interval over prompts, prefill left out, the target's own token included. "
    "Accepted at i: share of drafts whose token i was accepted, among those at least i deep whose first i-1 tokens "
    "were accepted (number of these). "
    "Same: greedy texts identical to plain decoding's. "
    "Speed-up: all tokens over all seconds, divided by plain decoding's by the same loop on the same prompts, "
    "prefill left out, 95% interval over prompts; then the median [quartiles] of the ratios of paired runs."
)


def terminal_table(report: dict[str, Any]) -> Table:
    """Make the table for a terminal."""
    table = Table(
        title=Text(one_line(report.get("title") or ""), style="bold"),
        caption=Text(f"{caption(report)}\n{notes(report)}", style="table.caption"),
        caption_justify="left",
    )
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


def write_html(report: dict[str, Any], path: Path) -> None:
    """Write the page: table, pictures, settings and versions, in one file without external resources."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    pictures = [
        ("Speed-up over plain decoding", speedup_figure(report)),
        ("Acceptance by position", acceptance_figure(report)),
        ("Where the time goes", time_figure(report)),
        ("What a target pass costs here", cost_figure(report)),
    ]
    page = environment.get_template("report.html.j2").render(
        title=one_line(report.get("title") or "Headstart report"),
        caption=caption(report),
        notes=_NOTES,
        sentence=greedy_sentence(report),
        columns=COLUMNS,
        rows=table_rows(report),
        pictures=[(title, _svg(figure)) for title, figure in pictures],
        more_columns=MORE_COLUMNS,
        more=more_rows(report),
        greedy=[
            (row["method"], identical(row["identical_to_plain"]))
            for row in report["rows"]
            if row.get("identical_to_plain")
        ],
        command=report.get("command"),
        fingerprints=report.get("fingerprints"),
        settings=report.get("settings"),
        versions=report["versions"],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _settings(report: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["setting"] for row in report["rows"]))


def _grid(axes: Axes, axis: str) -> None:
    axes.grid(axis=axis, color="#dddddd", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@_literal
def speedup_figure(report: dict[str, Any]) -> Figure:
    """Draw a bar per method under each setting: the ratio of all tokens/s with its interval; lossy methods hatched.

    A dot marks the median of paired runs, its line the quartiles.
    """
    settings = _settings(report)
    counts = [sum(row["setting"] == setting for row in report["rows"]) for setting in settings]
    figure, all_axes = plt.subplots(
        len(settings), 1, figsize=(7.5, 0.8 + 0.34 * sum(counts)), height_ratios=counts, sharex=True, squeeze=False
    )
    for axes, setting in zip(all_axes[:, 0], settings, strict=True):
        rows = [row for row in report["rows"] if row["setting"] == setting][::-1]
        for position, row in enumerate(rows):
            _draw_speedup(axes, position, row)
        axes.set_yticks(range(len(rows)), [one_line(row["method"]) for row in rows], fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(one_line(setting), loc="left", fontsize=10)
        _grid(axes, "x")
    all_axes[-1, 0].set_xlabel(
        "speed-up over plain decoding: bar and label, all tokens/s with 95% interval;\n"
        "dot and line, median and quartiles of paired runs (hatched: lossy)"
    )
    figure.tight_layout()
    return figure


def _draw_speedup(axes: Axes, position: int, row: dict[str, Any]) -> None:
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    right = 0.0
    if totals.get("value") is not None:
        value = totals["value"]
        low, high = (value if totals[end] is None else totals[end] for end in ("low", "high"))
        axes.barh(
            position,
            value,
            xerr=[[max(value - low, 0)], [max(high - value, 0)]],
            color="#bbbbbb" if row["method"].startswith("transformers") or row["method"] == "plain" else _COLOURS[0],
            hatch="//" if row["label"] == "lossy" else None,
            edgecolor="white",
            error_kw={"linewidth": 1, "capsize": 2},
        )
        right = high
    if pairs.get("median") is not None:
        ends = (pairs["low_quartile"], pairs["high_quartile"])
        axes.plot(ends, (position + 0.22,) * 2, color=_COLOURS[1], linewidth=1)
        axes.plot(pairs["median"], position + 0.22, "o", color=_COLOURS[1], markersize=3)
        right = max(right, pairs["high_quartile"])
    shown = totals.get("value") if totals.get("value") is not None else pairs.get("median")
    if shown is not None:
        axes.text(right + 0.03, position, f"{shown:.2f}×", va="center", fontsize=8)


@_literal
def acceptance_figure(report: dict[str, Any]) -> Figure:
    """Draw unconditional acceptance at each position, a line per drafter, with 95% intervals."""
    settings = _settings(report)
    figure, all_axes = plt.subplots(1, len(settings), figsize=(3.4 * len(settings), 3), sharey=True, squeeze=False)
    names = list(dict.fromkeys(row["method"] for row in report["rows"] if row.get("unconditional_acceptance")))
    for axes, setting in zip(all_axes[0], settings, strict=True):
        for row in report["rows"]:
            found = row.get("unconditional_acceptance")
            if row["setting"] != setting or not found:
                continue
            positions = range(1, len(found) + 1)
            colour = _COLOURS[names.index(row["method"]) % len(_COLOURS)]
            axes.plot(
                positions, _values(found, "value"), "o-", color=colour, label=one_line(row["method"]), markersize=4
            )
            axes.fill_between(
                positions,
                _values(found, "low"),
                _values(found, "high"),
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.set_title(one_line(setting), loc="left", fontsize=10)
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _grid(axes, "y")
    all_axes[0, 0].set_ylabel("share of drafts accepted so far")
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    if handles:
        all_axes[0, -1].legend(handles, labels, fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def _values(figures: list[dict[str, Any]], key: str) -> list[float]:
    """Return ``figure[key]`` of each figure; NaN, a gap in the line, for a figure that was not measured."""
    return [math.nan if figure[key] is None else figure[key] for figure in figures]


@_literal
def time_figure(report: dict[str, Any]) -> Figure:
    """Draw the shares of the decoding time spent in drafting, in the target's pass, and elsewhere."""
    rows = [row for row in report["rows"] if row.get("time_split")][::-1]
    figure, axes = plt.subplots(figsize=(7.5, 0.9 + 0.3 * len(rows)))
    for position, row in enumerate(rows):
        left = 0.0
        for part, colour in _SPLIT.items():
            share = row["time_split"][part]
            axes.barh(
                position, share, left=left, color=colour, label=part if position == 0 else None, edgecolor="white"
            )
            left += share
    labels = [one_line(f"{row['method']} ({row['setting']})") for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_xlabel("share of the decoding time")
    axes.set_xlim(0, 1)
    if rows:
        axes.legend(fontsize=8, ncols=3, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    _grid(axes, "x")
    figure.tight_layout()
    return figure


def cost_figure(report: dict[str, Any]) -> Figure:
    """Draw v(n): the cost of a target pass over n tokens, in passes over one token."""
    curve = {int(size): cost for size, cost in report["cost_curve_ms"].items()}
    figure, axes = plt.subplots(figsize=(4.5, 3))
    axes.plot(list(curve), [cost / curve[1] for cost in curve.values()], "o-", color=_COLOURS[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(curve), [str(size) for size in curve])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("cost, in passes over one token")
    _grid(axes, "y")
    figure.tight_layout()
    return figure
