"""What the training loop asks of an objective: batch -> sums of losses, and something to evaluate and save."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from decoding.drafters import Drafter
from trainer.data.batch import Batch


class TermSums(NamedTuple):
    """Per term of the loss: its sum over this batch's labels (differentiable), and how many labels were hit.

    NaN for a term that hits nothing.
    """

    losses: Float[Tensor, " terms"]
    hits: Float[Tensor, " terms"]


class Objective(Protocol):
    """A loss of one or more terms over a trained module.

    The loss is Σ weight * sum / count over the terms, where count runs over the whole batch of all processes.
    """

    terms: tuple[str, ...]
    hit_name: str

    @property
    def module(self) -> nn.Module:
        """What is trained; called with `inputs`, returns `TermSums`."""

    def weights(self, step: int) -> tuple[float, ...]:
        """Of the terms at a step (from 0)."""

    def rates(self, step: int) -> Mapping[str, float]:
        """Learning-rate factors at a step, by the beginning of the parameters' names; ``""`` is for all others.

        The keys are the same at every step: they are the optimizer's groups.
        """

    def counts(self, batch: Batch) -> Float[Tensor, " terms"]:
        """How many labels each term has in this batch."""

    def inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        """What the module is called with: runs whatever is frozen, without gradients."""

    def drafter(self) -> Drafter | None:
        """The module as it is now, ready for the decoding loop; None where there is no target to speed up."""

    def save(self, folder: Path) -> None:
        """Write what was trained in the form that is used afterwards."""


EVERYWHERE_THE_SAME: Mapping[str, float] = {"": 1.0}
"""The `Objective.rates` of one learning rate for all."""
