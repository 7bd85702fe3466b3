"""How long the phases of a step took, without making the device wait for the host to ask."""

import time

import torch


class PhaseClock:
    """Marks the ends of phases. On a GPU the marks are events in its queue, read when the step's result is there."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = time.perf_counter()
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if self._on_gpu:
            self.mark()

    def mark(self) -> None:
        """A phase ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def total(self) -> float:
        """Seconds from the start to now."""
        return time.perf_counter() - self._begin

    def phases(self) -> list[float]:
        """Seconds of each phase. Call it when the device has done them: after a result was read."""
        if self._on_gpu:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        starts = [self._begin, *self._marks]
        return [end - begin for begin, end in zip(starts, self._marks, strict=False)]
