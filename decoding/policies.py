"""Policies, which choose before each step how much to draft: a fixed amount, or by transformers' schedule.

A policy is state of the caller, one for each pair of target and drafter; it learns over texts and batches. No policy
changes what a lossless rule guarantees, and none looks at a clock.
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

    def choose(self, budgets: Sequence[Budget]) -> Budget:
        """Return one of the drafter's ``budgets`` (by increasing cost, `PLAIN` not among them), or `PLAIN`."""

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

    def choose(self, budgets: Sequence[Budget]) -> Budget:
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

    def choose(self, budgets: Sequence[Budget]) -> Budget:
        if not budgets:
            return PLAIN
        self._depth = min(self._depth, max(budget.depth for budget in budgets))
        within = [budget for budget in budgets if budget.depth <= self._depth]
        return within[-1] if within else budgets[0]

    def observe(self, budget: Budget, steps: Sequence[StepCount], *seconds: float) -> None:
        moves = [2 if step.accepted == step.offered else -1 for step in steps if step.offered > 0]
        if moves:
            self._depth = max(1.0, self._depth + sum(moves) / len(moves))


_POLICIES: Mapping[str, Callable[[], Policy]] = {"fixed": FixedPolicy, "heuristic": HeuristicPolicy}


def named_policy(name: str) -> Policy:
    """Make a new policy, ``fixed`` or ``heuristic``; ValueError for a name that is none of them."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
