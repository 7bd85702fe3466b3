"""How fast a run's own steps, evaluations and forwards are on this machine, by doing a few."""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example, collate
from trainer.data.dataset import Dataset
from trainer.learning.objective import Objective
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run.assemble import Job, Target, feature_identity, source_of
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import build_accelerator
from trainer.run.heldout import Evaluator
from trainer.run.loop import Hooks, train
from trainer.run.state import gather_weights
from trainer.target.features import FeatureWriter
from trainer.target.store import Writer
from trainer.target.teacher_cache import TeacherWriter, teacher_identity
from trainer.terminal.console import standard_output


class Phase(NamedTuple):
    """Steps of a run that are of one kind: from step ``first`` (from 0), ``steps`` of them."""

    name: str
    first: int
    steps: int


@dataclass(frozen=True)
class Pace:
    """Seconds of a step in a phase: the median, the fastest and the slowest of those measured."""

    phase: Phase
    step: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Measured:
    """Seconds: of the steps, of an evaluation, of writing all features or the teacher cache (0: there are none).

    ``peak_bytes``: see `peak_memory`, after the steps.
    """

    paces: tuple[Pace, ...]
    evaluation: float
    writing: float
    peak_bytes: int


class _Enough(Exception):  # not an error
    """The steps wanted are done."""


class _BegunAt(Checkpoints):
    """In place of a run's checkpoints: steps begin with the one asked for, and nothing is kept."""

    def __init__(self, objective: Objective, step: int) -> None:
        self._saved = Saved(Progress(step, 0), gather_weights(objective.module), {}) if step else None

    def latest(self) -> Saved | None:
        return self._saved

    def save(self, saved: Saved) -> None:
        """A run that is stopped would be saved."""


def quiet() -> Console:
    """A console that nobody hears."""
    return standard_output(file=StringIO())


def phases_of(recipe: AnyRecipe) -> list[Phase]:
    """The kinds of steps in a run: adapters that join the heads later make two of it."""
    steps = recipe.training.steps
    alone = recipe.adapters.heads_first_steps if isinstance(recipe, MedusaRecipe) and recipe.adapters else 0
    if not 0 < alone < steps:
        return [Phase("a step", 0, steps)]
    return [Phase("a step of the heads alone", 0, alone), Phase("a step with the adapters", alone, steps - alone)]


def measure(job: Job, processes: int, steps: int, examples: Sequence[Example]) -> Measured:
    """Do ``steps`` steps of each phase after one to warm up, an evaluation of one prompt, and a forward.

    One process does its share of a batch, as each of ``processes`` would. ``examples`` are those to be written.
    The objective is trained by it: assemble another one to train.
    """
    paces = tuple(_pace(job, phase, processes, steps) for phase in phases_of(job.recipe))
    peak = peak_memory()
    return Measured(paces, _evaluation_seconds(job), _writing_seconds(job, examples) / processes, peak)


def _pace(job: Job, phase: Phase, processes: int, steps: int) -> Pace:
    """A phase too short for a step to warm up is measured with it."""
    section = job.recipe.training
    share = section.model_copy(update={"batch_size": section.batch_size // processes})
    its_own = replace(job, recipe=job.recipe.model_copy(update={"training": share}))
    stamps: list[float] = []
    wrote: list[float] = []

    def on_step(progress: Progress, figures: dict[str, float]) -> None:
        stamps.append(time.perf_counter())
        wrote.append(figures.get("generated/seconds", 0.0))
        if len(stamps) > min(steps + 1, phase.steps):
            raise _Enough

    accelerator = build_accelerator(section)
    begin = _BegunAt(job.objective, _first_step(job.recipe, phase))
    hooks = Hooks(on_step, lambda progress: False)
    stamps.append(time.perf_counter())
    with suppress(_Enough), tempfile.TemporaryDirectory() as folder:
        source = source_of(its_own, folder=Path(folder))
        train(job.objective, source, share, accelerator, begin, 1 << 30, 1 << 30, hooks)
    accelerator.free_memory()  # or this phase's optimizer would be there still during the next
    seconds = [after - start - writing for (start, after), writing in zip(pairwise(stamps), wrote, strict=True)]
    taken, writings = seconds[1:] or seconds, [writing for writing in wrote if writing]
    each = statistics.median(writings[1:] or writings or [0.0]) / _steps_written_for(job.recipe)
    return Pace(phase, statistics.median(taken) + each, min(taken) + each, max(taken) + each)


def _first_step(recipe: AnyRecipe, phase: Phase) -> int:
    """With texts to write, whose shares may change over the run: one in its middle at which some are written."""
    every = _steps_written_for(recipe)
    return phase.steps // 2 // every * every if isinstance(recipe, DraftRecipe) else phase.first


def _steps_written_for(recipe: AnyRecipe) -> int:
    """At a time."""
    return recipe.draft.policy.every if isinstance(recipe, DraftRecipe) else 1


def _evaluation_seconds(job: Job) -> float:
    """From one of its prompts."""
    if job.target is None or job.target.model is None:
        return 0.0
    section = job.recipe.evaluation
    one = section.model_copy(update={"prompts": 1})
    evaluator = Evaluator(job.target.model, job.tokenizer, job.heldout, one)
    start = time.perf_counter()
    evaluator.figures(job.objective)
    return (time.perf_counter() - start) * section.prompts


def _writing_seconds(job: Job, examples: Sequence[Example]) -> float:
    """From one micro batch."""
    writer = None if job.target is None else writer_of(job.recipe, job.target, job.tokenizer, job.dataset)
    if writer is None:
        return 0.0
    few = job.dataset.examples[: job.recipe.training.micro_batch_size]
    batch = collate(few, range(len(few)))
    start = time.perf_counter()
    for column in writer.compute_columns(batch).values():
        column.cpu()
    speed = sum(len(example.tokens) for example in few) / (time.perf_counter() - start)
    return sum(len(example.tokens) for example in examples) / speed


def writer_of(recipe: AnyRecipe, target: Target, tokenizer: PreTrainedTokenizerBase, dataset: Dataset) -> Writer | None:
    """Of the features or the teacher cache that a recipe learns from; None where it has neither."""
    if isinstance(recipe, MedusaRecipe) and recipe.features is not None:
        assert target.model is not None
        return FeatureWriter(target.model, feature_identity(target, tokenizer, dataset, recipe.features))
    if isinstance(recipe, DraftRecipe) and recipe.draft.teacher is not None:
        assert target.model is not None
        section, temperature = recipe.draft.teacher, recipe.draft.loss.temperature
        return TeacherWriter(target.model, teacher_identity(target, tokenizer, dataset, section, temperature))
    return None


def peak_memory() -> int:
    """The most bytes allocated on the GPU, or without one the most this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
