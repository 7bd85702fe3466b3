"""Running acceptance by position, from which a policy expects the tokens of its next step."""

import math
from collections.abc import Sequence

from decoding.metrics import StepCount
from decoding.policies.base import Budget

_MEMORY = 200.0
"""Trials of a position that its mean remembers."""
_PRIOR = 1.5
"""Trials that the prior counts for."""
_SURPRISE = 8.0
"""Recent deviations from a mean, summed in standard deviations, that tell of a change: 3.5 sigma of that sum."""
_ANEW = 2.0
"""Trials that a mean keeps after a change."""


class _Position:
    """Running share of drafts accepted at one position, among those accepted at the position before."""

    __slots__ = ("deviation", "mean", "trials")

    def __init__(self) -> None:
        self.mean, self.trials, self.deviation = 0.5, 0.0, 0.0

    def add(self, accepted: bool) -> None:
        bounded = min(max(self.mean, 0.05), 0.95)
        self.deviation = 0.9 * self.deviation + (accepted - bounded) / math.sqrt(bounded * (1 - bounded))
        self.trials = min(self.trials + 1, _MEMORY)
        self.mean += (accepted - self.mean) / self.trials

    def start_anew(self) -> None:
        self.trials, self.deviation = min(self.trials, _ANEW), 0.0


class Acceptance:
    """Acceptance at each position (from 0), conditional on the position before, for each family of tree shapes.

    All chains are one family, since a cut chain is a chain; every other budget is a family of its own. Tokens that were
    not offered count as not accepted, unless the text had no room for them. After a change at one position the whole
    family starts anew: later steps outweigh its old means. The prior of a family's position is the mean over all
    families there; the prior of that mean is the position before; the first position's prior is 0.5.
    """

    def __init__(self) -> None:
        self._all: list[_Position] = []
        self._families: dict[Budget | None, list[_Position]] = {}

    def observe(self, budget: Budget, steps: Sequence[StepCount]) -> None:
        """Count a step's drafts, one count for each row."""
        tables = self._all, self._families.setdefault(_family(budget), [])
        for table in tables:
            table += [_Position() for _ in range(budget.depth - len(table))]
        for step in steps:
            ended = step.emitted <= step.accepted  # nothing is known of the positions behind a text's end
            for position in range(min(step.accepted + (not ended), budget.depth, step.room)):
                for table in tables:
                    table[position].add(position < step.accepted)
        own = tables[1]
        if any(abs(entry.deviation) > _SURPRISE for entry in own):
            for entry in own:
                entry.start_anew()

    def trials(self, budget: Budget) -> float:
        """Return the number of drafts of the budget's family that its first position's mean remembers."""
        table = self._families.get(_family(budget))
        return table[0].trials if table else 0.0

    @staticmethod
    def related(budget: Budget, other: Budget) -> bool:
        """Return True if both budgets are of one family."""
        return _family(budget) == _family(other)

    def expected_tokens(self, budgets: Sequence[Budget]) -> list[float]:
        """Return the tokens that each budget lets expect of a row and target pass, the target's own included.

        With a_j the acceptance at position j: 1 + sum over i of prod over j <= i of a_j.
        """
        deepest = max((budget.depth for budget in budgets), default=0)
        priors, rate = [], 0.5
        for position in range(deepest):
            if position < len(self._all):
                rate = _mean(self._all[position], rate)
            priors.append(rate)
        by_family: dict[Budget | None, list[float]] = {}
        for family in {_family(budget) for budget in budgets}:
            table = self._families.get(family, [])
            reached, expected = 1.0, [1.0]
            for position, prior in enumerate(priors[: deepest if family is None else family.depth]):
                reached *= _mean(table[position], prior) if position < len(table) else prior
                expected.append(expected[-1] + reached)
            by_family[family] = expected
        return [by_family[_family(budget)][budget.depth] for budget in budgets]


def _mean(position: _Position, prior: float) -> float:
    return (position.trials * position.mean + _PRIOR * prior) / (position.trials + _PRIOR)


def _family(budget: Budget) -> Budget | None:
    """Return the key of a budget's family; None for chains."""
    return None if budget.nodes == budget.depth + 1 else budget
