"""Micro batches are prepared in a thread while others train: nothing of a run depends on it but its time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import distilling
import pytest
from tiny_models import tiny_model
from tiny_training import Recorder, ToyObjective, interrupt, medusa_on, train_toy
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch
from trainer.learning.objective import Objective
from trainer.recipe.heads import HeadsSection
from trainer.run.loop import Interrupted

THREAD = "micro batches"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


class AtOnce:
    """A pool without a thread: work is done when it is taken."""

    def __init__(self, workers: int, name: str) -> None:
        assert (workers, name) == (1, THREAD)

    def submit(self, work: Callable[..., Any], *args: Any) -> "Later":
        return Later(lambda: work(*args))

    def shutdown(self, cancel_futures: bool) -> None:
        pass


class Later(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        return self._work()


KINDS: dict[str, Callable[[], Objective]] = {
    "toy": lambda: ToyObjective(dropout=0.3),
    "heads": lambda: medusa_on(CausalLM(tiny_model("llama")), HeadsSection(num_heads=2)),
    "draft": lambda: distilling.objective_for(tiny_model("llama"), loss={"forward_kl": 1.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_to_the_bit_whether_anything_is_prepared_ahead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, at_once, stopped = Recorder(), Recorder(), Recorder()
    train_toy(tmp_path / "a", KINDS[kind](), ahead, micro_batch_size=2, steps=4)
    stopped.actions[3] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "b", KINDS[kind](), stopped, micro_batch_size=2, steps=4)
    stopped.actions.clear()
    monkeypatch.setattr("trainer.run.feed.ThreadPoolExecutor", AtOnce)
    train_toy(tmp_path / "b", KINDS[kind](), stopped, micro_batch_size=2, steps=4)
    train_toy(tmp_path / "c", KINDS[kind](), at_once, micro_batch_size=2, steps=4)
    assert ahead.figures == at_once.figures == stopped.figures and len(ahead.figures) == 4


class Diary(ToyObjective):
    """Notes which micro batch is prepared, by which thread, and waits in training until the next one is."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.prepared = [threading.Event() for _ in range(batches)]
        self.by: set[str] = set()
        self.trained = 0

    def ahead(self, batch: Batch, step: int) -> None:
        self.by.add(threading.current_thread().name)
        next(event for event in self.prepared if not event.is_set()).set()

    def inputs(self, batch: Batch, step: int, ahead: Any = None) -> tuple[Tensor, ...]:
        after = self.prepared[self.trained + 1 :]
        assert not after or after[0].wait(timeout=60), "the next micro batch is prepared while this one trains"
        assert not any(event.is_set() for event in after[1:]), "one alone is prepared ahead"
        self.trained += 1
        return super().inputs(batch, step)


def test_one_micro_batch_is_prepared_while_the_one_before_it_trains_over_the_ends_of_steps(tmp_path: Path) -> None:
    objective = Diary(batches=6)
    train_toy(tmp_path, objective, steps=3, micro_batch_size=4)
    assert objective.trained == 6 and all(event.is_set() for event in objective.prepared)
    assert all(name.startswith(THREAD) for name in objective.by) and not threads()


@pytest.mark.parametrize("end", ["interrupt", "error"])
def test_no_thread_outlives_its_run(end: str, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.actions[2] = interrupt if end == "interrupt" else lambda: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(Interrupted if end == "interrupt" else KeyboardInterrupt):
        train_toy(tmp_path, ToyObjective(), recorder)
    assert not threads()
