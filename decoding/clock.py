"""Measures how long the phases of a step take, without making the host wait for the device."""

import time
from itertools import pairwise

import torch


def marked(device: torch.device) -> torch.cuda.Event:
    """Record an event in this GPU's queue, even if another GPU is the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class PhaseClock:
    """A clock that measures phases which follow one another.

    On a GPU each mark is an event in the GPU's queue, and the time of the event is read once the step has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._begin = time.perf_counter()
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if self._on_gpu:
            self.mark()

    def mark(self) -> None:
        """End the current phase and begin the next."""
        if self._on_gpu:
            self._events.append(marked(self._device))
        else:
            self._marks.append(time.perf_counter())

    def total(self) -> float:
        """Return the seconds from the start to now."""
        return time.perf_counter() - self._begin

    def phases(self) -> list[float]:
        """Return the seconds of each phase. Call this after the device has finished."""
        if self._on_gpu:
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [end - begin for begin, end in pairwise([self._begin, *self._marks])]
