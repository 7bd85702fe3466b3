"""Published mistakes in acceptance rules: the enumeration that proves the rules must catch each of them."""

import math

import pytest
import torch
from enumeration import (
    LOSSLESS,
    LOSSY,
    ContextModel,
    Decide,
    contexts,
    deterministic_draft,
    distance_from_target,
    model_pair,
    sampled_draft,
    top_tokens,
)
from torch import Tensor

from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import GeneratorSource, RandomSource
from decoding.tree import TokenTree, TreeShape
from decoding.verify import RECURSIVE_REJECTION, TOKEN_REJECTION, Verdict, token_rejection

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT


def swapped(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """p and q exchanged."""
    assert proposal.q is not None
    rows = len(proposal.q)
    return token_rejection(Proposal(proposal.tree, WITH, p[:rows]), torch.cat([proposal.q, p[rows:]]), source)


def without_residual(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """After a refusal the target writes from p."""
    assert proposal.q is not None
    for node, token in enumerate(proposal.tree.token_list[1:], start=1):
        if not source.accept(float(p[node - 1, token] / proposal.q[node - 1, token])):
            return Verdict(tuple(range(1, node)), source.draw(p[node - 1]))
    return Verdict(tuple(range(1, len(proposal.tree))), source.draw(p[-1]))


def softmax_q(q: ContextModel) -> Decide:
    """A draft that took the argmax, scored as if it had been sampled from the softmax."""

    def decide(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
        rows = torch.stack([q(context) for context in contexts(proposal.tree)[:-1]])
        return TOKEN_REJECTION(Proposal(proposal.tree, WITH, rows), p, source)

    return decide


@pytest.mark.parametrize("mutant", [swapped, without_residual])
def test_the_enumeration_catches_a_broken_token_rejection(mutant: Decide) -> None:
    p, q = model_pair("dense", 3, 2, seed=0)
    assert distance_from_target(sampled_draft(TreeShape.chain(2), q, WITH), mutant, p, 3) > LOSSY


def test_the_enumeration_catches_a_softmax_q_for_a_deterministic_draft() -> None:
    p, q = model_pair("dense", 3, 2, seed=0)
    draft = deterministic_draft(TreeShape.chain(2), top_tokens(q))
    assert distance_from_target(draft, softmax_q(q), p, 3) > LOSSY


def children_sorted(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """The root's children in order of their q instead of the order in which they were drawn."""
    assert proposal.q is not None
    drawn = proposal.tree.token_list[1:]
    likely_first = sorted(drawn, key=lambda token: -float(proposal.q[0, token]))  # type: ignore[index]
    tree = TokenTree(torch.tensor([proposal.tree.token_list[0], *likely_first]), proposal.tree.shape)
    return RECURSIVE_REJECTION(Proposal(tree, proposal.kind, proposal.q), p, source)


def relabelled(kind: ProposalKind) -> Decide:
    """A tree drawn one way, verified as if drawn the other: q shrinks where it should not, or the reverse."""
    return lambda proposal, p, source: RECURSIVE_REJECTION(Proposal(proposal.tree, kind, proposal.q), p, source)


def duplicates_skipped(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """With replacement, a duplicate left out instead of being refused."""
    tokens = list(dict.fromkeys(proposal.tree.token_list[1:]))
    tree = TokenTree(torch.tensor([proposal.tree.token_list[0], *tokens]), TreeShape((-1, *(0 for _ in tokens))))
    return RECURSIVE_REJECTION(Proposal(tree, proposal.kind, proposal.q), p, source)


@pytest.mark.parametrize(
    ("mutant", "drawn"),
    [
        (children_sorted, WITHOUT),
        (children_sorted, WITH),
        (relabelled(WITH), WITHOUT),
        (duplicates_skipped, WITH),
    ],
    ids=["sorted without replacement", "sorted with replacement", "q not shrunk", "duplicates skipped"],
)
def test_the_enumeration_catches_a_broken_recursive_rejection(mutant: Decide, drawn: ProposalKind) -> None:
    p, q = model_pair("dense", 3, 1, seed=3)
    assert distance_from_target(sampled_draft(TreeShape((-1, 0, 0)), q, drawn), mutant, p, 2) > LOSSY


class CoarseSource:
    """Uniforms on a grid of 1/4: exact for probabilities in quarters, and often enough 0 to show what 0 does."""

    def __init__(self, source: RandomSource, strict: bool) -> None:
        self._source, self._strict = source, strict
        self.draw = source.draw

    def accept(self, probability: float) -> bool:
        uniform = self._source.draw(torch.ones(4)) / 4
        return uniform < probability if self._strict else uniform <= probability


@pytest.mark.parametrize("strict", [True, False])
def test_a_uniform_of_zero_must_not_accept_a_token_of_probability_zero(strict: bool) -> None:
    # Ratios p/q: 0, 2 and 1; in quarters, so that the strict test on a grid of quarters is exact.
    row = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row, (2,): row})
    q = ContextModel({(): torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)})

    def decide(proposal: Proposal, rows: Tensor, source: RandomSource) -> Verdict:
        return TOKEN_REJECTION(proposal, rows, CoarseSource(source, strict))

    error = distance_from_target(sampled_draft(TreeShape.chain(1), q, WITH), decide, p, 2)
    assert error < LOSSLESS if strict else error > LOSSY


def test_the_generators_own_uniform_of_zero_refuses_probability_zero() -> None:
    class Zero(GeneratorSource):
        def _uniform(self) -> float:
            return 0.0

    source = Zero(torch.Generator())
    assert not source.accept(0.0)
    assert source.accept(1e-300)
    assert not source.accept(math.nan)
