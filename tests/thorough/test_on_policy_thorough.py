"""Policies: which rows a step has, by which draft they are written, and that a run which goes on trains the same."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_on_policy import MIXED, Distilling, batches, written_in
from tiny_policies import policy_of, source_of
from tiny_training import interrupt
from torch import Tensor

from trainer.run.loop import Interrupted


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_trains_the_same_rows(tmp_path: Path, processes: int) -> None:
    policy = policy_of(**MIXED, every=2)
    whole = batches(source_of(tmp_path / "one", policy), range(4))
    for process in range(processes):
        share = range(process, 8, processes)
        source = source_of(tmp_path / "all", policy, process=process, processes=processes)
        assert batches(source, range(4), share) == [[step[position] for position in share] for step in whole]
    assert sorted(written_in(tmp_path / "all", 2)) == written_in(tmp_path / "one", 2)


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("stop_at", range(1, 7))
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(tmp_path: Path, stop_at: int) -> None:
    """Texts for three steps at a time: within a window they are read, at its beginning they are written again."""
    whole, stopped = Distilling(tmp_path / "a", every=3), Distilling(tmp_path / "b", every=3)
    weights = whole.train()
    stopped.recorder.actions[stop_at] = interrupt
    with pytest.raises(Interrupted):
        stopped.train()
    stopped.recorder.actions.clear()
    torch.rand(17)
    random.random()
    assert same(stopped.train(), weights) and list(stopped.recorder.losses) == [1, 2, 3, 4, 5, 6, 7]
    assert stopped.recorder.losses == whole.recorder.losses and len(set(whole.recorder.losses.values())) == 7


def test_a_run_killed_between_its_texts_and_its_checkpoint_writes_them_again(tmp_path: Path) -> None:
    """Checkpoints after steps 2 and 4, texts before steps 0, 3 and 6. Killed after step 4, before its checkpoint: the
    texts for step 3 are there, but the run goes on from step 2, so they are written again, whatever stands there."""

    def kill() -> None:
        raise KeyboardInterrupt

    whole, killed = Distilling(tmp_path / "a", every=3), Distilling(tmp_path / "b", every=3)
    weights = whole.train()
    killed.recorder.actions[4] = kill
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    killed.recorder.actions.clear()
    (tmp_path / "b" / "generated" / "after-00000003-process-0-of-1.jsonl").write_text("spoilt")
    assert same(killed.train(), weights) and killed.recorder.losses == whole.recorder.losses


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_change_nothing_but_the_last_bits(tmp_path: Path, micro: int) -> None:
    one, many = Distilling(tmp_path / "a", every=2), Distilling(tmp_path / "b", every=2)
    one.train()
    many.train(micro_batch_size=micro)
    assert many.recorder.losses == pytest.approx(one.recorder.losses, rel=1e-4)
    assert written_in(tmp_path / "a" / "generated", 2) == written_in(tmp_path / "b" / "generated", 2)
