"""A machine of which policies see only what a real one shows: seeded acceptance, noisy timing, twentyfold hiccups."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decoding.metrics import StepCount, expected_tokens
from decoding.policies import PLAIN, Budget, Policy

TREES = (Budget(2, 4), Budget(3, 8), Budget(4, 16))
Rate = Callable[[int, Budget], float]


def chains(depth: int) -> list[Budget]:
    return [Budget(length, length + 1) for length in range(1, depth + 1)]


def always(rate: float) -> Rate:
    """Every position is accepted with the same probability."""
    return lambda position, budget: rate


def one(accepted: int, offered: int) -> list[StepCount]:
    return [StepCount(accepted + 1, accepted, offered, offered)]


@dataclass
class Machine:
    """True seconds in plain steps: ``draft`` by drafted token, ``verify`` by rows and nodes. Timing is noisier."""

    draft: float = 0.1
    verify: Callable[[int, int], float] = lambda rows, nodes: 1.0
    noise: float = 0.05
    hiccups: float = 0.02

    def best_rate(self, acceptance_rate: float, deepest: int, rows: int = 1) -> float:
        """Tokens per second and row of the best fixed depth, plain decoding included."""
        depths = range(deepest + 1)
        return max(
            expected_tokens(acceptance_rate, depth) / (self.draft * depth + self.verify(rows, depth + 1))
            for depth in depths
        )

    def step(
        self, budget: Budget, rows: int, accepts: Rate, found: float, chance: random.Random
    ) -> tuple[list[StepCount], float, float]:
        """One step: the counts of its rows, and the true seconds of draft and target pass."""
        steps = []
        for _ in range(rows):
            offered = budget.depth if chance.random() < found else 0
            accepted = 0
            while accepted < offered and chance.random() < accepts(accepted + 1, budget):
                accepted += 1
            steps.append(StepCount(accepted + 1, accepted, offered, budget.nodes - 1 if offered else 0))
        draft = self.draft * max(step.offered for step in steps)
        return steps, draft, self.verify(rows, 1 + max(step.drafted for step in steps))

    def timed(self, seconds: float, chance: random.Random) -> float:
        """What a clock shows of it."""
        hiccup = 20 if chance.random() < self.hiccups else 1
        return seconds * chance.lognormvariate(0, self.noise) * hiccup


@dataclass
class Run:
    """What came of a simulated text; ``seconds`` are true ones, without noise, those of rehearsals apart."""

    tokens: float = 0.0
    seconds: float = 0.0
    rehearsed: float = 0.0
    choices: list[Budget] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy: Policy,
    machine: Machine,
    accepts: Rate,
    tokens: int,
    budgets: Sequence[Budget],
    rows: int = 1,
    found: float = 1.0,
    seed: int = 0,
) -> Run:
    """Decode ``tokens`` tokens in each row; the drafter finds something to draft with probability ``found``."""
    chance, run = random.Random(seed), Run()

    def step(policy: Policy, rows: int) -> tuple[Budget, float, float]:
        budget = policy.choose(budgets, rows)
        assert budget == PLAIN or budget in budgets
        steps, draft, verify = machine.step(budget, rows, accepts, found, chance)
        timed = machine.timed(draft, chance), machine.timed(verify, chance)
        policy.observe(budget, rows, steps, *timed, sum(timed))
        return budget, sum(count.emitted for count in steps) / rows, draft + verify

    def rehearse(policy: Policy, rows: int) -> Iterator[None]:
        while True:
            run.rehearsed += step(policy, rows)[2]
            yield

    policy.begin(budgets, rows, rehearse)
    while run.tokens < tokens:
        budget, emitted, seconds = step(policy, rows)
        run.tokens += emitted
        run.seconds += seconds
        run.choices.append(budget)
    return run


def mean_rate(runs: Iterable[Run]) -> float:
    """Tokens per second of all runs together."""
    done = list(runs)
    return sum(run.tokens for run in done) / sum(run.seconds for run in done)
