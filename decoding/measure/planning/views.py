"""A plan as a table and sentences for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from decoding.measure.figures import NONE
from decoding.measure.markdown import one_line
from decoding.measure.planning.step_costs import LEAST_GAIN

_NOTES = (
    "Step cost: the seconds of a step as drafting + verifying + the rest, in steps of plain decoding; the speed-up is "
    "the tokens per pass divided by it."
)


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row for each batch size and drafter; the best of a batch size is bold."""
    columns = ("batch", "drafter", "best size", "tokens/pass", "step cost", "speed-up", "best chain")
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


def basis(plan: Mapping[str, Any]) -> str:
    """Say on how many prompts acceptance was measured, and for how long costs were."""
    chosen_on, judged_on = plan["halves"]
    others = f"on {chosen_on} of them, judged on the other {judged_on}"
    halves = others if chosen_on < plan["prompts"] else "and judged on all of them"
    trees = f" (trees chosen {halves})" if any(each["kind"] == "tree" for each in plan["drafters"]) else ""
    return (
        f"measured: acceptance on {plan['prompts']} prompts, up to {plan['max_new_tokens']} new tokens each{trees}; "
        f"costs for about {plan['seconds']:g} s with each drafter and batch size"
    )
