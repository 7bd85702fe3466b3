"""A plan as tables and sentences for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from decoding.measure.figures import NONE
from decoding.measure.markdown import one_line
from decoding.measure.planning.step_costs import LEAST_GAIN

_NOTES = (
    "Step cost: the time of a step as drafting + verifying + the rest, in units of a plain decoding step. Speed-up: "
    "tokens per target pass divided by the step cost."
)


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row per batch size and drafter; the best row of each batch size is bold."""
    columns = ("batch", "drafter", "best size", "tokens/pass", "step cost", "speed-up", "best chain")
    table = Table(*columns, title=_heading("What to draft here"), **_caption(_NOTES))
    for cell in plan["cells"]:
        fastest = max(choice["best"]["speedup"] for choice in cell["choices"])
        for choice in cell["choices"]:
            form, chain, plain = choice["best"], choice["best_chain"], choice["plain_seconds"]
            parts = " + ".join(f"{seconds / plain:.2f}" for seconds in form["seconds"].values())
            pays = form["speedup"] >= LEAST_GAIN
            table.add_row(
                str(cell["batch_size"]),
                one_line(choice["drafter"]),
                _size(form),
                f"{form['tokens_per_pass']:.2f}",
                f"{form['cost']:.2f} = {parts}",
                f"{form['speedup']:.2f}×" + ("" if pays else ", plain decoding is better"),
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
    """Return a sentence that says on how many prompts acceptance was measured, and for how many seconds costs were
    measured.
    """
    chosen_on, judged_on = plan["halves"]
    others = f"on {chosen_on} of them and judged on the other {judged_on}"
    halves = others if chosen_on < plan["prompts"] else "and judged on all of them"
    trees = f" (trees were chosen {halves})" if any(drafter["kind"] == "tree" for drafter in plan["drafters"]) else ""
    return (
        f"acceptance was measured on {plan['prompts']} prompts with up to {plan['max_new_tokens']} new tokens{trees}; "
        f"costs were measured for about {plan['seconds']:g} s with each drafter and batch size"
    )


# --- before any training ----------------------------------------------------------------------------------------------

NAMES = {"heads": "heads", "dspark": "DSpark draft", "draft": "small draft"}
"""Names of the kinds of drafts, as readers see them."""
_PAYS = (
    "Lowest per-position acceptance at which a chain of this length is faster; – means that it never is. "
    "The measured drafts have random weights: heads that share the lm_head, a DSpark draft as in the recipes, and one "
    "layer of the target as a small draft."
)
_REACHED = "Acceptance depends on target, texts and training: published figures are a guide, not a promise."


def break_even_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row per batch size and kind of draft, and a column per chain length."""
    depths = map(str, range(1, 1 + len(plan["prospects"][0]["drafts"][0]["cost"])))
    heading = _heading("Per-position acceptance needed on this machine, by chain length")
    table = Table("batch", "draft", "size", *depths, title=heading, **_caption(_PAYS))
    for cell in plan["prospects"]:
        for draft in cell["drafts"]:
            share = plan["parameters"][draft["draft"]] / plan["target_parameters"]
            rates = (NONE if rate is None else f"{rate:.2f}" for rate in draft["break_even"])
            table.add_row(str(cell["batch_size"]), NAMES[draft["draft"]], f"{share:.1%}", *rates)
        table.add_section()
    return table


def published_table(plan: Mapping[str, Any]) -> Table:
    """Return a table with a row per published draft, which shows its speed-up on this machine at each batch size."""
    cells = plan["prospects"]
    sizes = [f"batch {cell['batch_size']}" for cell in cells]
    heading = _heading("Speed-up on this machine at published acceptance")
    table = Table("published draft", "accepted", *sizes, "source", title=heading, **_caption(_REACHED))
    for row in zip(*(cell["published"] for cell in cells), strict=True):
        rates, gains = row[0]["rates"], [f"{draft['speedup']:.2f}×, chain of {draft['depth']}" for draft in row]
        accepted = f"{rates[0]:.2f} each" if len(set(rates)) == 1 else " ".join(f"{rate:.2f}" for rate in rates)
        table.add_row(f"{NAMES[row[0]['draft']]}: {row[0]['name']}", accepted, *gains, row[0]["source"])
    return table


def advice(plan: Mapping[str, Any]) -> list[str]:
    """Return one sentence per batch size that says which kinds of draft are worth training at published acceptance."""
    sentences = []
    for cell in plan["prospects"]:
        kinds: dict[str, list[str]] = {advised: [] for advised in _ADVICE}
        for kind in dict.fromkeys(draft["draft"] for draft in cell["published"]):
            gains = sorted(draft["speedup"] for draft in cell["published"] if draft["draft"] == kind)
            shown = " to ".join(dict.fromkeys(f"{gain:.2f}×" for gain in (gains[0], gains[-1])))
            pays = (gains[0] >= LEAST_GAIN) + (gains[-1] >= LEAST_GAIN)
            kinds[_ADVICE[2 - pays]].append(f"{NAMES[kind]} ({shown})")
        named = (f"{advised}: {', '.join(names)}" for advised, names in kinds.items() if names)
        sentences.append(f"batch {cell['batch_size']}: {'; '.join(named)}")
    return sentences


_ADVICE = ("worth training", "depends on the texts", "not worth training")


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _caption(text: str) -> dict[str, Any]:
    return {"caption": Text(text, style="table.caption"), "caption_justify": "left"}
