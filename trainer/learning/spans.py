"""Named spans of a training step: ranges in a profiler's trace, and their seconds on the device that trains."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.profiler import record_function

Name = Literal["data", "target", "forward", "backward", "communication", "transfer", "optimizer"]
"""Parts of a step: the wait for the next micro batch, the frozen target's forward, that of the module, its backward
pass, sums over the processes, the copy of the figures to the host, and the optimizers' step."""
NAMES: tuple[Name, ...] = get_args(Name)


class StepTimes(NamedTuple):
    """Seconds of a step by the clock, and of each name's spans without the spans inside them."""

    seconds: float
    spans: dict[Name, float]

    def share(self, name: Name) -> float:
        """Return a name's share of the step."""
        return self.spans.get(name, 0.0) / self.seconds


class _Timed(NamedTuple):
    name: Name
    inside: Name | None
    start: Any
    end: Any


@contextmanager
def span(name: Name) -> Iterator[None]:
    """Mark work as a part of the step, for a `Stopwatch` and a profiler if there are any."""
    watch = _watch.get()
    with record_function(name):
        if watch is None:
            yield
        else:
            with watch.timing(name):
                yield


class Stopwatch:
    """Takes the time of every `span` of this thread while it is entered.

    On a CPU by its clock. On a GPU by events in its queue, which are read once the GPU has passed them: nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: list[Name] = []
        self._timed: list[_Timed] = []
        self._began: float | None = None
        self._token: Token[Stopwatch | None] | None = None

    def __enter__(self) -> "Stopwatch":
        self._token = _watch.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._token is not None, "it was entered"
        _watch.reset(self._token)

    @contextmanager
    def timing(self, name: Name) -> Iterator[None]:
        """Take the time of a span."""
        inside = self._open[-1] if self._open else None
        self._open.append(name)
        start = self._now()
        try:
            yield
        finally:
            self._timed.append(_Timed(name, inside, start, self._now()))
            self._open.pop()

    def step(self) -> StepTimes | None:
        """Return the times since the last call; None at the first call, and after `restart`.

        A span that the GPU has not passed yet, such as the optimizers', is one of the next step's.
        """
        now, began = time.perf_counter(), self._began
        self._began = now
        spans: Counter[Name] = Counter()
        pending = []
        for timed in self._timed:
            if self._on_gpu and not timed.end.query():
                pending.append(timed)
                continue
            seconds = timed.start.elapsed_time(timed.end) / 1e3 if self._on_gpu else timed.end - timed.start
            spans[timed.name] += seconds
            if timed.inside is not None:
                spans[timed.inside] -= seconds
        self._timed = pending
        return None if began is None else StepTimes(now - began, dict(spans))

    def restart(self) -> None:
        """Leave out the time until the next `step`, in which something else than steps was done."""
        self._began = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_watch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
