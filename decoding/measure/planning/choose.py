"""The choice at one batch size and context: the form of a drafter whose steps bring the most tokens per second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decoding.drafters.spec import DrafterSpec
from decoding.measure.planning.step_costs import StepCosts, StepSeconds
from decoding.metrics import predicted_speedup
from decoding.policies import Budget
from decoding.rules.best_tree import Paths

LEAST_GAIN = 1.02
"""Speed-up below which speculation is not worth turning on."""


@dataclass(frozen=True)
class Candidate:
    """A form of a drafter: its spec, its size, and the tokens that a target pass brings with it, the target's own too.

    ``tree``: the paths of its tree, empty for a chain and where the drafter has a tree of its own.
    """

    spec: DrafterSpec
    budget: Budget
    tokens: float
    tree: Paths = ()

    @property
    def is_chain(self) -> bool:
        return self.budget.nodes == self.budget.depth + 1


@dataclass(frozen=True)
class Prediction:
    """A candidate with the seconds of its step and of a plain one. ``tokens`` per step over seconds: the speed-up."""

    candidate: Candidate
    step: StepSeconds
    plain: float

    @property
    def speedup(self) -> float:
        """S = E / (draft + verify + overhead), all in steps of plain decoding, whose own overhead is one of its parts.

        E: `Candidate.tokens`.
        """
        parts = (part / self.plain for part in self.step)
        return predicted_speedup(self.candidate.tokens, *parts)

    @property
    def cost(self) -> float:
        """Seconds of its step in steps of plain decoding: the tokens that it must bring to pay."""
        return self.step.total / self.plain


def predict(candidate: Candidate, costs: StepCosts) -> Prediction:
    """Predict a candidate's speed-up by these costs."""
    return Prediction(candidate, costs.step(candidate.budget), costs.plain)


def best(candidates: Sequence[Candidate], costs: StepCosts) -> Prediction:
    """Return the candidate with the greatest speed-up; of equals the smaller one."""
    predictions = [predict(candidate, costs) for candidate in candidates]
    return max(predictions, key=lambda found: (found.speedup, -found.candidate.budget.nodes))


def depth_by_batch_size(
    chains: Mapping[int, float], costs: Mapping[int, StepCosts], longest: int
) -> list[tuple[int, int, int]]:
    """Return the best chain's depth for every batch size up to the largest measured, as (first, last, depth) ranges.

    ``chains``: tokens per pass by depth. ``costs``: by measured batch size; those between are linear. A depth of 0 is
    plain decoding. ``longest`` bounds the depth.
    """
    sizes = sorted(costs)
    ranges: list[tuple[int, int, int]] = []
    for rows in range(1, sizes[-1] + 1):
        low = max((size for size in sizes if size <= rows), default=sizes[0])
        high = min(size for size in sizes if size >= rows)
        share = (rows - low) / (high - low) if high > low else 0.0
        depth = _best_depth(
            {depth: held for depth, held in chains.items() if depth <= longest}, costs, low, high, share
        )
        if ranges and ranges[-1][2] == depth:
            ranges[-1] = (ranges[-1][0], rows, depth)
        else:
            ranges.append((rows, rows, depth))
    return ranges


def _best_depth(chains: Mapping[int, float], costs: Mapping[int, StepCosts], low: int, high: int, share: float) -> int:
    """Return the depth with the greatest speed-up between two measured batch sizes; 0 where none pays."""

    def mixed(of_low: float, of_high: float) -> float:
        return of_low + share * (of_high - of_low)

    speedups = {0: LEAST_GAIN}
    plain = mixed(costs[low].plain, costs[high].plain)
    for depth, tokens in chains.items():
        budget = Budget(depth, depth + 1)
        speedups[depth] = tokens * plain / mixed(costs[low].step(budget).total, costs[high].step(budget).total)
    return max(speedups, key=lambda depth: (speedups[depth], -depth))


def with_tokens(found: Prediction, tokens: float) -> Prediction:
    """Return the prediction with tokens per pass that were measured anew for its very form."""
    return replace(found, candidate=replace(found.candidate, tokens=tokens))
