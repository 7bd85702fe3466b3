"""A plan in words."""

from collections.abc import Mapping
from typing import Any

from decoding.measure.markdown import one_line
from decoding.measure.planning.choose import LEAST_GAIN


def basis(plan: Mapping[str, Any]) -> str:
    """Say on how many prompts acceptance was measured, and for how long costs were."""
    chosen_on, judged_on = plan["halves"]
    others = f"on {chosen_on} of them, judged on the other {judged_on}"
    halves = others if chosen_on < plan["prompts"] else "and judged on all of them"
    trees = f" (trees chosen {halves})" if any(held["kind"] == "tree" for held in plan["drafters"]) else ""
    return (
        f"measured: acceptance on {plan['prompts']} prompts, up to {plan['max_new_tokens']} new tokens each{trees}; "
        f"costs for about {plan['seconds']:g} s with each drafter, batch size and context"
    )


def verdict(cell: Mapping[str, Any]) -> str:
    """Say in a sentence what the best choice of a cell costs and brings, and whether that pays."""
    choice = max(cell["choices"], key=lambda each: each["best"]["speedup"])
    best, plain, seconds = choice["best"], choice["plain_seconds"], choice["best"]["seconds"]
    told = (
        f"a step of {one_line(choice['drafter'])} costs {best['cost']:.2f} plain steps "
        f"(drafting {seconds['draft'] / plain:.2f}, verifying {best['nodes']} tokens {seconds['verify'] / plain:.2f}, "
        f"the rest {seconds['overhead'] / plain:.2f}) and brings {best['tokens_per_pass']:.2f} tokens"
    )
    if best["speedup"] >= LEAST_GAIN:
        return f"batch {cell['batch_size']}: {best['speedup']:.2f}×: {told}"
    return f"batch {cell['batch_size']}: decode plainly: {told}"
