"""Policies that never look at a clock: fixed, and by transformers' schedule."""

import math
from collections.abc import Sequence

from decoding.metrics import StepCount
from decoding.policies.base import PLAIN, Budget


class FixedPolicy:
    """The largest budget within the limits, `PLAIN` if none is. Does not depend on the clock."""

    name = "fixed"

    def __init__(self, depth: int | None = None, nodes: int | None = None) -> None:
        if (depth is not None and depth < 0) or (nodes is not None and nodes < 1):
            raise ValueError(f"a depth of {depth} and {nodes} nodes: give a depth from 0 and nodes from 1 (the root)")
        self._depth = math.inf if depth is None else depth
        self._nodes = math.inf if nodes is None else nodes

    def begin(self, *_: object) -> None:
        """Do nothing: a fixed budget needs no measurement."""

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        within = [budget for budget in budgets if budget.depth <= self._depth and budget.nodes <= self._nodes]
        return within[-1] if within else PLAIN

    def observe(self, *step: object) -> None:
        pass


class HeuristicPolicy:
    """transformers' schedule: 2 deeper when all that was drafted was accepted, else 1 less, at least 1.

    In a batch the depth moves by the mean of what its rows ask for. Does not depend on the clock.
    """

    name = "heuristic"

    def __init__(self, depth: int = 5) -> None:
        if depth < 1:
            raise ValueError(f"a depth of {depth} to start from: give at least 1")
        self._depth: float = depth

    def begin(self, *_: object) -> None:
        """Do nothing: the schedule starts from the depth that it was given."""

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets:
            return PLAIN
        self._depth = min(self._depth, max(budget.depth for budget in budgets))
        within = [budget for budget in budgets if budget.depth <= self._depth]
        return within[-1] if within else budgets[0]

    def observe(self, budget: Budget, rows: int, steps: Sequence[StepCount], *seconds: float) -> None:
        moves = [2 if step.accepted == step.offered else -1 for step in steps if step.offered > 0]
        if moves:
            self._depth = max(1.0, self._depth + sum(moves) / len(moves))
