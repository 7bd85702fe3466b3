"""Mistakes in acceptance rules, published ones among them: the enumeration that proves the rules must catch each.

Most are one edit of the rules' own source, so that what fails is the rule as it stands with one thing wrong.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from enumerated_rules import LOSSY
from torch import Tensor

import decoding.rules.verify
from decoding.measure.proof.enumeration import (
    LOSSLESS,
    ContextModel,
    Draft,
    contexts,
    deterministic_draft,
    distance_from_target,
    draft_of,
    model_pair,
    sampled_draft,
    top_tokens,
)
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import RULES, Decide, Verdict

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
DETERMINISTIC = ProposalKind.DETERMINISTIC

CHAIN = (-1, 0, 1)
PAIR = (-1, 0, 0)
TREE = (-1, 0, 1, 0, 3)


class Mutant(NamedTuple):
    """A rule whose source has ``was`` replaced by ``becomes`` in one function, and the drafts that show it."""

    rule: str
    function: str
    was: str
    becomes: str
    kind: ProposalKind
    parents: tuple[int, ...]
    models: str = "dense"


RECURSIVE, TRAVERSAL, CHILDREN = "recursive_rejection", "traversal_verification", "_children_with_q"
RATIO, UPDATE, RESIDUAL = (
    "mass[token] / q_now[token]",
    "mass, kept = residual.div_(rest), left / rest",
    "(mass - q_now)",
)
DESCEND, SHAPE = "Verdict(*proposal.tree.descend(best))", "proposal.tree.shape.children"
SHRUNK = RESIDUAL.replace("q_now", "q_now.index_fill(0, torch.tensor(token), 0) / (1 - q_now[token])")
LAST_CHILD = f"Verdict({SHAPE}[0][-1:], best[{SHAPE}[0][-1]])"
DRAW, INVERSE, ALONE = "source.draw(p[node])", "q_now[token] / p_now[token]", "mass[token] / kept / q_now[token]"
AT_ROOT = "Verdict(proposal.tree.descend(best)[0], best[0])"
MUTANTS = {name: Mutant(*rest) for name, *rest in [  # type: ignore[misc]
    ("token: no residual", "token", RECURSIVE, "p_now = residual", "pass", WITH, CHAIN),
    ("block: no residual", "block", TRAVERSAL, "source.draw(mass)", DRAW, WITH, CHAIN),
    ("p and q swapped", "recursive", RECURSIVE, "p_now[token] / q_now[token]", INVERSE, WITH, CHAIN),
    ("p and q swapped in the residual", "recursive", "_residual", "(p - q)", "(q - p)", WITHOUT, TREE),
    ("no residual", "recursive", RECURSIVE, "p_now = residual", "pass", WITHOUT, TREE),
    ("the residual for the children only", "recursive", RECURSIVE, "source.draw(p_now)", DRAW, WITH, TREE),
    ("the residual not normalised", "recursive", "_residual", "positive / total", "positive", WITHOUT, PAIR),
    ("q not shrunk", "recursive", CHILDREN, "q_now[drawn] = 0", "pass", WITHOUT, PAIR),
    ("q not normalised", "recursive", CHILDREN, "q_now / q_now.sum()", "q_now", WITHOUT, PAIR),
    ("q shrunk where it was not", "recursive", CHILDREN, "kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT",
     "token_list[child] != drawn", WITH, PAIR),
    ("top-k: not renormalised", "top-k", "_residual", "positive / total", "positive", DETERMINISTIC, PAIR),
    ("top-k: a refused child not zeroed", "top-k", "_residual", "(p - q).clamp(min=0)", "p", DETERMINISTIC, PAIR),
    ("traversal: p and q swapped", "traversal", TRAVERSAL, RATIO, "q_now[token] / mass[token]", WITH, CHAIN),
    ("traversal: p and q swapped in the residual", "traversal", TRAVERSAL, RESIDUAL, "(q_now - mass)", WITH, CHAIN),
    ("traversal: no residual", "traversal", TRAVERSAL, "source.draw(mass)", DRAW, WITH, TREE),
    ("the parent not updated", "traversal", TRAVERSAL, UPDATE, "pass", WITH, TREE),
    ("p updated, but not A", "traversal", TRAVERSAL, UPDATE, "mass = residual * (kept / left)", WITH, TREE),
    ("A updated, but not p", "traversal", TRAVERSAL, UPDATE, "mass, kept = mass * (left / rest / kept), left / rest",
     WITH, TREE),
    ("S for S/(S + (1 - A))", "traversal", TRAVERSAL, "left + (1 - kept)", "1.0", WITH, TREE),
    ("the residual of p, not of A p", "traversal", TRAVERSAL, RESIDUAL, "(mass / kept - q_now)", WITH, TREE),
    ("a child weighed without its parent", "traversal", TRAVERSAL, RATIO, ALONE, WITH, TREE),
    ("A not cut at 1", "traversal", TRAVERSAL, "min(1.0, ratio)", "ratio", WITH, TREE),
    ("q updated before p and A", "traversal", TRAVERSAL, RESIDUAL, SHRUNK, WITHOUT, PAIR),
    ("traversal: q not shrunk", "traversal", CHILDREN, "q_now[drawn] = 0", "pass", WITHOUT, PAIR),
    ("a node with nothing left keeps its A", "traversal", TRAVERSAL, "kept = 0.0", "pass", WITHOUT, TREE, "zeros"),
    ("siblings' branches in reverse", "traversal", CHILDREN, f"in {SHAPE}[node]", f"in reversed({SHAPE}[node])",
     WITHOUT, PAIR),
    ("greedy: the root's token at a miss", "greedy", "greedy", DESCEND, AT_ROOT,
     WITH, TREE, "one-hot target"),
    ("greedy: the last child", "greedy", "greedy", DESCEND, LAST_CHILD, WITH, PAIR, "one-hot target"),
    ("a second draw at a miss", "sampled-verify", "sampled_verify", "Verdict(tuple(path), token)",
     "Verdict(tuple(path), source.draw(p[node]))", WITH, PAIR),
    ("from the parent's p", "sampled-verify", "sampled_verify", DRAW, "source.draw(p[max(node - 1, 0)])",
     WITH, CHAIN),
]}  # fmt: skip

SORTED = "sorted(proposal.tree.shape.children[node], key=lambda x: -float(proposal.q[node, token_list[x]]))"
MUTANTS |= {
    f"{rule}: siblings sorted by q, {kind.value}": Mutant(
        rule, "_children_with_q", "proposal.tree.shape.children[node]", SORTED, kind, PAIR
    )
    for rule in ("recursive", "traversal")
    for kind in (WITH, WITHOUT)
}


def mutated(mutant: Mutant) -> Decide:
    """The rule of a copy of `decoding.rules.verify` in which one place of one function reads differently."""
    source = Path(str(decoding.rules.verify.__file__)).read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    function = ast.get_source_segment(source, functions[mutant.function])
    assert function is not None and function.count(mutant.was) == 1, f"{mutant.function} has changed: see its mutants"
    copy = {"__name__": "decoding.rules.verify"}
    exec(source.replace(function, function.replace(mutant.was, mutant.becomes)), copy)
    rules: dict[str, Decide] = copy["RULES"]  # type: ignore[assignment]
    return rules[mutant.rule]


@cache
def distance(decide: Decide, kind: ProposalKind, parents: tuple[int, ...], models: str) -> float:
    """From the target, on one pair of models, which are such that every mutant shows."""
    shape = TreeShape(parents)
    p, q = model_pair(models, 3, shape.max_depth, seed=3)
    return distance_from_target(draft_of(kind, shape, q), decide, p, shape.max_depth + 1)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_enumeration_catches_a_rule_with_one_thing_wrong(name: str) -> None:
    mutant = MUTANTS[name]
    drafts = (mutant.kind, mutant.parents, mutant.models)
    assert distance(RULES[mutant.rule], *drafts) < LOSSLESS
    assert distance(mutated(mutant), *drafts) > LOSSY


def test_every_lossless_rule_has_mutants() -> None:
    assert {mutant.rule for mutant in MUTANTS.values()} == {name for name, rule in RULES.items() if rule.lossless}


# --- mistakes that are more than an edit ----------------------------------------------------------------------------


def stopping_at_the_first_failure(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Block verification tested forwards, up to the first prefix that fails."""
    tokens, q = proposal.tree.token_list, proposal.q
    assert q is not None
    kept, reach, residual = 0, 1.0, (p[0] - q[0]).clamp(min=0)
    for position in range(1, len(tokens)):
        reach = min(1.0, reach * float(p[position - 1, tokens[position]] / q[position - 1, tokens[position]]))
        whole = position == len(tokens) - 1
        after = p[position] if whole else (reach * p[position] - q[position]).clamp(min=0)
        left = float(after.sum())
        if not source.accept(reach if whole else left / (left + (1 - reach))):
            break
        kept, residual = position, after
    return Verdict(tuple(range(1, kept + 1)), source.draw(residual))


