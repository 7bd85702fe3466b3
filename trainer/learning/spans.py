"""Timing of training steps, and of the waits in these steps for data and for the target."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Literal, NamedTuple

import torch

from decoding.clock import marked

Name = Literal["data", "target"]
"""Parts of a step: the wait for the next micro batch, and the frozen target's forward pass."""


class StepTimes(NamedTuple):
    """Wall-clock seconds of a step, and of its spans by name."""

    seconds: float
    spans: dict[Name, float]

    def share(self, name: Name) -> float:
        """Return the share of a span in the step."""
        return self.spans.get(name, 0.0) / self.seconds


@contextmanager
def span(name: Name) -> Iterator[None]:
    """Time the block as a part of the step, if a `Stopwatch` is running."""
    watch = _watch.get()
    start = None if watch is None else watch.now()
    yield
    if watch is not None:
        watch.timed.append((name, start, watch.now()))


class Stopwatch:
    """Timer of the `span` blocks that this thread runs inside the context of the timer.

    A GPU is timed by events in its queue. Events are read only after the GPU has passed them, so nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.timed: list[tuple[Name, Any, Any]] = []
        """Name, start and end of each span that `step` has not counted yet."""
        self._began: float | None = None
        self._token: Token[Stopwatch | None] | None = None

    def __enter__(self) -> "Stopwatch":
        self._token = _watch.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._token is not None, "the stopwatch was entered"
        _watch.reset(self._token)

    def step(self) -> StepTimes | None:
        """Return the times since the last call; None at the first call, and after `restart`.

        A span that the GPU has not finished yet counts for the next step.
        """
        now, began = time.perf_counter(), self._began
        self._began = now
        spans: Counter[Name] = Counter()
        pending = []
        for name, start, end in self.timed:
            if self._on_gpu and not end.query():
                pending.append((name, start, end))
            else:
                spans[name] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        self.timed = pending
        return None if began is None else StepTimes(now - began, dict(spans))

    def restart(self) -> None:
        """Ignore the time until the next `step`, because it is not training time."""
        self._began = None

    def now(self) -> Any:
        """Return the present time on the device."""
        return marked(self._device) if self._on_gpu else time.perf_counter()


_watch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
