"""A plan as tables and sentences for the terminal, and as a picture of its speed-ups by batch size and context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from decoding.measure.figures import NONE, estimate
from decoding.measure.markdown import one_line
from decoding.measure.planning.step_costs import LEAST_GAIN
from decoding.measure.report.curves import over_sizes
from decoding.measure.report.style import series, shade_below_one, styled

_NOTES = (
    "Step cost: the seconds of a step as drafting + verifying + the rest, in steps of plain decoding; the speed-up is "
    "the tokens per pass divided by it."
)


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row for each batch size, context and drafter; the best of a cell is bold."""
    columns = ("batch", "context", "drafter", "best size", "tokens/pass", "step cost", "speed-up", "best chain")
    table = Table(
        *columns,
        title=Text("What to draft here", style="bold"),
        caption=Text(_NOTES, style="table.caption"),
        caption_justify="left",
    )
    for cell in plan["cells"]:
        fastest = max(choice["best"]["speedup"] for choice in cell["choices"])
        for choice in cell["choices"]:
            form, chain, plain = choice["best"], choice["best_chain"], choice["plain_seconds"]
            parts = " + ".join(f"{each / plain:.2f}" for each in form["seconds"].values())
            pays = form["speedup"] >= LEAST_GAIN
            table.add_row(
                str(cell["batch_size"]),
                f"own, {plan['text_tokens']}" if cell["context"] is None else f"{cell['context']:,}",
                one_line(choice["drafter"]),
                _size(form),
                f"{form['tokens_per_pass']:.2f}",
                f"{form['cost']:.2f} = {parts}",
                f"{form['speedup']:.2f}×" + ("" if pays else ", plain is better"),
                NONE if chain is None else f"{_size(chain)}: {chain['speedup']:.2f}×",
                style="bold" if pays and form["speedup"] == fastest else None,
            )
        table.add_section()
    return table


def _size(form: Mapping[str, Any]) -> str:
    if form["nodes"] == form["depth"] + 1:
        return f"chain of {form['depth']}"
    return f"tree of {form['nodes'] - 1}, {form['depth']} deep"


def check_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return predicted against measured speed-ups."""
    table = Table(
        *("batch", "drafter", "tokens/pass", "predicted", "measured [95%]", "predicted / measured"),
        title=Text("The plan against its measurement", style="bold"),
    )
    for row in rows:
        table.add_row(
            str(row["batch_size"]),
            one_line(row["spec"] if len(row["spec"]) < 60 else row["drafter"]),
            f"{row['tokens_per_pass']['predicted']:.2f} / {row['tokens_per_pass']['measured']:.2f}",
            f"{row['predicted']:.2f}×",
            estimate(row["measured"], "×"),
            f"{row['ratio']:.3f}",
        )
    return table


def basis(plan: Mapping[str, Any]) -> str:
    """Say on how many prompts acceptance was measured, and for how long costs were."""
    chosen_on, judged_on = plan["halves"]
    others = f"on {chosen_on} of them, judged on the other {judged_on}"
    halves = others if chosen_on < plan["prompts"] else "and judged on all of them"
    trees = f" (trees chosen {halves})" if any(each["kind"] == "tree" for each in plan["drafters"]) else ""
    return (
        f"measured: acceptance on {plan['prompts']} prompts, up to {plan['max_new_tokens']} new tokens each{trees}; "
        f"costs for about {plan['seconds']:g} s with each drafter, batch size and context"
    )


@styled
def write_picture(plan: Mapping[str, Any], path: Path) -> None:
    """Draw the predicted speed-up of each drafter over the batch size, a panel for each context, as SVG."""
    contexts = list(dict.fromkeys(cell["context"] for cell in plan["cells"]))
    figure = Figure(figsize=(0.6 + 3.4 * len(contexts), 3.4), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    top = 1.1 * max(1.2, *(choice["best"]["speedup"] for cell in plan["cells"] for choice in cell["choices"]))
    for axes, context in zip(panels, contexts, strict=True):
        cells = [cell for cell in plan["cells"] if cell["context"] == context]
        sizes = [cell["batch_size"] for cell in cells]
        for index, drafter in enumerate(plan["drafters"]):
            speeds = [cell["choices"][index]["best"]["speedup"] for cell in cells]
            label = one_line(drafter["label"])
            repeated = [each["label"] for each in plan["drafters"][:index]].count(drafter["label"])
            axes.plot(sizes, speeds, label=f"{label} {repeated + 1}" if repeated else label, **series(index))
        over_sizes(axes, sizes, "batch size")
        axes.set_ylim(0, top)
        shade_below_one(axes)
        axes.set_title("prompts at their own lengths" if context is None else f"context of {context:,} tokens")
    panels[0].set_ylabel("predicted speed-up over plain decoding")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
