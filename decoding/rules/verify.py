"""Acceptance rules: which drafted tokens the target keeps, and which token it writes after them.

Each rule is a pure function of a proposal, the target's distribution at every node, and a random source. p is the
target's distribution and q is the draft's distribution, both after every sampling control. A *lossless* rule emits
tokens distributed exactly as p for any q. The tests prove this for three tokens and small trees by enumerating every
outcome. In the formulas (y)+ is the positive part of y, and delta(x) is the distribution with all mass on x.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.errors import UserError
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind


class Verdict(NamedTuple):
    """Result of a rule: the accepted nodes ``path``, from below the root down, and the target's next ``token``."""

    path: tuple[int, ...]
    token: int


Decide = Callable[[Proposal, Tensor, RandomSource], Verdict]


@dataclass(frozen=True)
class Rule:
    """An acceptance rule and its label. A call raises UserError for a proposal that the rule was not derived for."""

    name: str
    lossless: bool
    kinds: frozenset[ProposalKind]
    decide: Decide
    chains_only: bool = False

    @property
    def label(self) -> str:
        return "lossless" if self.lossless else "lossy"

    def check(self, kinds: Collection[ProposalKind], are_chains: bool) -> None:
        """Raise UserError unless the rule was derived for proposals of these kinds. Unless ``are_chains``, the rule
        must also have been derived for trees.
        """
        if unfit := sorted(kind.value for kind in kinds if kind not in self.kinds):
            fitting = " or ".join(sorted(kind.value for kind in self.kinds))
            raise UserError(f"the {self.name} rule takes {fitting} proposals, not {' or '.join(unfit)} proposals")
        if self.chains_only and not are_chains:
            raise UserError(f"the {self.name} rule takes chains only: use traversal verification for trees")

    def __call__(self, proposal: Proposal, target_probs: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
        self.check((proposal.kind,), proposal.tree.shape.is_chain)
        return self.decide(proposal, target_probs, source)


def greedy(proposal: Proposal, target_scores: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Follow the child that is the target's argmax (lowest index on ties); if there is no such child, write the argmax.

    ``target_scores`` may be logits or probabilities: only their order matters.
    """
    best: list[int] = target_scores.argmax(-1).tolist()
    return Verdict(*proposal.tree.descend(best))


def sampled_verify(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Draw a token from p at each node: move to the child with this token, or write it if there is none.

    The rule is lossless for any draft, however the draft's tokens were chosen. Each written token takes exactly one
    draw from ``source``, from p in its context, as in plain decoding. If the drafter draws nothing from ``source``, the
    text is therefore the one that plain decoding writes with the same seed. A child drawn from q is kept with
    probability sum over x of p(x) q(x). Rejection keeps the child at least as often: with probability sum over x of
    min(p(x), q(x)).
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


def recursive_rejection(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Verify a tree by rejection, with replacement (SpecInfer 2305.09781) or without replacement (RSD 2402.14160,
    Sequoia).

    Each node tries its children in draw order. Child x is kept with probability min(1, p(x)/q(x)); each rejection
    replaces p by its residual, the normalised (p - q)+. On a chain this is the token rejection of speculative sampling
    (Leviathan et al. 2211.17192, Chen et al. 2302.01318). With replacement, q does not change; a duplicate is always
    rejected, but its rejection still updates p. Without replacement, the rejected token is removed from q. If no child
    is kept, the target writes from the last p.

    A deterministic child x counts as drawn from delta(x), as in Medusa (2401.10774) and EAGLE (2401.15077): it is kept
    with probability p(x), and the order of the children does not matter. For such children, the distribution of
    verdicts is the same as with `sampled_verify`. Grafted children come after the drawn children, with q = delta(x).
    With one drawn child and one grafted child x, one of the two is kept with probability p(x) + sum over y != x of
    min(p(y), q(y)). This probability is at least as large as if only one of the two children had been drafted.
    """
    tree = proposal.tree
    path: list[int] = []
    node = 0
    while tree.shape.children[node]:
        p_now, accepted = p[node], None
        for child, q_now in _children_with_q(proposal, node, p[node]):
            token = tree.token_list[child]
            ratio = float(p_now[token] / q_now[token])
            assert ratio < math.inf, UNDRAWN
            residual = None if source.accept(ratio) else _residual(p_now, q_now)
            if residual is None:  # the child is kept; if p = q, a rejection has probability 0
                accepted = child
                break
            p_now = residual
        if accepted is None:
            return Verdict(tuple(path), source.draw(p_now))
        path.append(accepted)
        node = accepted
    return Verdict(tuple(path), source.draw(p[node]))


def traversal_verification(proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource) -> Verdict:
    """Verify a tree as a whole, depth first and leaves first (Weng et al. 2505.12398).

    Every node has a probability A of being kept: 1 at the root, and min(1, A p(x)/q(x)) at child x of a node with A. A
    leaf is kept with probability A; then the target writes from p. A rejected child changes its parent: p becomes the
    normalised (A p - q)+, and A becomes S/(S + (1 - A)), where S is the sum of (A p - q)+. The next child in draw order
    is tried with this p and A. If all children of a node are rejected, the node is kept with its last A and the target
    writes from its last p; otherwise the node is also rejected. A deterministic x counts as drawn from delta(x).

    On a chain this is block verification (Sun et al. 2403.10444). In expectation it keeps at least as many tokens as
    token rejection.
    """
    tree = proposal.tree

    def entered(node: int, kept: float) -> _Visit:
        """Return the visit of ``node`` with A = ``kept`` and no child tried yet."""
        # The product A p is all that the formulas use.
        # At a leaf a token is only drawn from p, so the scale of p does not matter.
        mass = p[node] * kept if tree.shape.children[node] else p[node]
        return node, kept, mass, _children_with_q(proposal, node, mass)

    node, kept, mass, children = entered(0, 1.0)
    above: list[tuple[_Visit, Tensor]] = []  # the nodes on the path, each with the q of the next node on the path
    while True:
        if (tried := next(children, None)) is not None:
            child, q_now = tried
            token = tree.token_list[child]
            ratio = float(mass[token] / q_now[token])
            assert ratio < math.inf, UNDRAWN
            if ratio > 0:
                above.append(((node, kept, mass, children), q_now))
                node, kept, mass, children = entered(child, min(1.0, ratio))
                continue
        elif node == 0 or (kept > 0 and source.accept(kept)):
            return Verdict(tree.shape.path(node), source.draw(mass))
        else:
            (node, kept, mass, children), q_now = above.pop()
        residual = (mass - q_now).clamp_(min=0)  # the tried child is rejected
        left = float(residual.sum())
        if left == 0:
            # Without a residual the node is rejected.
            # At the root this means that p equals q up to rounding, as in token rejection.
            kept = 0.0
            children = iter(())
            continue
        rest = left + (1 - kept)
        mass, kept = residual.div_(rest), left / rest


_Visit = tuple[int, float, Tensor, Iterator[tuple[int, Tensor]]]
"""A node in traversal verification: its number, its A, the product A p, and the children not yet tried."""


def _children_with_q(
    proposal: Proposal, node: int, like: Float[Tensor, " vocab"]
) -> Iterator[tuple[int, Float[Tensor, " vocab"]]]:
    """Yield the children of a node in draw order. Each comes with the q from which it was drawn, given the children
    drawn before it.
    """
    token_list, drawn = proposal.tree.token_list, None
    drawn_nodes, kind = proposal.drawn or (len(token_list), proposal.kind)
    for child in proposal.tree.shape.children[node]:
        if proposal.q is None or child >= drawn_nodes:
            q_now = torch.zeros_like(like)
            q_now[token_list[child]] = 1
        elif drawn is None:
            q_now = proposal.q[proposal.q_rows[node]]
        elif kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT:
            q_now = q_now.clone()
            q_now[drawn] = 0
            q_now = q_now / q_now.sum()
        drawn = token_list[child]
        yield child, q_now


def _residual(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"] | None:
    """Return the normalised positive part of p - q; None if it is zero everywhere, that is, p = q."""
    positive = (p - q).clamp(min=0)
    total = positive.sum()
    return positive / total if bool(total > 0) else None


UNDRAWN = "a drafted token has q = 0: it was not drawn from the recorded q"


def typical_acceptance(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """Make the rule of Medusa's typical acceptance (2401.10774, section 2.3.1): lossy.

    A drafted token x passes if p(x) > min(epsilon, delta * exp(-entropy of p)). The longest path of passing tokens is
    kept; if several paths are equally long, the likeliest path under p is kept. The target then writes from p after the
    last kept token.
    """
    decide = partial(typical, epsilon=epsilon, delta=delta)
    return Rule("typical acceptance", lossless=False, kinds=_ANY, decide=decide)


def typical(
    proposal: Proposal, p: Float[Tensor, "nodes vocab"], source: RandomSource, epsilon: float, delta: float
) -> Verdict:
    """Return the verdict of typical acceptance, as described in `typical_acceptance`."""
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


_ANY = frozenset(ProposalKind)
_DETERMINISTIC = frozenset({ProposalKind.DETERMINISTIC})
_DRAWN = frozenset(kind for kind in ProposalKind if kind.has_q)
_CHAIN = frozenset({ProposalKind.SAMPLED})

GREEDY = Rule("greedy", True, _ANY, greedy)
TOKEN_REJECTION = Rule("token rejection", True, _CHAIN, recursive_rejection, chains_only=True)
SAMPLED_VERIFY = Rule("sampled verify", True, _ANY, sampled_verify)
RECURSIVE_REJECTION = Rule("recursive rejection", True, _DRAWN, recursive_rejection)
TOP_K_CHILDREN = Rule("top-k children", True, _DETERMINISTIC, recursive_rejection)
BLOCK_VERIFICATION = Rule("block verification", True, _CHAIN | _DETERMINISTIC, traversal_verification, chains_only=True)
TRAVERSAL_VERIFICATION = Rule("traversal verification", True, _DRAWN | _DETERMINISTIC, traversal_verification)

RULES: dict[str, Rule] = {
    "greedy": GREEDY,
    "token": TOKEN_REJECTION,
    "sampled-verify": SAMPLED_VERIFY,
    "recursive": RECURSIVE_REJECTION,
    "top-k": TOP_K_CHILDREN,
    "block": BLOCK_VERIFICATION,
    "traversal": TRAVERSAL_VERIFICATION,
    "typical": typical_acceptance(),
}
"""Maps names on the command line to rules; typical acceptance uses the published thresholds."""


def lossless_rule(proposal: Proposal) -> Rule:
    """Return the lossless sampling rule with which this proposal is verified by default."""
    return lossless_rule_for(proposal.kind, proposal.tree.shape.is_chain)


def lossless_rule_for(kind: ProposalKind, is_chain: bool) -> Rule:
    """Return the lossless sampling rule with which proposals of this kind are verified by default.

    If the proposals have a q, the rule is block verification for sampled chains and traversal verification for all
    other proposals; these rules keep the most tokens. If they have no q, the rule is `sampled_verify`: for
    deterministic tokens all rules keep equally many tokens in expectation, and this rule writes the same text as plain
    decoding with the same seed.
    """
    if not kind.has_q:
        return SAMPLED_VERIFY
    if kind is ProposalKind.SAMPLED and is_chain:
        return BLOCK_VERIFICATION
    return TRAVERSAL_VERIFICATION
