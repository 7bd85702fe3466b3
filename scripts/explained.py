"""Numbers for docs/explanation: every outcome of the acceptance rules on a small p and q, and the speed-up by formula.

The rules are the code that decoding runs, and the enumeration that proves these rules also computes their outcomes. The
formulas for the speed-up come from `decoding.metrics` and `decoding.rules.best_tree`. This module adds no other
formulas.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from decoding.measure.proof.enumeration import (
    ContextModel,
    Enumerated,
    deterministic_draft,
    draft_of,
    enumerate_turn,
    sampled_draft,
    top_tokens,
    verdicts,
)
from decoding.metrics import expected_tokens, predicted_speedup
from decoding.model.cost_curve import pass_over
from decoding.rules.best_tree import best_tree, expected_accepted
from decoding.rules.tree import ProposalKind, TreeShape
from decoding.rules.verify import RULES

ROOT = Path(__file__).resolve().parent.parent

TOKENS = "abc"
P = (0.5, 0.3, 0.2)
"""The target's next-token distribution, in every context."""
Q = (0.25, 0.6, 0.15)
"""The draft's next-token distribution, in every context."""

SAMPLED, WITHOUT, FIXED = (ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT, ProposalKind.DETERMINISTIC)
ONE, TWO, CHAIN, BRANCHES = (TreeShape(parents) for parents in ((-1, 0), (-1, 0, 0), (-1, 0, 1), (-1, 0, 0, 1, 2)))
SHAPES = {"one token": ONE, "a chain of two": CHAIN, "two children": TWO, "two branches of two": BRANCHES}


@dataclass(frozen=True)
class Example:
    """A rule applied to a draft of one token or two sibling tokens. ``rule``: the rule's name in `RULES`."""

    title: str
    rule: str
    kind: ProposalKind = SAMPLED
    shape: TreeShape = ONE


EXAMPLES = {
    "greedy": Example("greedy, one drawn token", "greedy"),
    "sampled-verify": Example("sampled verification, one drawn token", "sampled-verify"),
    "token": Example("token rejection, one drawn token", "token"),
    "recursive": Example("recursive rejection, two drawn tokens", "recursive", SAMPLED, TWO),
    "recursive-without": Example("… drawn without replacement", "recursive", WITHOUT, TWO),
    "top-k": Example("top-k children: the two best tokens of q", "top-k", FIXED, TWO),
    "typical": Example("typical acceptance (lossy), one drawn token", "typical"),
}


def same_everywhere(row: Sequence[float], depth: int) -> ContextModel:
    """Make a model with this next-token distribution in every context of up to ``depth`` tokens."""
    values, contexts = torch.tensor(row, dtype=torch.float64), [()]
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level = [(*context, token) for context in level for token in range(len(row))]
        contexts += level
    return ContextModel(dict.fromkeys(contexts, values))


def wanted(rule: str) -> tuple[float, ...]:
    """Return the distribution that a rule must produce: p, or p at temperature 0 for the greedy rule."""
    return tuple(float(chance == max(P)) for chance in P) if rule == "greedy" else P


@cache
def split(name: str) -> tuple[tuple[float, ...], ...]:
    """Return, for each token, the probability that it is written first, split by the token's origin.

    Entry [token][k] is the probability that the token is written because drafted child k (from 0) was kept. The last
    entry is the probability that the target writes the token.
    """
    example = EXAMPLES[name]
    children = len(example.shape) - 1
    total = [[0.0] * (children + 1) for _ in P]
    if example.kind is FIXED:
        draft = deterministic_draft(example.shape, top_tokens(same_everywhere(Q, 1)))
    else:
        draft = sampled_draft(example.shape, same_everywhere(Q, 1), example.kind)
    for proposal, verdict, probability in verdicts(draft, RULES[example.rule], same_everywhere(P, 1)):
        token = proposal.tree.token_list[verdict.path[0]] if verdict.path else verdict.token
        total[token][verdict.path[0] - 1 if verdict.path else children] += probability
    return tuple(tuple(row) for row in total)


