"""Policies, which choose before each step how much to draft: a fixed amount, what has paid, or transformers' schedule.

A policy is state of the caller, one for each pair of target and drafter; it learns over texts and batches. No policy
changes what a lossless rule guarantees. The seconds of a step come from the loop; only the adaptive policy reads them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from decoding.metrics import StepCount


class Budget(NamedTuple):
    """The bounds of one draft: ``depth`` of its deepest token, ``nodes`` of its tree, the root included."""

    depth: int
    nodes: int


PLAIN = Budget(0, 1)
"""Draft nothing: plain decoding."""


class Policy(Protocol):
    """Chooser of how much to draft, before each step of the loop; it observes each step's counts and seconds."""

    name: str

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        """Return one of the drafter's ``budgets`` (by increasing cost, `PLAIN` not among them), or `PLAIN`.

        ``rows``: the number of texts that are decoded at a time.
        """

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        """Learn from a step of ``budget``: one count per row, and the batch's seconds of draft, pass and all."""


class FixedPolicy:
    """The largest budget within the limits, `PLAIN` if none is."""

    name = "fixed"

    def __init__(self, depth: int | None = None, nodes: int | None = None) -> None:
        if (depth is not None and depth < 0) or (nodes is not None and nodes < 1):
            raise ValueError(f"a depth of {depth} and {nodes} nodes: give a depth from 0 and nodes from 1 (the root)")
        self._depth = math.inf if depth is None else depth
        self._nodes = math.inf if nodes is None else nodes

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        within = [budget for budget in budgets if budget.depth <= self._depth and budget.nodes <= self._nodes]
        return within[-1] if within else PLAIN

    def observe(self, *step: object) -> None:
        pass


class HeuristicPolicy:
    """transformers' schedule: 2 deeper when all that was drafted was accepted, else 1 less, at least 1.

    In a batch the depth moves by the mean of what its rows ask for.
    """

    name = "heuristic"

    def __init__(self, depth: int = 5) -> None:
        if depth < 1:
            raise ValueError(f"a depth of {depth} to start from: give at least 1")
        self._depth: float = depth

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets:
            return PLAIN
        self._depth = min(self._depth, max(budget.depth for budget in budgets))
        within = [budget for budget in budgets if budget.depth <= self._depth]
        return within[-1] if within else budgets[0]

    def observe(self, budget: Budget, steps: Sequence[StepCount], *seconds: float) -> None:
        moves = [2 if step.accepted == step.offered else -1 for step in steps if step.offered > 0]
        if moves:
            self._depth = max(1.0, self._depth + sum(moves) / len(moves))


class _Rate:
    """Tokens and seconds of the last steps with one budget, older ones weighing less."""

    def __init__(self) -> None:
        self.trials, self.tried_at, self._tokens, self._seconds, self._weight = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, tokens: int, seconds: float, at: float) -> None:
        self.trials, self.tried_at = self.trials + 1, at
        if self.trials > 1:  # the first step pays for what later ones find ready
            self._tokens = _MEMORY * self._tokens + tokens
            self._seconds = _MEMORY * self._seconds + seconds
            self._weight = _MEMORY * self._weight + 1

    @property
    def value(self) -> float:
        """Tokens in a second."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def lost(self, best: "_Rate") -> float:
        """Return the seconds that a step of this budget loses against the best; a guess before there were any."""
        if not self._seconds or not best.value:
            return 0.1 * best._seconds / max(best._weight, 1.0)
        return self._seconds / self._weight * (1 - self.value / best.value)


_MEMORY = 0.97
"""Weight of a step beside the one after it."""
_EXPLORES = 0.01
"""Share of the time that trying budgets other than the best may lose."""
_TRIALS = 2
"""Steps of a budget before it is judged; the first one does not count."""


class AdaptivePolicy:
    """The budget that has written the most tokens in a second of late, or `PLAIN` where drafting does not pay.

    The others are tried again the more seldom the slower they were. What is best depends on the number of texts decoded
    at a time, so each power of two of it learns by itself. Reads the clock: sampled texts of a seed may differ.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self._rates: dict[tuple[int, Budget], _Rate] = {}
        self._seconds = 0.0

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets:
            return PLAIN
        last = len(budgets) - 1
        arms = [PLAIN if index < 0 else budgets[index] for index in dict.fromkeys((last, -1, last // 2, last // 4))]
        rates = {arm: self._rate(rows, arm) for arm in arms}
        for arm in arms[:2]:  # all there is and nothing come first
            if rates[arm].trials < _TRIALS:
                return arm
        best = max(arms, key=lambda arm: rates[arm].value)
        share = _EXPLORES / (len(arms) - 1)
        for arm in arms:
            if arm is not best and share * (self._seconds - rates[arm].tried_at) >= rates[arm].lost(rates[best]):
                return arm
        return best

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        self._seconds += total
        self._rate(len(steps), budget).add(sum(step.emitted for step in steps), total, self._seconds)

    def _rate(self, rows: int, budget: Budget) -> _Rate:
        return self._rates.setdefault((rows.bit_length(), budget), _Rate())


_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "adaptive": AdaptivePolicy,
    "fixed": FixedPolicy,
    "heuristic": HeuristicPolicy,
}


def named_policy(name: str) -> Policy:
    """Make a new policy, ``adaptive``, ``fixed`` or ``heuristic``; ValueError for a name that is none of them."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
