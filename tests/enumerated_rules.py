"""Enumerations of each rule of the project on each small draft, computed once for all tests."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar

from decoding.measure.proof.enumeration import SHAPES, Enumerated, draft_of, enumerate_turn, model_pair, outcomes
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import ProposalKind
from decoding.rules.verify import RULES

Outcome = TypeVar("Outcome", bound=Hashable)

LOSSY = 1e-6
"""A broken rule has at least this distance from the target."""


def distribution(program: Callable[[RandomSource], Outcome]) -> dict[Outcome, float]:
    """Return the probability of each result."""
    total: dict[Outcome, float] = defaultdict(float)
    for result, probability in outcomes(program):
        total[result] += probability
    return dict(total)


@cache
def enumerated(rule: str, kind: ProposalKind, shape: str, models: str, seed: int) -> Enumerated:
    """Enumerate all outcomes of a rule on one draft."""
    p, q = model_pair(models, 3, SHAPES[shape].max_depth, seed)
    return enumerate_turn(draft_of(kind, SHAPES[shape], q), RULES[rule], p, SHAPES[shape].max_depth + 1)
