"""A simulated machine that shows policies only what a real one shows: seeded acceptance, noisy times, and hiccups that
take twenty times as long.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.metrics import StepCount
from decoding.policies import NO_DRAFT, Budget, Policy


def chains(depth: int) -> list[Budget]:
    return [Budget(length, length + 1) for length in range(1, depth + 1)]


@dataclass
class Machine:
    """True costs in units of a plain step: ``draft`` per drafted token, ``verify`` by rows and nodes.

    Measured times are noisier.
    """

    draft: float = 0.1
    verify: Callable[[int, int], float] = lambda rows, nodes: 1.0
    noise: float = 0.05
    hiccups: float = 0.02
    pace: Callable[[int], float] = lambda step: 1.0
    """Function from a step to the factor by which the whole machine is slower at this step."""

    def timed(self, seconds: float, step: int, chance: random.Random) -> float:
        """Return the time that a clock measures."""
        hiccup = 20 if chance.random() < self.hiccups else 1
        return seconds * self.pace(step) * chance.lognormvariate(0, self.noise) * hiccup


def simulate(
    policy: Policy,
    machine: Machine,
    rate: float,
    tokens: int,
    budgets: Sequence[Budget],
    rows: int = 1,
    seed: int = 0,
    found: float = 1.0,
) -> float:
    """Decode ``tokens`` tokens in each row; return the tokens per true second, at a pace of 1, that the policy's
    choices reach on average. Each drafted token is accepted with probability ``rate``, or with 0.8 of it in a chain of
    a drafter of trees. The drafter finds something to draft with probability ``found``. After plain steps it must first
    read the tokens that it missed.
    """
    chance = random.Random(seed)
    written = expected = seconds = missed = 0.0
    number = 0
    while written < tokens:
        budget = policy.choose(budgets, rows)
        assert budget == NO_DRAFT or budget in budgets
        share, steps = rate_of(budget, rate, budgets), []
        for _ in range(rows):
            offered = budget.depth if chance.random() < found else 0
            accepted = 0
            while accepted < offered and chance.random() < share:
                accepted += 1
            steps.append(StepCount(accepted + 1, accepted, offered, budget.nodes - 1 if offered else 0))
        true = machine.draft * (budget.depth + 0.05 * min(missed, 20) * (budget != NO_DRAFT))
        passed = machine.verify(rows, 1 + max(step.drafted for step in steps))
        draft, verify = machine.timed(true, number, chance), machine.timed(passed, number, chance)
        number += 1
        policy.observe(budget, steps, draft, verify, draft + verify)
        written += sum(step.emitted for step in steps) / rows
        expected += expected_of(budget, rate, budgets, found)
        seconds += true + passed
        missed = missed + 1 if budget == NO_DRAFT else 0
    return expected / seconds


def rate_of(budget: Budget, rate: float, budgets: Sequence[Budget]) -> float:
    """Return the share accepted at each depth."""
    largest = max(other.nodes for other in (*budgets, budget) if other.depth == budget.depth)
    return rate if budget.nodes == largest else 0.8 * rate


def expected_of(budget: Budget, rate: float, budgets: Sequence[Budget], found: float = 1.0) -> float:
    """Return the expected tokens of a step."""
    return 1 + found * sum(rate_of(budget, rate, budgets) ** depth for depth in range(1, budget.depth + 1))
