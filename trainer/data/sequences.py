"""Sequences of token ids mapped from a file, and views that select or pack sequences."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from jaxtyping import Int

from trainer.data.batch import Example


class _Examples(Sequence[Example]):
    """Sequences that are built on access."""

    def _at(self, index: int) -> Example:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(len(self))[index]]
        return self._at(range(len(self))[index])


class StoredExamples(_Examples):
    """The rows of an Arrow file with the columns ``tokens``, ``trained`` and ``prompt_length``, memory-mapped."""

    def __init__(self, file: Path) -> None:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        self.dataset = Dataset.from_file(str(file))
        self._columns = [self.dataset.data.column(name) for name in ("tokens", "trained", "prompt_length")]

    def __len__(self) -> int:
        return len(self.dataset)

    def _at(self, index: int) -> Example:
        tokens, trained, prompt_length = (column[index] for column in self._columns)
        mask = trained.values.to_numpy(zero_copy_only=False)  # the file stores one bit per token
        return Example(tokens.values.to_numpy(), mask, prompt_length.as_py())


class Packed(_Examples):
    """Sequences from another set, joined into longer ones.

    Example i contains the documents ``order[bounds[i] : bounds[i + 1]]``.
    """

    def __init__(
        self, documents: Sequence[Example], order: Int[np.ndarray, " documents"], bounds: Int[np.ndarray, " packed+1"]
    ) -> None:
        self._documents, self._order, self._bounds = documents, order, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _at(self, index: int) -> Example:
        indices = self._order[self._bounds[index] : self._bounds[index + 1]]
        documents: list[Example] = [self._documents[int(each)] for each in indices]
        if len(documents) == 1:
            return documents[0]
        return Example(
            np.concatenate([document.tokens for document in documents]),
            np.concatenate([document.trained for document in documents]),
            documents[0].prompt_length,
            [len(document.tokens) for document in documents],
        )


def chosen(examples: Sequence[Example], indices: Int[np.ndarray, " chosen"]) -> Packed:
    """Return the examples with these indices."""
    return Packed(examples, indices, np.arange(len(indices) + 1))


def pack(examples: Sequence[Example], max_length: int) -> Packed:
    """Pack examples by best fit into sequences of at most ``max_length`` tokens.

    Examples are placed in order, each in the sequence that it fills most, so equal examples give equal sequences. They
    are joined on access.
    """
    packed: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, index of the sequence), sorted
    for index, length in enumerate(len(example.tokens) for example in examples):
        fitting = bisect_left(rooms, (length, -1))
        if fitting == len(rooms):
            room, chosen_sequence = max_length, len(packed)
            packed.append([])
        else:
            room, chosen_sequence = rooms.pop(fitting)
        packed[chosen_sequence].append(index)
        insort(rooms, (room - length, chosen_sequence))
    order = np.array([index for documents in packed for index in documents], np.int64)
    return Packed(examples, order, np.cumsum([0, *map(len, packed)]))
