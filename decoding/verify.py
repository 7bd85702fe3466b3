"""Acceptance rules: which drafted tokens the target keeps, and which token it writes after them.

Each rule is a pure function of a proposal, the target's distribution at every node, and a source of chance.
p is the target's distribution and q the draft's, both after every sampling control. A *lossless* rule emits tokens
distributed exactly as p, whatever q is; the tests prove it by enumerating every outcome.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import RandomSource


class Verdict(NamedTuple):
    """``path``: the accepted nodes from below the root downwards. ``token``: what the target writes after them."""

    path: tuple[int, ...]
    token: int


Decide = Callable[[Proposal, Tensor, RandomSource], Verdict]


@dataclass(frozen=True)
class Rule:
    """An acceptance rule with its promise. Called with a kind of proposal it does not fit, it refuses."""

    name: str
    lossless: bool
    kinds: frozenset[ProposalKind]
    decide: Decide
    chains_only: bool = False

    @property
    def label(self) -> str:
        return "lossless" if self.lossless else "lossy"

    def __call__(self, proposal: Proposal, target_probs: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
        if proposal.kind not in self.kinds:
            fitting = " or ".join(sorted(kind.value for kind in self.kinds))
            raise ValueError(f"the {self.name} rule takes {fitting} proposals, not {proposal.kind.value} ones")
        if self.chains_only and not proposal.tree.shape.is_chain:
            raise ValueError(f"the {self.name} rule takes chains; use recursive rejection for trees")
        return self.decide(proposal, target_probs, source)


def greedy(proposal: Proposal, target_scores: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Follow the child that is the target's argmax (lowest index on ties); write the argmax at the first miss.

    ``target_scores`` may be logits or probabilities: only their order matters.
    """
    best: list[int] = target_scores.argmax(-1).tolist()
    path: list[int] = []
    node = 0
    while (child := proposal.tree.child_with_token(node, best[node])) is not None:
        path.append(child)
        node = child
    return Verdict(tuple(path), best[node])


def token_rejection(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Speculative sampling on a chain (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    A drafted x is kept with probability min(1, p(x)/q(x)); at the first refusal the target writes from the
    normalised positive part of p - q; when all are kept it writes from p after the last.
    """
    q = proposal.q
    assert q is not None
    tree = proposal.tree
    length = len(tree) - 1
    if length:
        drafted = tree.tokens[1:, None]
        q_drafted = q[:length].gather(1, drafted)
        ratios: list[float] = (p[:length].gather(1, drafted) / q_drafted).squeeze(1).tolist()
        for position, ratio in enumerate(ratios):
            assert ratio == ratio, "a drafted token has q = 0: it was not drawn from the q that was recorded"
            if not source.accept(ratio):
                residual = _residual(p[position], q[position])
                # p = q up to rounding leaves no residual; the refusal was rounding too, and p is what to write from.
                return Verdict(
                    tuple(range(1, position + 1)), source.draw(p[position] if residual is None else residual)
                )
    return Verdict(tuple(range(1, length + 1)), source.draw(p[length]))


def recursive_rejection(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Rejection down a sampled tree, with replacement (SpecInfer 2305.09781) or without (RSD 2402.14160, Sequoia).

    At each node the children are tried in draw order against a p that shrinks to its residual after each refusal.
    With replacement q stays as it is (a duplicate is refused for certain, and still updates p); without, the refused
    token is taken out of q. When no child is kept the target writes from the last p.
    """
    q = proposal.q
    assert q is not None
    tree = proposal.tree
    path: list[int] = []
    node = 0
    while tree.shape.children[node]:
        p_now, q_now = p[node], q[node]
        accepted = None
        for child in tree.shape.children[node]:
            token = tree.token_list[child]
            q_token = float(q_now[token])
            assert q_token > 0, "a drafted token has q = 0: it was not drawn from the q that was recorded"
            residual = None
            if not source.accept(float(p_now[token]) / q_token):
                residual = _residual(p_now, q_now)
            if residual is None:  # kept, or p = q up to rounding, where a refusal has probability 0
                accepted = child
                break
            p_now = residual
            if proposal.kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT:
                q_now = q_now.clone()
                q_now[token] = 0
                q_now = q_now / q_now.sum()
        if accepted is None:
            return Verdict(tuple(path), source.draw(p_now))
        path.append(accepted)
        node = accepted
    return Verdict(tuple(path), source.draw(p[node]))


def _residual(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"] | None:
    """The normalised positive part of p - q; None where it is empty, which means p = q."""
    positive = (p - q).clamp(min=0)
    total = positive.sum()
    return positive / total if bool(total > 0) else None


def top_k_children(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Follow a token drawn from p for as long as it is a drafted child; write it where it is not.

    The children's set must be a function of the context. Trying each child with its renormalised p, and writing from
    what is left, has the same joint distribution as this single draw per node; the tests compare the two.
    """
    tree = proposal.tree
    path: list[int] = []
    node = 0
    while True:
        token = source.draw(p[node])
        child = tree.child_with_token(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def typical_acceptance(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """Medusa's typical acceptance (2401.10774, section 2.3.1): lossy.

    A drafted x is kept if p(x) > min(epsilon, delta * exp(-entropy of p)). Of the paths kept whole the longest wins,
    ties by likelihood under p; the target then writes from p after the last kept token.
    """

    def decide(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
        tree = proposal.tree
        entropy = -torch.special.xlogy(p, p).sum(-1)
        threshold: list[float] = torch.clamp(delta * torch.exp(-entropy), max=epsilon).tolist()
        parents = torch.tensor(tree.shape.parents[1:], device=p.device)
        p_drafted: list[float] = p[parents, tree.tokens[1:]].tolist() if len(tree) > 1 else []
        best = (0, 1.0, 0)  # length, likelihood, node
        kept = {0: (0, 1.0)}
        for node, parent in enumerate(tree.shape.parents[1:], start=1):
            if parent in kept and p_drafted[node - 1] > threshold[parent]:
                length, likelihood = kept[parent]
                kept[node] = (length + 1, likelihood * p_drafted[node - 1])
                if kept[node] > best[:2]:
                    best = (*kept[node], node)
        return Verdict(tree.shape.path(best[2]), source.draw(p[best[2]]))

    return Rule("typical acceptance", lossless=False, kinds=_ANY, decide=decide)


_ANY = frozenset(ProposalKind)

GREEDY = Rule("greedy", True, _ANY, greedy)
TOKEN_REJECTION = Rule("token rejection", True, frozenset({ProposalKind.SAMPLED}), token_rejection, chains_only=True)
RECURSIVE_REJECTION = Rule(
    "recursive rejection",
    True,
    frozenset({ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT}),
    recursive_rejection,
)
TOP_K_CHILDREN = Rule("top-k children", True, frozenset({ProposalKind.DETERMINISTIC}), top_k_children)


def lossless_rule(proposal: Proposal) -> Rule:
    """The lossless sampling rule that fits this proposal."""
    if proposal.kind is ProposalKind.DETERMINISTIC:
        return TOP_K_CHILDREN
    if proposal.kind is ProposalKind.SAMPLED and proposal.tree.shape.is_chain:
        return TOKEN_REJECTION
    return RECURSIVE_REJECTION
