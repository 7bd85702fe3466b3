"""The cost check of a draft: could it pay on this machine, by what it costs compared with the target's passes."""

import math
from typing import NamedTuple

from decoding.metrics import break_even
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, measure_costs

DEEPEST = 16
"""Tokens drafted at a time, at most, of the lengths that are looked at."""


class Payoff(NamedTuple):
    """The gain that costs allow for: at most ``largest_speedup``, and any from ``least_acceptance`` on, in hundredths.

    ``least_acceptance`` is None where no draft length gains, even if every token is accepted.
    """

    least_acceptance: float | None
    largest_speedup: float


def best_costs(target: CausalLM, draft: CausalLM, at_once: int = 1) -> Costs:
    """Measure costs; if nothing could gain by them, as on a machine that is busy just then, the best of three.

    ``at_once``: the tokens that a parallel draft drafts in one forward, and the most that it drafts at a time.
    """
    sizes = range(1, (DEEPEST if at_once == 1 else at_once) + 2)
    found = measure_costs(target, sizes, draft, at_once, repeats=7)
    for _ in range(2):
        if payoff(found).least_acceptance is not None:
            break
        found = min(found, measure_costs(target, sizes, draft, at_once, repeats=7), key=lambda costs: costs.draft_step)
    return found


def payoff(costs: Costs) -> Payoff:
    """Return the gain that these costs allow for, by any draft length whose target pass was measured.

    S = E / (cK + v(K+1)) (Leviathan et al., 2211.17192, theorem 3.8, with v and without overhead).
    """
    plain = costs.pass_over(1)
    chains = {depth: costs.step(depth, depth + 1) / plain for depth in range(1, max(costs.target_pass))}
    least = break_even(chains)
    largest = max((depth + 1) / cost for depth, cost in chains.items())
    return Payoff(None if least is None else math.ceil(100 * least) / 100, largest)


def check_pays(costs: Costs) -> str:
    """Say in a sentence what a draft of these costs could gain; ValueError where it could not gain anything."""
    (least, most), at_once = payoff(costs), max(costs.draft)
    step = "step" if at_once == 1 else f"forward for {at_once} tokens"
    if least is None:
        raise ValueError(
            f"this draft cannot pay: a {step} of it takes {costs.draft_step:.2f} of a target pass here, so that with "
            f"every token accepted decoding would run at {most:.2f} times the speed of plain decoding; give it fewer "
            "layers (draft.init), or less width (draft.init.from_config), or set draft.check_costs=false (on a busy "
            "machine start again: three measurements may all have been spoilt)"
        )
    return (
        f"costs here: a draft {step} takes {costs.draft_step:.2f} of a target pass; "
        f"it pays from an acceptance of {least:.2f}, at most {most:.1f}x"
    )
