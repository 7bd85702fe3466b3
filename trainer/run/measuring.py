"""Timing of a run's own steps, evaluations and forwards on this machine, by a few of each."""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console

from trainer.data.batch import Example, collate
from trainer.job import Job, Kind, Phase
from trainer.learning.objective import Objective
from trainer.processes import ALONE
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import build_accelerator
from trainer.run.heldout import Evaluator
from trainer.run.loop import Hooks, train
from trainer.run.state import gather_weights
from trainer.target.loading import Target
from trainer.terminal.console import standard_output


@dataclass(frozen=True)
class Pace:
    """Seconds of a step in a phase: the median, the fastest and the slowest of those measured."""

    phase: Phase
    step: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps, of an evaluation, and of writing all features or the teacher cache (0 without either).

    ``peak_bytes``: see `peak_memory`, after the steps.
    """

    paces: tuple[Pace, ...]
    evaluation: float
    writing: float
    peak_bytes: int


class _Enough(Exception):  # not an error
    """The steps wanted are done."""


class _BegunAt(Checkpoints):
    """A stand-in for a run's checkpoints: steps begin at ``step``, and no checkpoint is written."""

    def __init__(self, objective: Objective, step: int) -> None:
        self._saved = Saved(Progress(step, 0), gather_weights(objective.module), {}) if step else None

    def latest(self) -> Saved | None:
        return self._saved

    def save(self, saved: Saved) -> None:
        """Drop the state that a stopped run would save."""


def quiet() -> Console:
    """Return a console whose text is dropped."""
    return standard_output(file=StringIO())


def measure(kind: Kind, job: Job, processes: int, steps: int, examples: Sequence[Example]) -> Measured:
    """Do ``steps`` steps of each phase after one to warm up, one batch of an evaluation, and a forward.

    One process does its share of a batch, as each of ``processes`` would. ``examples`` are those to be written.
    The measurement trains the objective: assemble another job to train.
    """
    paces = tuple(_pace(kind, job, phase, processes, steps) for phase in kind.phases())
    peak = peak_memory()
    return Measured(paces, _evaluation_seconds(job, processes), _writing_seconds(job, examples) / processes, peak)


def _pace(kind: Kind, job: Job, phase: Phase, processes: int, steps: int) -> Pace:
    """Time a phase's steps, the first one left out as a warm-up unless it is the only one."""
    section = job.recipe.training
    share = section.model_copy(update={"batch_size": section.batch_size // processes})
    stamps: list[float] = []
    wrote: list[float] = []

    def on_step(progress: Progress, figures: dict[str, float]) -> None:
        stamps.append(time.perf_counter())
        wrote.append(figures.get("generated/seconds", 0.0))
        if len(stamps) > min(steps + 1, phase.steps):
            raise _Enough

    accelerator = build_accelerator(section)
    begin = _BegunAt(job.objective, kind.measured_from(phase))
    hooks = Hooks(on_step, lambda progress: False)
    stamps.append(time.perf_counter())
    with suppress(_Enough), tempfile.TemporaryDirectory() as folder:
        source = job.source(share, ALONE, Path(folder))
        train(job.objective, source, share, accelerator, begin, 1 << 30, 1 << 30, hooks)
    accelerator.free_memory()  # or this phase's optimizer would be there still during the next
    seconds = [after - start - writing for (start, after), writing in zip(pairwise(stamps), wrote, strict=True)]
    taken, writings = seconds[1:] or seconds, [writing for writing in wrote if writing]
    each = statistics.median(writings[1:] or writings or [0.0]) / kind.steps_per_writing
    return Pace(phase, statistics.median(taken) + each, min(taken) + each, max(taken) + each)


def _evaluation_seconds(job: Job, processes: int) -> float:
    """Return the seconds of a whole evaluation, by one of its batches; 0 where no target is loaded to evaluate with."""
    section = job.recipe.evaluation
    if not isinstance(job.target, Target) or not section.prompts:
        return 0.0
    batches = -(-section.prompts // section.batch_size)
    one = section.model_copy(update={"prompts": -(-section.prompts // batches)})
    evaluator = Evaluator(job.target.model, job.tokenizer, job.heldout, one)
    start = time.perf_counter()
    evaluator.evaluate(job.objective)
    return (time.perf_counter() - start) * -(-batches // processes)


def _writing_seconds(job: Job, examples: Sequence[Example]) -> float:
    """Return the seconds of writing features or a teacher cache of these examples, by one micro batch; else 0."""
    writer = job.writer(job.dataset.examples)
    if writer is None:
        return 0.0
    few = job.dataset.examples[: job.recipe.training.micro_batch_size]
    batch = collate(few, range(len(few)))
    start = time.perf_counter()
    for column in writer.compute_columns(batch).values():
        column.cpu()
    speed = sum(len(example.tokens) for example in few) / (time.perf_counter() - start)
    return sum(len(example.tokens) for example in examples) / speed


def peak_memory() -> int:
    """Return the most bytes allocated on the GPU, or without one the most this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