def a_draw_per_child(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Sampled verification that draws anew for each child of a shared node."""
    tree, path, node = proposal.tree, [], 0
    while True:
        drawn = [source.draw(p[node]) for _ in tree.shape.children[node]] or [source.draw(p[node])]
        kept = [x for x, token in zip(tree.shape.children[node], drawn, strict=False) if tree.token_list[x] == token]
        if not kept:
            return Verdict(tuple(path), drawn[-1])
        node = kept[0]
        path.append(node)


def duplicates_skipped(rule: str) -> Decide:
    """With replacement, a duplicate left out instead of being refused."""

    def decide(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
        tokens = list(dict.fromkeys(proposal.tree.token_list[1:]))
        tree = TokenTree(torch.tensor([proposal.tree.token_list[0], *tokens]), TreeShape((-1, *(0 for _ in tokens))))
        return RULES[rule](Proposal(tree, proposal.kind, proposal.q), p, source)

    return decide


@pytest.mark.parametrize(
    ("mutant", "kind", "parents"),
    [
        (stopping_at_the_first_failure, WITH, CHAIN),
        (a_draw_per_child, WITHOUT, PAIR),
        (a_draw_per_child, DETERMINISTIC, TREE),
        (duplicates_skipped("recursive"), WITH, PAIR),
        (duplicates_skipped("traversal"), WITH, PAIR),
    ],
)
def test_the_enumeration_catches_a_rule_that_is_built_wrong(
    mutant: Decide, kind: ProposalKind, parents: tuple[int, ...]
) -> None:
    assert distance(mutant, kind, parents, "dense") > LOSSY


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_the_enumeration_catches_a_softmax_q_for_a_deterministic_draft(rule: str) -> None:
    """A draft that took the argmax, scored as if it had been sampled from the softmax."""
    p, q = model_pair("dense", 3, 2, seed=0)

    def decide(proposal: Proposal, rows: Tensor, source: RandomSource) -> Verdict:
        softmax = torch.stack([q(context) for context in contexts(proposal.tree)[:-1]])
        return RULES[rule](Proposal(proposal.tree, WITH, softmax), rows, source)

    assert distance_from_target(deterministic_draft(TreeShape(CHAIN), top_tokens(q)), decide, p, 3) > LOSSY


# --- uniforms of zero -----------------------------------------------------------------------------------------------


class CoarseSource:
    """Uniforms on a grid of 1/4: exact for probabilities in quarters, and often enough 0 to show what 0 does."""

    def __init__(self, source: RandomSource, strict: bool) -> None:
        self._source, self._strict = source, strict
        self.draw = source.draw

    def accept(self, probability: float) -> bool:
        uniform = self._source.draw(torch.ones(4)) / 4
        return uniform < probability if self._strict else uniform <= probability


def drawn_from(row: Tensor) -> Draft:
    return sampled_draft(TreeShape.chain(1), ContextModel({(): row}), WITH)


def always_zero(row: Tensor) -> Draft:
    return deterministic_draft(TreeShape.chain(1), lambda context, count: [0] * count)


# Block and traversal verification do not ask at all where the probability is 0, so that no source can mislead them.
@pytest.mark.parametrize(
    ("rule", "draft", "asks"),
    [
        ("recursive", drawn_from, True),
        ("top-k", always_zero, True),
        ("traversal", drawn_from, False),
        ("traversal", always_zero, False),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_uniform_of_zero_must_not_accept_a_token_of_probability_zero(
    rule: str, draft: Callable[[Tensor], Draft], asks: bool, strict: bool
) -> None:
    # Ratios p/q: 0, 2 and 1; in quarters, so that the strict test on a grid of quarters is exact.
    row = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row, (2,): row})

    def decide(proposal: Proposal, rows: Tensor, source: RandomSource) -> Verdict:
        return RULES[rule](proposal, rows, CoarseSource(source, strict))

    error = distance_from_target(draft(torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)), decide, p, 2)
    assert error > LOSSY if asks and not strict else error < LOSSLESS
