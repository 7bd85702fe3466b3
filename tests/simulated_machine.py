"""A machine of which policies see only what a real one shows: seeded acceptance, noisy timing, twentyfold hiccups."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.metrics import StepCount
from decoding.policies import PLAIN, Budget, Policy


def chains(depth: int) -> list[Budget]:
    return [Budget(length, length + 1) for length in range(1, depth + 1)]


@dataclass
class Machine:
    """True seconds in plain steps: ``draft`` by drafted token, ``verify`` by rows and nodes. Timing is noisier."""

    draft: float = 0.1
    verify: Callable[[int, int], float] = lambda rows, nodes: 1.0
    noise: float = 0.05
    hiccups: float = 0.02

    def timed(self, seconds: float, chance: random.Random) -> float:
        """What a clock shows of it."""
        hiccup = 20 if chance.random() < self.hiccups else 1
        return seconds * chance.lognormvariate(0, self.noise) * hiccup


def simulate(
    policy: Policy, machine: Machine, rate: float, tokens: int, budgets: Sequence[Budget], rows: int = 1, seed: int = 0
) -> None:
    """Decode ``tokens`` tokens in each row; each drafted token is accepted with probability ``rate``."""
    chance, written = random.Random(seed), 0.0
    while written < tokens:
        budget = policy.choose(budgets, 1)
        assert budget == PLAIN or budget in budgets
        steps = []
        for _ in range(rows):
            accepted = 0
            while accepted < budget.depth and chance.random() < rate:
                accepted += 1
            steps.append(StepCount(accepted + 1, accepted, budget.depth, budget.nodes - 1))
        draft = machine.timed(machine.draft * budget.depth, chance)
        verify = machine.timed(machine.verify(rows, budget.nodes), chance)
        policy.observe(budget, steps, draft, verify, draft + verify)
        written += sum(step.emitted for step in steps) / rows