@cache
def pairs(rule: str) -> Mapping[tuple[int, ...], tuple[float, float, float]]:
    """Return the probability of each text of two tokens, split by how many tokens of a drafted chain of two are kept.

    A text of one token is continued by a draw from p, as in the next turn.
    """
    p = same_everywhere(P, 3)
    total = {text: [0.0, 0.0, 0.0] for text in p.joint(2)}
    draft = sampled_draft(CHAIN, same_everywhere(Q, 2), SAMPLED)
    for proposal, verdict, probability in verdicts(draft, RULES[rule], p):
        written = (*(proposal.tree.token_list[node] for node in verdict.path), verdict.token)[:2]
        for text, share in p.completed({written: probability}, 2).items():
            total[text][len(verdict.path)] += share
    return {text: (row[0], row[1], row[2]) for text, row in total.items()}


@cache
def kept_tokens(rule: str, kind: ProposalKind, shape: str) -> float | None:
    """Return the expected number of kept tokens of a draft; None if the rule does not support drafts of this kind and
    shape.
    """
    fits = kind in RULES[rule].kinds and (SHAPES[shape].is_chain or not RULES[rule].chains_only)
    return _turn(rule, kind, shape).accepted_length if fits else None


@cache
def distance(rule: str, kind: ProposalKind, shape: str) -> float:
    """Return the largest difference between the probabilities of a text under the rule and under the target."""
    return _turn(rule, kind, shape).distance


def _turn(rule: str, kind: ProposalKind, shape: str) -> Enumerated:
    depth = SHAPES[shape].max_depth
    draft = draft_of(kind, SHAPES[shape], same_everywhere(Q, depth))
    return enumerate_turn(draft, RULES[rule], same_everywhere(P, depth + 1), depth + 1)


# --- the speed-up by formula ------------------------------------------------------------------------------------------

RATES = tuple(place / 50 for place in range(51))
DEPTHS = (1, 2, 4, 8)
DRAFT_COSTS = (0.0, 0.1, 0.3)
"""Costs of one drafted token, in units of a target pass over one token."""
MOST_DEPTH = 16


@cache
def smollm2_report() -> Mapping[str, Any]:
    """Return the published evaluation of SmolLM2-135M-Instruct, which contains the measured cost of its passes."""
    (path,) = sorted((ROOT / "benchmarks" / "results").glob("*/smollm2.json"))
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@cache
def measured_costs() -> Mapping[int, float]:
    """Return v(n): the seconds of a pass over n tokens divided by the seconds of a pass over one token."""
    curve = smollm2_report()["cost_curve_ms"]
    return {int(n): ms / curve["1"] for n, ms in curve.items()}


def speedup(rate: float, depth: int, draft_cost: float, curve: Mapping[int, float] | None = None) -> float:
    """Return the speed-up of a chain of ``depth`` tokens at per-position acceptance ``rate``.

    Without a curve, every pass has cost 1.
    """
    verify = pass_over(curve, depth + 1) if curve else 1.0
    return predicted_speedup(expected_tokens(rate, depth), draft_cost * depth, verify)


def best_depth(rate: float, draft_cost: float, curve: Mapping[int, float] | None = None) -> tuple[int, float]:
    """Return the depth up to `MOST_DEPTH` with the largest speed-up, and the speed-up; depth 0 is plain decoding."""
    found = {depth: speedup(rate, depth, draft_cost, curve) for depth in range(1, MOST_DEPTH + 1)}
    depth = max(found, key=lambda each: found[each])
    return (depth, found[depth]) if found[depth] > 1 else (0, 1.0)


# --- a tree -----------------------------------------------------------------------------------------------------------

SHARES = ((0.6, 0.2, 0.1), (0.45, 0.2, 0.1), (0.35, 0.15, 0.1))
"""Share of steps in which the token of each rank is right, by depth: round numbers, typical of heads."""
NODES = 8


def example_tree() -> tuple[TreeShape, tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return the best tree of `NODES` drafted tokens, its paths, and the probability that each path is kept."""
    paths = best_tree(SHARES, NODES)
    chances = tuple(expected_accepted([path], SHARES) for path in paths)
    return TreeShape.from_paths(paths)[0], paths, chances


def kept_of_trees(nodes: int) -> tuple[float, float]:
    """Return how many tokens are expected to be kept, for the best chain and for the best tree, each with at most
    ``nodes`` drafted tokens.
    """
    chain = [(0,) * depth for depth in range(1, min(nodes, len(SHARES)) + 1)]
    return expected_accepted(chain, SHARES), expected_accepted(best_tree(SHARES, nodes), SHARES)
