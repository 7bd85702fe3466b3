"""Sequences of token ids in flat arrays, in memory or mapped from a file, and views that choose among or pack them."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import overload

import numpy as np
from jaxtyping import Bool, Int, UInt8

from trainer.data.batch import Example


@dataclass(frozen=True)
class Columns:
    """Consecutive sequences in flat arrays: four bytes and one bit for each token."""

    tokens: Int[np.ndarray, " tokens"]
    """int32: the token ids of one sequence after the other."""
    mask: UInt8[np.ndarray, " bytes"]
    """The trained tokens as bits, the first of a byte being its lowest."""
    offsets: Int[np.ndarray, " sequences+1"]
    """int32: the place of each sequence's first token, and the end of the last sequence."""
    prompt_lengths: Int[np.ndarray, " sequences"]
    """int32: tokens before the first answer."""
    firsts: Bool[np.ndarray, " sequences"]
    """True for the first sequence of a row."""

    @staticmethod
    def of(rows: Iterable[Sequence[Example]]) -> "Columns":
        """Return the columns of the sequences of rows, none of which is packed."""
        rows = [row for row in rows if row]
        examples = [example for row in rows for example in row]
        assert not any(example.lengths for example in examples), "documents are packed when they are read"
        firsts = np.zeros(len(examples), np.bool_)
        firsts[[0, *accumulate(len(row) for row in rows[:-1])] if rows else []] = True
        return Columns(
            np.concatenate([np.empty(0, np.int32), *(example.tokens for example in examples)]),
            np.packbits(np.concatenate([np.empty(0, np.bool_), *(e.trained for e in examples)]), bitorder="little"),
            np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int32),
            np.array([example.prompt_length for example in examples], np.int32),
            firsts,
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def example(self, index: int) -> Example:
        """Return a sequence; its tokens are a view."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        bits = np.unpackbits(self.mask[begin >> 3 : (end + 7) >> 3], bitorder="little")
        trained = bits[begin & 7 : (begin & 7) + end - begin].view(np.bool_)
        return Example(self.tokens[begin:end], trained, int(self.prompt_lengths[index]))


class _Examples(Sequence[Example]):
    """Sequences that are made when they are asked for."""

    def _at(self, index: int) -> Example:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._at(place) for place in range(len(self))[index]]
        return self._at(range(len(self))[index])


class Sequences(_Examples):
    """The sequences of a data set, in the order of its rows."""

    def __init__(self, parts: Iterable[Columns]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _at(self, index: int) -> Example:
        part = bisect_right(self._ends, index)
        return self._parts[part].example(index - (self._ends[part - 1] if part else 0))

    @cached_property
    def lengths(self) -> Int[np.ndarray, " sequences"]:
        """The tokens of each sequence."""
        return np.concatenate([np.empty(0, np.int32), *(np.diff(part.offsets) for part in self._parts)])

    def firsts(self) -> "Packed":
        """Return the first sequence of each row."""
        marks = np.concatenate([np.empty(0, np.bool_), *(part.firsts for part in self._parts)])
        places = np.flatnonzero(marks)
        return Packed(self, places, np.arange(len(places) + 1))


class Packed(_Examples):
    """Sequences of another, joined into longer ones.

    Example i holds the documents ``order[bounds[i] : bounds[i + 1]]``.
    """

    def __init__(
        self, documents: Sequence[Example], order: Int[np.ndarray, " documents"], bounds: Int[np.ndarray, " packed+1"]
    ) -> None:
        self._documents, self._order, self._bounds = documents, order, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _at(self, index: int) -> Example:
        places = self._order[self._bounds[index] : self._bounds[index + 1]]
        documents = [self._documents[int(place)] for place in places]
        return _joined(documents) if len(documents) > 1 else documents[0]


def pack(examples: Sequence[Example], max_length: int) -> Packed:
    """Pack examples into sequences of at most ``max_length`` tokens by best fit.

    Examples are placed in their order, each where it leaves the least room, so the same examples give the same
    sequences. They are joined when they are read.
    """
    lengths = examples.lengths if isinstance(examples, Sequences) else [len(example.tokens) for example in examples]
    packed: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, index of the sequence), sorted
    for index, length in enumerate(map(int, lengths)):
        fitting = bisect_left(rooms, (length, -1))
        if fitting == len(rooms):
            room, place = max_length, len(packed)
            packed.append([])
        else:
            room, place = rooms.pop(fitting)
        packed[place].append(index)
        insort(rooms, (room - length, place))
    order = np.array([index for documents in packed for index in documents], np.int64)
    return Packed(examples, order, np.cumsum([0, *map(len, packed)]))


def _joined(documents: Sequence[Example]) -> Example:
    return Example(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate([document.trained for document in documents]),
        documents[0].prompt_length,
        [len(document.tokens) for document in documents],
    )
