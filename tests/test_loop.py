"""The training loop is exact under resuming, accumulation and uneven masks, and stops in an orderly way."""

import errno
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distilling
import pytest
import tiny_training
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_training import Recorder, ToyObjective, interrupt, medusa_on, train_toy
from torch import Tensor, nn
from torch.nn import functional as F

import trainer.run.checkpoint
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example
from trainer.heads.medusa1 import MedusaObjective
from trainer.learning.objective import Objective
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import HeadsSection
from trainer.run import train
from trainer.run.checkpoint import Best, Checkpoints, Progress, bound
from trainer.run.distributed import PREFIX
from trainer.run.loop import Interrupted, learning_rate_at
from trainer.run.train import _check_one_job


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def medusa() -> MedusaObjective:
    return medusa_on(CausalLM(tiny_model("llama")), HeadsSection(num_heads=3))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_resuming_equals_never_having_stopped(tmp_path: Path, optimizer: str, stop_at: int) -> None:
    """The results are equal bit by bit, with dropout; new objects that start from other weights continue the stopped
    run.
    """
    whole, stopped = Recorder(), Recorder()
    straight = ToyObjective(dropout=0.3)
    progress = train_toy(tmp_path / "a", straight, whole, optimizer=optimizer)
    stopped.actions[stop_at] = interrupt
    with pytest.raises(Interrupted, match=f"stopped at step {stop_at} of 6; the state is saved"):
        train_toy(tmp_path / "b", ToyObjective(dropout=0.3), stopped, optimizer=optimizer, checkpoint_every=100)
    assert list(stopped.figures) == list(range(1, stop_at + 1))
    stopped.actions.clear()
    resumed = ToyObjective(dropout=0.3, seed=1)
    torch.rand(17)  # the random state differs, as in a new process
    assert train_toy(tmp_path / "b", resumed, stopped, optimizer=optimizer) == progress
    assert list(stopped.figures) == [1, 2, 3, 4, 5, 6] and stopped.figures == whole.figures
    assert equal(weights(resumed.module), weights(straight.module))


@pytest.mark.parametrize("make", [ToyObjective, medusa], ids=["toy", "medusa"])
def test_accumulating_one_by_one_equals_one_batch_of_eight(
    tmp_path: Path, make: Callable[[], ToyObjective | MedusaObjective]
) -> None:
    runs = {}
    for micro in (1, 2, 8):
        objective, recorder = make(), Recorder()
        train_toy(tmp_path / str(micro), objective, recorder, micro_batch_size=micro)
        runs[micro] = weights(objective.module), recorder.losses
    for micro in (1, 2):
        assert largest_difference(runs[micro][0], runs[8][0]) < 2e-6
        assert runs[micro][1] == pytest.approx(runs[8][1], rel=1e-5)


