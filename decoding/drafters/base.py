"""The protocol every drafter follows: one class, one file, one method that proposes."""

from collections.abc import Sequence
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from decoding.proposal import Proposal
from decoding.sampling import RandomSource, SamplingConfig
from decoding.target import CausalLM


class DraftSession(Protocol):
    """A drafter at work on one text. All state of a generation lives here, none in the drafter or its model."""

    def propose(self, tokens: Sequence[int], hidden: Float[Tensor, " hidden"], max_depth: int) -> Proposal:
        """Draft what follows ``tokens``, whose last is the root, at most ``max_depth`` (at least 1) tokens deep.

        ``hidden`` is what the target's lm_head read when it wrote the root. A session keeps up with the text by
        itself: between two calls ``tokens`` grows by whatever was accepted and written.
        """


class Drafter(Protocol):
    """Opens sessions; holds models and settings, which never change."""

    name: str

    def open(self, target: CausalLM, sampling: SamplingConfig, source: RandomSource, max_length: int) -> DraftSession:
        """Start on a new text of at most ``max_length`` tokens. Refuses a target it does not fit."""

    @property
    def max_depth(self) -> int:
        """The deepest tree it drafts."""

    @property
    def max_nodes(self) -> int:
        """The largest tree it drafts, the root included."""
