"""Where the sequences of a training step come from: a data set, or what is written during the training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from trainer.data.batch import Example, batch_indices


class PlacedExample(NamedTuple):
    """A sequence of a batch, and its place in the data set: -1 for one that is not in it."""

    example: Example
    place: int


class BatchSource(Protocol):
    """What the training loop asks for its batches.

    What a step gets at a position of its batch (from 0) is the same however positions are dealt out to processes,
    and in a run that was stopped and goes on.
    """

    def writes_at(self, step: int) -> bool:
        """Whether `write` is to be called before this step (from 0): the same answer on every process."""

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Write what this process's positions need from this step on.

        Called on every process at once, with every trained parameter whole; what the draft is then is what writes.
        Returns figures to log, which are summed over the processes: with the same keys on all.
        """

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        """The sequences at these positions of the step's batch."""


class Offline:
    """A fixed set: epoch after epoch, each in an order of its own."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed

    def writes_at(self, step: int) -> bool:
        return False

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        raise AssertionError("nothing is written for a fixed set")

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        indices = batch_indices(step, self._batch_size, len(self._examples), self._seed)
        return [PlacedExample(self._examples[indices[position]], indices[position]) for position in positions]
