"""Clocks of decoding and of training, on a pretended GPU."""

from collections.abc import Callable

import pytest
import torch

from decoding.clock import PhaseClock
from trainer.learning.spans import Stopwatch


class PretendedEvent:
    """An event that was recorded in a stream; None means the current device's, as torch has it."""

    recorded: list[str | None] = []  # noqa: RUF012  # emptied by each test

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str | None = None) -> None:
        self.recorded.append(stream)


@pytest.mark.parametrize(
    "mark", [lambda device: PhaseClock(device).mark(), lambda device: [Stopwatch(device).now() for _ in range(2)]]
)
def test_a_clock_marks_the_queue_of_its_own_gpu(
    mark: Callable[[torch.device], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendedEvent, "recorded", [])
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"queue of {device}")
    mark(torch.device("cuda:1"))
    assert PretendedEvent.recorded == ["queue of cuda:1"] * 2
