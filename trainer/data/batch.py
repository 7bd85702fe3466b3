"""Training examples (mapped from a file, selected or packed), and batches of examples or of generated texts.

The examples of a step depend only on the seed and the step. So a run resumes exactly, and does not depend on the number
of processes that share a batch.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from decoding.errors import UserError

if TYPE_CHECKING:  # batches contain only tensors
    from transformers import PreTrainedModel


class Example:
    """One sequence of token ids with its loss mask. Examples with equal content are equal."""

    __slots__ = ("lengths", "prompt_length", "tokens", "trained")

    def __init__(
        self,
        tokens: "Sequence[int] | Int[np.ndarray, 'positions']",
        trained: "Sequence[bool] | Bool[np.ndarray, 'positions']",
        prompt_length: int,
        lengths: Sequence[int] = (),
    ) -> None:
        self.tokens: Int[np.ndarray, " positions"] = np.asarray(tokens, np.int32)
        self.trained: Bool[np.ndarray, " positions"] = np.asarray(trained, np.bool_)
        """``trained[i]`` is True if predicting token i is part of the loss."""
        self.prompt_length = prompt_length
        """Number of tokens before the first answer; 0 for a plain text."""
        self.lengths = tuple(lengths)
        """Lengths of the documents packed into the sequence, in order; empty for a single document."""

    def text(self) -> tuple[bytes, bytes]:
        """Return tokens and document lengths as bytes that are the same on every machine."""
        return self.tokens.astype("<i4", copy=False).tobytes(), np.array(self.lengths, "<i8").tobytes()

    def content(self) -> tuple[bytes, ...]:
        """Return everything as bytes: `text`, the mask and the prompt's length."""
        return *self.text(), self.trained.tobytes(), self.prompt_length.to_bytes(8, "little")

    def predicted(self) -> Int[np.ndarray, " predicted"]:
        """Return the trained tokens, except the first token of each document, which nothing predicts."""
        trained = self.trained.copy()
        trained[np.cumsum((0, *self.lengths[:-1]))] = False
        predicted: Int[np.ndarray, " predicted"] = self.tokens[trained]
        return predicted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Example) and self.content() == other.content()

    def __hash__(self) -> int:
        return hash(self.content())

    def __repr__(self) -> str:
        tokens, trained = self.tokens.tolist(), self.trained.astype(int).tolist()
        return f"Example({tokens}, {trained}, {self.prompt_length}, {self.lengths})"


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; each tensor has the shape (batch, positions)."""

    tokens: Int[Tensor, "batch positions"]
    attention_mask: Int[Tensor, "batch positions"]
    """0 on padding."""
    trained: Bool[Tensor, "batch positions"]
    """False on padding."""
    documents: Int[Tensor, "batch positions"]
    """Index of the token's document within its row, from 0; -1 on padding."""
    examples: tuple[int, ...]
    """Index of each row's example in the data set; -1 for a sequence from elsewhere."""
    packed: bool
    """True if any row has several documents."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device. ``non_blocking`` copies from pinned memory without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Copy to pinned memory, which a GPU reads directly."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {name: change(held) for name, held in vars(self).items() if isinstance(held, Tensor)}
        return replace(self, **changed)

    def labelled(self, distance: int) -> Bool[Tensor, "batch positions"]:
        """Mark the positions t whose label, token t + ``distance``, is trained and in the same document."""
        labelled = torch.zeros_like(self.trained)
        if distance < self.trained.shape[1]:
            same = self.documents[:, distance:] == self.documents[:, :-distance]
            labelled[:, :-distance] = self.trained[:, distance:] & same
        return labelled

    def label_positions(self, distance: int) -> Int[Tensor, " labels"]:
        """Return the indices in the flattened batch at which `labelled` is True, in order.

        This waits for a GPU, so call it on the host before moving the batch.
        """
        return self.labelled(distance).flatten().nonzero()[:, 0]

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments for a transformers model, to be called with ``use_cache=False``.

        Padding needs no mask, because it follows all tokens of a row, tokens attend only to earlier positions, and
        outputs at padding are not read. Without a mask, attention is causal and fastest.

        In packed documents, positions restart at 0. Without an attention mask, these restarts make transformers
        separate documents in every kind of layer; padding counts as one more document. With a cache, transformers would
        ignore the positions, and documents would see earlier documents. OPT and Falcon always ignore positions: see
        `check_documents_are_apart`.
        """
        if not self.packed:
            return {"input_ids": self.tokens, "attention_mask": None}
        return {"input_ids": self.tokens, "attention_mask": None, "position_ids": self.positions()}

    def begins(self) -> Bool[Tensor, "batch positions"]:
        """Mark the first token of each document; padding counts as one more document."""
        begins = torch.ones_like(self.trained)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return begins

    def positions(self) -> Int[Tensor, "batch positions"]:
        """Return each token's index within its document, from 0."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return index - torch.where(self.begins(), index, 0).cummax(1).values


def flat_rows(values: Tensor, positions: Int[Tensor, " positions"]) -> Tensor:
    """Return rows of a (batch, positions, *) tensor by their indices in the flattened batch."""
    return values.flatten(0, 1).index_select(0, positions)


@torch.no_grad()
def check_documents_are_apart(model: "PreTrainedModel") -> None:
    """Raise UserError if the model lets packed documents see one another."""
    documents = [((1, 2), (5, 6, 7)), ((3, 4), (5, 6, 7))]
    rows = [Example(first + second, (True,) * 5, 0, (2, 3)) for first, second in documents]
    logits = model(**collate(rows).to(model.device).model_inputs(), use_cache=False).logits[:, 2:].float()
    if not torch.allclose(logits[0], logits[1], rtol=0, atol=1e-3 * float(logits.abs().max())):
        raise UserError(
            f"data.packing is on, but {model.config.model_type} models let packed texts see one another: set "
            "data.packing=false"
        )


def collate(examples: Sequence[Example], indices: Sequence[int] = ()) -> Batch:
    """Pad examples on the right to the length of the longest example; ``indices`` are their indices in the data set."""
    longest = max(len(example.tokens) for example in examples)
    shape = (len(examples), longest)
    tokens, attention_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    trained, documents = np.zeros(shape, np.bool_), np.full(shape, -1, np.int64)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        tokens[row, :length] = example.tokens
        attention_mask[row, :length] = 1
        trained[row, :length] = example.trained
        lengths = example.lengths or (length,)
        documents[row, :length] = np.repeat(np.arange(len(lengths)), lengths)
    packed = any(len(example.lengths) > 1 for example in examples)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(attention_mask),
        torch.from_numpy(trained),
        torch.from_numpy(documents),
        tuple(indices),
        packed,
    )


def cut(example: Example, length: int) -> Example | None:
    """Return the first ``length`` tokens of an example; None if none of them is trained."""
    if not example.trained[:length].any():
        return None
    if len(example.tokens) <= length:
        return example
    return Example(example.tokens[:length], example.trained[:length], example.prompt_length, example.lengths)


def batch_indices(step: int, batch_size: int, dataset_size: int, seed: int) -> list[int]:
    """Return the example indices of step ``step`` (from 0). Every epoch has a different order."""
    chosen: list[int] = []
    position = step * batch_size
    while len(chosen) < batch_size:
        epoch, offset = divmod(position + len(chosen), dataset_size)
        order = _epoch_order(epoch, dataset_size, seed)
        chosen += order[offset : offset + batch_size - len(chosen)].tolist()
    return chosen


@lru_cache(maxsize=2)
def _epoch_order(epoch: int, size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class IndexedExample(NamedTuple):
    """A sequence in a batch, and its index in the data set (-1 for a generated sequence)."""

    example: Example
    example_index: int


class BatchSource(Protocol):
    """A source of batches for the training loop.

    The sequence at a position of a step's batch (from 0) depends neither on the process that requests it nor on earlier
    interruptions of the run.
    """

    def writes_at(self, step: int) -> bool:
        """Return True if `write` must be called before this step (from 0). The result is the same on all processes."""

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Generate the texts at this process's positions for this step and the steps that follow, with the draft's
        current weights.

        All processes must call this together, with all trained parameters gathered. Returns figures to log, with the
        same keys on every process; the loop sums the figures over the processes.
        """

    def examples_at(self, step: int, positions: Sequence[int]) -> list[IndexedExample]:
        """Return the sequences at these positions of the step's batch."""


class Offline:
    """A fixed data set, which is repeated in epochs; each epoch has a different order."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed

    def writes_at(self, step: int) -> bool:
        return False

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        raise AssertionError("a fixed data set does not generate texts")

    def examples_at(self, step: int, positions: Sequence[int]) -> list[IndexedExample]:
        indices = batch_indices(step, self._batch_size, len(self._examples), self._seed)
        return [IndexedExample(self._examples[indices[position]], indices[position]) for position in positions]


class _Examples(Sequence[Example]):
    """A list of sequences, each of which is built whenever it is accessed."""

    def _at(self, index: int) -> Example:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(len(self))[index]]
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
    """The sequences of another set, joined into longer sequences.

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
        documents: list[Example] = [self._documents[int(number)] for number in indices]
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

    Examples are placed in order, each in the sequence that it fills most, so the same examples always make the same
    sequences. Examples are joined each time a sequence is accessed.
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
