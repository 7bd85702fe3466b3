"""Sources of training batches: a data set, or texts generated during training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from trainer.data.batch import Example, batch_indices


class PlacedExample(NamedTuple):
    """A sequence of a batch and its index in the data set; the index is -1 for a generated sequence."""

    example: Example
    example_index: int


class BatchSource(Protocol):
    """A source of batches for the training loop.

    The sequence at a position of a step's batch (from 0) depends neither on the process that requests it nor on earlier
    interruptions of the run.
    """

    def writes_at(self, step: int) -> bool:
        """Return True if `write` must be called before this step (from 0). All processes get the same answer."""

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Generate the texts for this process's positions from this step on, with the draft's current weights.

        All processes call this at once, with all trained parameters gathered. Returns figures to log, with the same
        keys on every process; the loop sums them over the processes.
        """

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        """Return the sequences at these positions of the step's batch."""


class Offline:
    """A fixed data set, repeated in epochs; each epoch has a different order."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed

    def writes_at(self, step: int) -> bool:
        return False

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        raise AssertionError("a fixed data set does not generate texts")

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        indices = batch_indices(step, self._batch_size, len(self._examples), self._seed)
        return [PlacedExample(self._examples[indices[position]], indices[position]) for position in positions]
