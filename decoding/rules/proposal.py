"""Proposals, which a drafter hands to an acceptance rule: a tree, how its tokens were chosen, and their q."""

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.rules.tree import TokenTree


class ProposalKind(Enum):
    """Ways to choose a node's children. A lossless rule is lossless only for the kinds it was derived for."""

    SAMPLED = "sampled"
    """Each child is drawn independently from q (with replacement)."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled without replacement"
    """Children are drawn one after the other, each from q without the tokens drawn before, renormalised."""
    DETERMINISTIC = "deterministic"
    """The set of children is a function of the context alone: top-k, argmax, lookup."""
    MIXED = "mixed"
    """Children of several origins in one tree, such as a sampled draft with lookup branches: no single q fits them."""

    @property
    def has_q(self) -> bool:
        """True if a proposal of this kind carries the q that its tokens were drawn from."""
        return self in (ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)


@dataclass(frozen=True)
class Proposal:
    """A drafted tree and how its tokens were chosen.

    Row i of ``q`` (parents, vocab) is the distribution, after every sampling control, from which the first child of
    node i was drawn. Rows after the last node with children may be missing. Deterministic and mixed proposals have no
    ``q``.
    """

    tree: TokenTree
    kind: ProposalKind
    q: Float[Tensor, "parents vocab"] | None = None

    def __post_init__(self) -> None:
        if (self.q is None) == self.kind.has_q:
            raise ValueError(f"a {self.kind.value} proposal {'needs' if self.q is None else 'carries no'} q")

    @staticmethod
    def root_only(token: int, device: torch.device | str = "cpu") -> "Proposal":
        """Make a proposal without drafted tokens: its target pass decodes one token, as plain decoding does."""
        return Proposal(TokenTree.chain([token], device), ProposalKind.DETERMINISTIC)
