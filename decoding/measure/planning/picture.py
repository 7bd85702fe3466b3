"""Views of a plan: tables for the terminal, and a picture of its speed-ups by batch size and context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import estimate
from decoding.measure.markdown import one_line
from decoding.measure.planning.choose import LEAST_GAIN
from decoding.measure.report.style import series, shade_below_one, styled

_NONE = "–"


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row for each batch size, context and drafter; the best of a cell is bold."""
    table = Table(
        *(
            "batch",
            "context",
            "drafter",
            "best size",
            "tokens/pass",
            "step cost",
            "speed-up",
            "best chain",
            "best tree",
        ),
        "break-even",
        title=Text("What to draft here", style="bold"),
        caption=Text(_NOTES, style="table.caption"),
        caption_justify="left",
    )
    for cell in plan["cells"]:
        fastest = max(choice["best"]["speedup"] for choice in cell["choices"])
        for choice in cell["choices"]:
            bold = fastest >= LEAST_GAIN and choice["best"]["speedup"] == fastest
            table.add_row(*_row(plan, cell, choice), style="bold" if bold else None)
        table.add_section()
    return table


def _row(plan: Mapping[str, Any], cell: Mapping[str, Any], choice: Mapping[str, Any]) -> list[str]:
    best, even = choice["best"], choice["break_even"]
    context = f"own, {plan['text_tokens']}" if cell["context"] is None else f"{cell['context']:,}"
    return [
        str(cell["batch_size"]),
        context,
        one_line(choice["drafter"]),
        _size(best),
        f"{best['tokens_per_pass']:.2f}",
        f"{best['cost']:.2f}",
        f"{best['speedup']:.2f}×" + ("" if best["speedup"] >= LEAST_GAIN else ", plain is better"),
        _told(choice["best_chain"]),
        _told(choice["best_tree"]),
        _NONE if even is None else "any" if even < 0.005 else f"{even:.2f}",
    ]


def _size(form: Mapping[str, Any]) -> str:
    if form["nodes"] == form["depth"] + 1:
        return f"chain of {form['depth']}"
    return f"tree of {form['nodes'] - 1}, {form['depth']} deep"


def _told(form: Mapping[str, Any] | None) -> str:
    return _NONE if form is None else f"{_size(form)}: {form['speedup']:.2f}×"


_NOTES = (
    "Step cost: seconds of drafting, verifying and the rest, in steps of plain decoding; the speed-up is the tokens "
    "per pass divided by it. Break-even: the acceptance per token below which no chain of this drafter gains."
)


def check_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return predicted against measured speed-ups."""
    table = Table(
        *("batch", "drafter", "tokens/pass", "step cost", "predicted", "measured [95%]", "predicted / measured"),
        title=Text("The plan against its measurement", style="bold"),
    )
    for row in rows:
        table.add_row(
            str(row["batch_size"]),
            one_line(row["spec"] if len(row["spec"]) < 60 else row["drafter"]),
            *(f"{row[name]['predicted']:.2f} / {row[name]['measured']:.2f}" for name in ("tokens_per_pass", "cost")),
            f"{row['predicted']:.2f}×",
            estimate(row["measured"], "×"),
            f"{row['ratio']:.3f}",
        )
    return table


@styled
def plan_figure(plan: Mapping[str, Any]) -> Figure:
    """Draw the predicted speed-up of each drafter over the batch size, one picture per context, and v(n) beside it."""
    contexts = list(dict.fromkeys(cell["context"] for cell in plan["cells"]))
    drafters = [held["drafter"] for held in plan["drafters"]]
    labels = [held["label"] for held in plan["drafters"]]
    labels = [
        f"{label} {labels[:place].count(label) + 1}" * (labels.count(label) > 1) or label
        for place, label in enumerate(labels)
    ]
    figure = Figure(figsize=(3.4 * (len(contexts) + 1), 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(contexts) + 1)
    top = 1.1 * max(1.2, *(choice["best"]["speedup"] for cell in plan["cells"] for choice in cell["choices"]))
    for axes, context in zip(all_axes, contexts, strict=False):
        cells = [cell for cell in plan["cells"] if cell["context"] == context]
        sizes = [cell["batch_size"] for cell in cells]
        for place, drafter in enumerate(drafters):
            speeds = [
                next(choice["best"]["speedup"] for choice in cell["choices"] if choice["drafter"] == drafter)
                for cell in cells
            ]
            axes.plot(sizes, speeds, label=labels[place], **series(place))
        _over_sizes(axes, sizes, "batch size")
        axes.set_ylim(0, top)
        shade_below_one(axes)
        axes.set_title("prompts at their own lengths" if context is None else f"context of {context:,} tokens")
    all_axes[0].set_ylabel("predicted speed-up over plain decoding")
    _draw_curves(all_axes[-1], [curve for curve in plan["curves"] if curve["context"] is None])
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_curves(axes: Any, curves: Sequence[Mapping[str, Any]]) -> None:
    """Draw v(n) for each batch size."""
    for place, curve in enumerate(curves):
        seconds = {int(size): value for size, value in curve["seconds"].items()}
        axes.plot(
            list(seconds),
            [value / seconds[1] for value in seconds.values()],
            label=str(curve["batch_size"]),
            **series(place),
        )
    sizes = [size for size in seconds if size & (size - 1) == 0]
    _over_sizes(axes, sizes, "new tokens of each row, n")
    axes.set_title("v(n): a pass over n, in passes over one")
    axes.legend(title="batch size", frameon=False)


def _over_sizes(axes: Any, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(axis="y")


def write_picture(plan: Mapping[str, Any], path: Path) -> None:
    """Write the picture as SVG on white."""
    figure = plan_figure(plan)
    figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