def descend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plain gradient descent, whose steps show the gradients."""

    def build(module: nn.Module, section: TrainingSection, prefixes: object) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([{"params": list(module.parameters()), PREFIX: ""}], lr=0.0)]

    monkeypatch.setattr("trainer.run.loop.build_optimizers", build)


UNEVEN = [
    Example((1, 2), (True, True), 0),
    Example(tuple(range(12)), (True,) * 12, 0),
    Example((7, 3, 9, 4), (False, False, False, True), 3),
    Example((5, 5, 5, 6, 6), (False, True, False, True, False), 0),
]


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_every_trained_token_of_a_batch_weighs_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int
) -> None:
    """The rows have 1, 11, 1 and 2 labels: the gradient is the gradient of the mean over all 15 labels, for any micro
    batches.
    """
    descend(monkeypatch)
    objective, recorder = ToyObjective(), Recorder()
    module, before = objective.module, weights(objective.module)
    losses = []
    for tokens, trained in ((each.tokens.tolist(), each.trained) for each in UNEVEN):
        logits = module.lm_head(module.middle(module.norm(module.embedding(torch.tensor(tokens[:-1])))))
        labelled = torch.from_numpy(trained[1:])
        losses.append(F.cross_entropy(logits[labelled], torch.tensor(tokens[1:])[labelled], reduction="none"))
    mean = torch.cat(losses).mean()
    assert len(torch.cat(losses)) == 15
    gradients = torch.autograd.grad(mean, list(module.parameters()))
    settings = {"steps": 1, "batch_size": 4, "micro_batch_size": micro, "learning_rate": 0.1, "max_grad_norm": 1e6}
    progress = train_toy(tmp_path, objective, recorder, UNEVEN, **settings)
    expected = [tensor - 0.1 * gradient for tensor, gradient in zip(before, gradients, strict=True)]
    assert largest_difference(weights(module), expected) < 1e-7
    assert recorder.losses[1] == pytest.approx(mean.item(), rel=1e-6) and progress == Progress(1, 15)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert recorder.figures[1]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_nan_loss_stops_the_run_names_the_step_and_is_not_applied(tmp_path: Path) -> None:
    objective, recorder = ToyObjective(), Recorder()
    after_step_3: list[list[Tensor]] = []

    def poison() -> None:
        after_step_3.append(weights(objective.module))
        objective.factor = torch.tensor(float("nan"))

    recorder.actions[3] = poison
    message = r"the loss is nan at step 4; the last good checkpoint, .*step-00000002, is kept. To resume, lower"
    with pytest.raises(ValueError, match=message):
        train_toy(tmp_path, objective, recorder)
    assert list(recorder.figures) == [1, 2, 3]
    assert equal(weights(objective.module), after_step_3[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


class _OfAnotherLibraryError(Exception):
    pass


def fail() -> None:
    raise _OfAnotherLibraryError


@pytest.mark.parametrize(
    ("at_step_3", "unwritten", "written", "error"),
    [
        (fail, "", "23", "^$"),
        (interrupt, "2", "3", "of step 2 could not"),
        (interrupt, "3", "2", "of step 3 could not"),
        (interrupt, "23", "", "of step 3 could not be written.* of step 2 could not"),
        (fail, "2", "3", "^$"),
        (fail, "3", "2", "of step 3 could not be written.*AnotherLibraryError"),
        (int, "6", "24", "of step 6 could not"),
    ],
)
def test_an_error_of_a_hook_or_a_write_ends_the_run_with_its_state_saved_and_is_not_lost(
    at_step_3: Any, unwritten: str, written: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, write = Recorder(), trainer.run.checkpoint.write_folder
    recorder.actions[3] = at_step_3

    def save(folder: Path, *args: Any, **named: Any) -> None:
        if folder.name[-1] in unwritten:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, *args, **named)

    monkeypatch.setattr(trainer.run.checkpoint, "write_folder", save)
    with pytest.raises((OSError, _OfAnotherLibraryError), match=error):
        train_toy(tmp_path, ToyObjective(), recorder)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == list(written)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, next_step_is_done = Recorder(), threading.Event()
    recorder.actions[3] = next_step_is_done.set

    def save(*args: Any, **named: Any) -> None:
        assert next_step_is_done.wait(10), "training waits for the disk"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.run.checkpoint, "write_folder", save)
    with pytest.raises(OSError, match="of step 2 could not be written"):
        train_toy(tmp_path, ToyObjective(), recorder)
    assert max(recorder.figures) in (3, 4, 5), "the run ends after the next step"


def test_weights_that_a_step_made_infinite_are_not_saved(tmp_path: Path) -> None:
    """The loss and the gradient of step 4 are finite, but its learning rate makes the weights infinite."""
    objective, recorder = ToyObjective(), Recorder()
    straight = ToyObjective()
    train_toy(tmp_path / "a", straight, checkpoint_every=1)
    recorder.actions[4] = lambda: objective.module.middle.weight.data.fill_(math.inf)
    with pytest.raises(ValueError) as error:
        train_toy(tmp_path / "b", objective, recorder, checkpoint_every=1)
    said = str(error.value)
    assert said.startswith("step 4 left weights or moments that are not finite (middle.weight); they are not saved, ")
    assert (
        f"the last good checkpoint, {tmp_path / 'b'}/step-00000003, is kept. To resume, lower training.learning_rate"
        in said
    )
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-00000002", "step-00000003"]
    again, resumed = ToyObjective(seed=1), Recorder()
    train_toy(tmp_path / "b", again, resumed, checkpoint_every=1)
    assert resumed.began_at == [3] and list(resumed.figures) == [4, 5, 6]
    assert equal(weights(again.module), weights(straight.module))


def test_an_infinite_gradient_of_a_finite_loss_stops_the_run_before_it_is_applied(tmp_path: Path) -> None:
    objective = ToyObjective()

    def steepen(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.inf)

    objective.module.middle.register_forward_hook(steepen)
    before = weights(objective.module)
    message = r"the gradient's norm is (inf|nan) at step 1; there is no earlier checkpoint\. To resume, lower"
    with pytest.raises(ValueError, match=message):
        train_toy(tmp_path, objective, checkpoint_every=1)
    assert equal(weights(objective.module), before) and not list(tmp_path.iterdir())


def test_the_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    section = TrainingSection(steps=10, learning_rate=1.0, warmup_fraction=0.2)
    rates = [learning_rate_at(step, section) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)  # halfway from step 2 to step 10
    assert rates[4] == pytest.approx(0.5 + 0.25 * math.sqrt(2))
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8))) and rates[9] > 0


def test_evaluations_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    """The last step is always saved; the caller evaluates the final weights."""
    recorder = Recorder()
    train_toy(tmp_path, ToyObjective(), recorder, steps=7, checkpoint_every=3, evaluate_every=2)
    assert recorder.evaluated == [2, 4, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


def test_what_is_frozen_is_neither_moved_nor_saved_and_need_not_be_there_to_resume(tmp_path: Path) -> None:
    objective = ToyObjective()
    objective.module.embedding.requires_grad_(False)
    before = objective.module.embedding.weight.clone()
    train_toy(tmp_path, objective, steps=2)
    assert torch.equal(objective.module.embedding.weight, before)
    stored = load_file(tmp_path / "step-00000002" / "weights.safetensors")
    assert stored.keys() == {"norm.weight", "norm.bias", "middle.weight", "middle.bias", "lm_head.weight"}
    other = ToyObjective(seed=1)
    other.module.embedding.requires_grad_(False)
    kept = other.module.embedding.weight.clone()
    train_toy(tmp_path, other, steps=2)
    assert torch.equal(other.module.embedding.weight, kept)
    assert torch.equal(other.module.middle.weight, objective.module.middle.weight)


def test_processes_that_read_other_rows_are_stopped_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(**origin: str) -> Any:
        return SimpleNamespace(origin={"output": "here", "training data": "3f", "held-out data": "12", **origin})

    def check_beside(first: Any) -> None:
        monkeypatch.setattr(train, "from_first", lambda work: bound(first.origin))
        _check_one_job(job())

    check_beside(job())
    check_beside(job(output="the same folder by another name"))
    for other in (job(**{"training data": "40"}), job(**{"held-out data": "13"})):
        with pytest.raises(ValueError, match="have read different recipes, rows or"):
            check_beside(other)


THREAD, WRITER = "micro batches", "checkpoint"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith((THREAD, WRITER))]


class AtOnce(nullcontext["AtOnce"]):
    """A pool without threads: work is done when its result is taken."""

    def __init__(self, workers: int, name: str) -> None:
        assert workers == 1 and name in (THREAD, WRITER)
        super().__init__(self)

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        result = cache(partial(work, *args))
        return SimpleNamespace(result=result, exception=lambda: result() and None, done=lambda: False)

    def shutdown(self, cancel_futures: bool) -> None:
        pass


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
    monkeypatch.setattr("trainer.run.loop.ThreadPoolExecutor", AtOnce)
    train_toy(tmp_path / "b", KINDS[kind](), stopped, micro_batch_size=2, steps=4)
    train_toy(tmp_path / "c", KINDS[kind](), at_once, micro_batch_size=2, steps=4)
    assert ahead.figures == at_once.figures == stopped.figures and len(ahead.figures) == 4


def test_a_checkpoint_holds_the_state_of_its_step_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, recorder, checkpoints = Recorder(), Recorder(), Checkpoints(tmp_path / "b", 9, {})
    stopped.actions[2] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "a", ToyObjective(), stopped)
    monkeypatch.setattr(tiny_training, "Checkpoints", lambda *args, **named: checkpoints)
    monkeypatch.setattr("trainer.run.loop.ThreadPoolExecutor", AtOnce)  # step 2 is written after step 4
    for step in range(7):
        best = Best(Progress(step, 0), 0.0, {"step": torch.tensor(step)})
        recorder.actions[step] = partial(setattr, checkpoints, "best", best)
    train_toy(tmp_path / "b", ToyObjective(), recorder)
    for name in ("weights", "optimizer"):
        at_once, late = (load_file(tmp_path / run / "step-00000002" / f"{name}.safetensors") for run in "ab")
        assert at_once.keys() == late.keys() and all(torch.equal(at_once[key], late[key]) for key in late)
    assert load_file(tmp_path / "b" / "step-00000002" / "best.safetensors")["step"] == 2


class Diary(ToyObjective):
    """Records which micro batch is prepared by which thread; in training it waits until the next one is prepared."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.prepared = [threading.Event() for _ in range(batches)]
        self.by: set[str] = set()
        self.trained = 0

    def prefetch(self, batch: Batch, step: int) -> None:
        self.by.add(threading.current_thread().name)
        next(event for event in self.prepared if not event.is_set()).set()

    def inputs(self, batch: Batch, step: int, prefetched: Any = None) -> tuple[Tensor, ...]:
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
