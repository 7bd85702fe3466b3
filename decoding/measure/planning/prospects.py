"""Prospects before training: how much a draft costs on this machine, which acceptance it needs to be worth its cost,
and how much it gains at published acceptance rates.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from decoding.drafters.base import Drafter
from decoding.drafters.spec import DrafterSpec
from decoding.measure.planning.planner import CostSurvey, PlanConfig
from decoding.measure.planning.step_costs import Candidate, StepCosts, best
from decoding.metrics import break_even
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget

DEEPEST = 8
"""Number of tokens of the longest chain considered."""


class Published(NamedTuple):
    """The acceptance that was published for a draft. ``rates``: the acceptance by position."""

    draft: str
    """The kind of draft: a key of the mapping of drafters that `Prospects` receives."""
    name: str
    rates: tuple[float, ...]
    source: str


def equal_rates(tokens: float, depth: int) -> tuple[float, ...]:
    """Return the constant per-position acceptance at which a chain of ``depth`` tokens yields ``tokens`` per pass."""
    rate = break_even({depth: tokens})
    assert rate is not None, "a chain cannot yield more than its depth + 1 tokens"
    return (rate,) * depth


PUBLISHED = (
    Published("heads", "Medusa, Vicuna-7B", (0.560, 0.316, 0.201, 0.147), "Medusa's repository, November 2026, top 1"),
    Published("dspark", "DFlash, Qwen3-8B, chats", equal_rates(3.11, 7), "2607.05147, July 2026, MT-Bench, T=1"),
    Published("dspark", "DFlash, Qwen3-8B, maths", equal_rates(5.33, 7), "2607.05147, July 2026, GSM8K, T=1"),
    Published("draft", "115M, Llama-2-7B-Chat", (1 - 1 / 2.3,) * DEEPEST, "2403.00858, March 2024, up to 2.3 per pass"),
)
"""DFlash gives a low estimate for DSpark: DFlash's five layers reach a lower acceptance than the two layers of DSpark
in the recipes (2607.05147)."""


class Prospects(CostSurvey):
    """Measured costs of untrained drafters, by kind. Random weights do not change how long a drafter takes."""

    def __init__(
        self, target: CausalLM, drafters: Mapping[str, Drafter], prompts: Sequence[Sequence[int]], config: PlanConfig
    ) -> None:
        """Raise UserError if no prompt fits."""
        super().__init__(target, list(drafters.values()), prompts, config)
        self._kinds = list(drafters)

    @property
    def steps(self) -> int:
        return len(self.config.batch_sizes) * (1 + len(self.drafters))

    def run(self) -> dict[str, Any]:
        """Measure; return the figures as JSON values."""
        curves, cells = [], []
        for rows in self.config.batch_sizes:
            curve, costs = self.costs_at(rows)
            curves.append(curve)
            cells.append({"batch_size": rows, **outlook(dict(zip(self._kinds, costs, strict=True)))})
        return {**self.about(), "curves": curves, "prospects": cells}


def outlook(costs: Mapping[str, StepCosts], published: Sequence[Published] = PUBLISHED) -> dict[str, Any]:
    """Return, for each kind of draft, the cost and break-even acceptance of chains, and gains at published acceptance.

    Chains have 1 to `DEEPEST` tokens. Costs are the costs of whole steps, in units of a plain decoding step. The
    break-even is None if the chain would be slower even with every token accepted.
    """
    drafts, reached = [], []
    for kind, measured in costs.items():
        steps = [measured.step(Budget(depth, depth + 1)).total / measured.plain for depth in range(1, DEEPEST + 1)]
        least = [break_even({depth: cost}) for depth, cost in enumerate(steps, start=1)]
        drafts.append({"draft": kind, "plain_seconds": measured.plain, "cost": steps, "break_even": least})
    for entry in published:
        if entry.draft in costs:
            chosen = best(_chains(entry), costs[entry.draft])
            depth, tokens = chosen.candidate.budget.depth, chosen.candidate.tokens_per_pass
            reached.append({**entry._asdict(), "depth": depth, "tokens_per_pass": tokens, "speedup": chosen.speedup})
    return {"drafts": drafts, "published": reached}


def _chains(published: Published) -> list[Candidate]:
    spec = DrafterSpec(published.draft, None, {})
    sums = accumulate(accumulate(published.rates, mul), initial=1.0)
    return [Candidate(spec, Budget(depth, depth + 1), tokens) for depth, tokens in enumerate(sums) if depth]
