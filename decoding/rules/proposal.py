"""Proposals, from a drafter to an acceptance rule: a tree, how its tokens were chosen, and q."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.rules.tree import TokenTree


class ProposalKind(Enum):
    """Ways to choose a node's children. A lossless rule is lossless only for the kinds it was derived for."""

    SAMPLED = "sampled"
    """Each child is drawn independently from q (with replacement)."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled without replacement"
    """Children are drawn one by one, each from q without the tokens drawn before, renormalised."""
    DETERMINISTIC = "deterministic"
    """The set of children is a function of the context alone: top-k, argmax, lookup."""
    GRAFTED = "grafted"
    """Children drawn in one of the two ways above, followed by children that are a function of the context."""
    MIXED = "mixed"
    """Children of several origins, such as the draws of two drafts, with unknown q."""

    @property
    def has_q(self) -> bool:
        """True if proposals of this kind carry the q that their tokens were drawn from."""
        return self not in (ProposalKind.DETERMINISTIC, ProposalKind.MIXED)


class DrawnPart(NamedTuple):
    """The drawn part of a grafted proposal: the first ``nodes`` of its tree (root included), drawn as ``kind``."""

    nodes: int
    kind: ProposalKind


@dataclass(frozen=True)
class Proposal:
    """A drafted tree and how its tokens were chosen.

    ``q`` (parents, vocab) has a row for each node with drawn children, in the order of the nodes: the distribution,
    after every sampling control, from which the node's first child was drawn. In a chain, row i is node i's.
    Deterministic and mixed proposals have ``q`` None.

    ``drawn`` is the drawn part of a grafted proposal, None for any other. ``matched`` is the length of the text's
    suffix that a lookup found earlier, 0 without a lookup.
    """

    tree: TokenTree
    kind: ProposalKind
    q: Float[Tensor, "parents vocab"] | None = None
    drawn: DrawnPart | None = None
    matched: int = 0

    def __post_init__(self) -> None:
        if (self.q is None) == self.kind.has_q:
            raise ValueError(f"a {self.kind.value} proposal {'needs q' if self.q is None else 'must not carry q'}")
        assert (self.drawn is not None) == (self.kind is ProposalKind.GRAFTED), f"drawn part of a {self.kind.value} one"
        if self.q is not None and len(self.q) != len(self.q_rows):
            raise ValueError(f"q has {len(self.q)} rows, but {len(self.q_rows)} nodes have drawn children")

    @cached_property
    def q_rows(self) -> dict[int, int]:
        """Return the row of ``q`` of each node with drawn children."""
        shape = self.tree.shape
        return (shape if self.drawn is None else shape.keep(range(self.drawn.nodes))).inner

    @staticmethod
    def root_only(token: int, device: torch.device | str = "cpu") -> "Proposal":
        """Make a proposal without drafted tokens: its target pass decodes one token, as in plain decoding."""
        return Proposal(TokenTree.chain([token], device), ProposalKind.DETERMINISTIC)
