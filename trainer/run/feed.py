"""Micro batches of the training loop; each is prepared in a thread while the previous one trains."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.data.batch import Batch, BatchSource, collate
from trainer.learning.objective import Objective
from trainer.learning.spans import span
from trainer.recipe.common import TrainingSection

Tensors = TypeVar("Tensors")


class MicroBatch(NamedTuple):
    """A micro batch of a step, and the result of `Objective.ahead` for it."""

    batch: Batch
    ahead: Any
    last: bool
    """True for the last micro batch of its step."""


class StepShare(NamedTuple):
    """This process's share of a step.

    ``counts`` are the number of labels of each term, followed by the number of trained tokens.
    """

    counts: Float[Tensor, " terms+1"]
    micro_batches: Iterator[MicroBatch]


class _Prepared(NamedTuple):
    """A micro batch on the host, and the `StepShare.counts` of the whole step."""

    micro_batch: MicroBatch
    counts: Float[Tensor, " terms+1"]


class Feed:
    """This process's micro batches, prepared one ahead of training, even across steps. A context manager.

    A micro batch depends only on its step and its index in the step. If the thread fails, taking the next micro batch
    raises its error. Nothing is prepared ahead of a step in which the source writes.
    """

    def __init__(
        self,
        objective: Objective,
        source: BatchSource,
        section: TrainingSection,
        positions: Sequence[int],
        device: torch.device,
    ) -> None:
        """``positions`` are this process's positions in a step's batch."""
        self._objective, self._source, self._section = objective, source, section
        self._positions, self._device = positions, device
        self._per_step = len(positions) // section.micro_batch_size
        self._thread = ThreadPoolExecutor(1, "micro batches")
        self._next: tuple[tuple[int, int], Future[_Prepared]] | None = None
        # A step, its batches, and its `StepShare.counts`; only the thread uses this.
        self._collated: tuple[int, list[Batch], Float[Tensor, " terms+1"]] | None = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def begin(self, step: int) -> None:
        """Prepare a run's first micro batch, so its errors are raised early; do nothing if the source writes first."""
        if step < self._section.steps and not self._source.writes_at(step):
            self._begin(step, 0).result()

    def step(self, step: int) -> StepShare:
        """Return this process's share of a step (from 0)."""
        first = self._take(step, 0)

        def micro_batches() -> Iterator[MicroBatch]:
            yield send(first.micro_batch, self._device)
            for index in range(1, self._per_step):
                yield send(self._take(step, index).micro_batch, self._device)

        return StepShare(send(first.counts, self._device), micro_batches())

    def settle(self) -> None:
        """Wait until the thread is idle."""
        if self._next is not None:
            wait([self._next[1]])

    def _take(self, step: int, index: int) -> _Prepared:
        begun = self._next is not None and self._next[0] == (step, index)
        future = self._next[1] if self._next is not None and begun else self._begin(step, index)
        with span("data"):
            prepared = future.result()
        self._next = None
        if index + 1 < self._per_step:
            self._begin(step, index + 1)
        elif step + 1 < self._section.steps and not self._source.writes_at(step + 1):
            self._begin(step + 1, 0)
        return prepared

    def _begin(self, step: int, index: int) -> Future[_Prepared]:
        future = self._thread.submit(self._prepare, step, index)
        self._next = (step, index), future
        return future

    def _prepare(self, step: int, index: int) -> _Prepared:
        """Prepare a micro batch. Its whole step is collated together, because the loss needs the counts of the step."""
        if self._collated is None or self._collated[0] != step:
            examples, size = self._source.examples_at(step, self._positions), self._section.micro_batch_size
            examples = sorted(
                examples, key=lambda each: len(each.example.tokens)
            )  # so that micro batches have little padding
            shares = [examples[start : start + size] for start in range(0, len(examples), size)]
            batches = [collate([e.example for e in share], [e.example_index for e in share]) for share in shares]
            labels = torch.stack([self._objective.counts(batch, step) for batch in batches]).sum(0)
            counts = torch.cat((labels, torch.stack([batch.labelled(1).sum() for batch in batches]).sum()[None]))
            self._collated = step, batches, counts
        _, batches, counts = self._collated
        batch, last = batches[index], index + 1 == self._per_step
        return _Prepared(pinned(MicroBatch(batch, self._objective.ahead(batch, step), last), self._device), counts)


def send(values: Tensors, device: torch.device) -> Tensors:
    """Copy the tensors among these values to a device, without waiting for a GPU."""
    return _each_tensor(lambda value: value.to(device, non_blocking=True), pinned(values, device))


def pinned(values: Tensors, device: torch.device) -> Tensors:
    """Pin the memory of the tensors among these values if the device is a GPU."""
    return _each_tensor(lambda value: value.pin_memory(), values) if device.type == "cuda" else values


def _each_tensor(change: Callable[[Any], Any], values: Tensors) -> Tensors:
    changed: Tensors = tree_map_only((Tensor, Batch), change, values)
    return changed
