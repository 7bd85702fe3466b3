"""Sources of batches: a fixed set, and the calls of the loop to a source that writes texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tiny_training import Recorder, ToyObjective, toy_examples, train_toy

from trainer.data.batch import Example, IndexedExample, Offline, batch_indices

DATA = toy_examples(5)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_fixed_set_gives_the_examples_of_its_order_with_their_places(batch_size: int) -> None:
    source = Offline(DATA, batch_size, seed=3)
    for step in range(7):
        indices = batch_indices(step, batch_size, 5, 3)
        assert source.examples_at(step, range(batch_size)) == [IndexedExample(DATA[index], index) for index in indices]
        assert not source.writes_at(step)


class Diary:
    """A source that writes at every second step and records the calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []

    def writes_at(self, step: int) -> bool:
        return step % 2 == 1

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        self.asked.append(("write", step, tuple(positions)))
        return {"generated/texts": 3.0, "generated/seconds": 0.5}

    def examples_at(self, step: int, positions: Sequence[int]) -> list[IndexedExample]:
        self.asked.append(("rows", step, tuple(positions)))
        return [IndexedExample(Example((step, position), (False, True), 0), -1) for position in positions]


def test_the_loop_lets_a_source_write_before_the_steps_that_need_it_and_logs_its_figures(tmp_path: Path) -> None:
    diary, recorder = Diary(), Recorder()
    train_toy(tmp_path, ToyObjective(), recorder, diary, steps=3, batch_size=4, micro_batch_size=2)
    every = (0, 1, 2, 3)
    assert diary.asked == [("rows", 0, every), ("write", 1, every), ("rows", 1, every), ("rows", 2, every)]
    assert recorder.figures[2]["generated/texts"] == 3.0 and recorder.figures[2]["generated/seconds"] == 0.5
    assert not {"generated/texts", "generated/seconds"} & (recorder.figures[1].keys() | recorder.figures[3].keys())
