"""What a drafter hands to an acceptance rule: a tree, how its tokens were chosen, and the q they came from."""

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.rules.tree import TokenTree


class ProposalKind(Enum):
    """How a node's children were chosen. A lossless rule is lossless only for the kinds it was derived for."""

    SAMPLED = "sampled"
    """Each child drawn independently from q (with replacement)."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled without replacement"
    """Children drawn from q one after the other, each from what is left of q."""
    DETERMINISTIC = "deterministic"
    """The set of children is a function of the context: top-k, argmax, lookup."""
    MIXED = "mixed"
    """Children of several origins in one tree, as where a sampled draft meets a lookup: no one q describes them."""

    @property
    def has_q(self) -> bool:
        """Whether such a proposal carries the q its tokens were drawn from."""
        return self in (ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)


@dataclass(frozen=True)
class Proposal:
    """A drafted tree.

    ``q`` has a row for each node that has children: the distribution, after every sampling control, that its first
    child was drawn from (rows after the last such node may be missing). Deterministic and mixed proposals carry none.
    """

    tree: TokenTree
    kind: ProposalKind
    q: Float[Tensor, "parents vocab"] | None = None

    def __post_init__(self) -> None:
        if (self.q is None) == self.kind.has_q:
            raise ValueError(f"a {self.kind.value} proposal {'needs' if self.q is None else 'carries no'} q")

    @staticmethod
    def root_only(token: int, device: torch.device | str = "cpu") -> "Proposal":
        """Nothing drafted: the target pass decodes one token, as plain decoding does."""
        return Proposal(TokenTree.chain([token], device), ProposalKind.DETERMINISTIC)
