"""Sources of the sequences of a training step: a data set, or texts that are generated during the training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from trainer.data.batch import Example, batch_indices


class PlacedExample(NamedTuple):
    """A sequence of a batch, and its index in the data set; -1 for a generated sequence."""

    example: Example
    example_index: int


class BatchSource(Protocol):
    """A source of batches for the training loop.

    The sequence at a position of a step's batch (from 0) does not depend on which process asks for it, nor on whether
    the run was stopped and resumed before.
    """

    def writes_at(self, step: int) -> bool:
        """Return True if `write` must be called before this step (from 0); every process gets the same answer."""

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Generate the texts that this process's positions need from this step on, with the draft's present weights.

        Called on every process at once, with every trained parameter whole. Returns figures to log, with the same keys
        on every process; the loop sums them over the processes.
        """

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        """Return the sequences at these positions of the step's batch."""


class Offline:
    """A fixed data set, epoch after epoch, each in an order of its own."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed

    def writes_at(self, step: int) -> bool:
        return False

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        raise AssertionError("nothing is written for a fixed set")

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        indices = batch_indices(step, self._batch_size, len(self._examples), self._seed)
        return [PlacedExample(self._examples[indices[position]], indices[position]) for position in positions]
