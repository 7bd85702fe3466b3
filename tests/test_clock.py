"""Clocks of decoding and of training, on a simulated GPU."""

from collections.abc import Callable
from unittest.mock import Mock, call

import pytest
import torch

from decoding.clock import PhaseClock
from trainer.learning.spans import Stopwatch


@pytest.mark.parametrize(
    "mark", [lambda device: PhaseClock(device).mark(), lambda device: [Stopwatch(device).now() for _ in range(2)]]
)
def test_a_clock_marks_the_queue_of_its_own_gpu(
    mark: Callable[[torch.device], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"queue of {device}")
    mark(torch.device("cuda:1"))
    assert event.mock_calls == [call(enable_timing=True), call().record("queue of cuda:1")] * 2
