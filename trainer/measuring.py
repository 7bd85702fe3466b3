"""How fast a run's own steps, evaluations and forwards are on this machine, by doing a few."""

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

from trainer.assemble import Job
from trainer.batch import Example, collate
from trainer.checkpoint import Checkpoints, Progress
from trainer.distributed import build_accelerator
from trainer.hidden import OnlineTarget
from trainer.loop import Hooks, train
from trainer.recipe import MedusaRecipe
from trainer.train import Evaluator


@dataclass(frozen=True)
class Measured:
    """Seconds: the median, the fastest and the slowest step, an evaluation, writing all features (0: there are none).

    ``peak_bytes``: see `peak_memory`, after the steps.
    """

    step: float
    fastest: float
    slowest: float
    evaluation: float
    features: float
    peak_bytes: int


class _Enough(Exception):  # not an error
    """The steps wanted are done."""


def quiet() -> Console:
    """A console that nobody hears."""
    return Console(file=StringIO())


def measure(job: Job, processes: int, steps: int, examples: Sequence[Example]) -> Measured:
    """Do ``steps`` steps after one to warm up, an evaluation of one prompt, and a forward.

    One process does its share of a batch, as each of ``processes`` would. ``examples`` are those to write features of.
    The objective is trained by it: assemble another one to train.
    """
    section = job.recipe.training
    share = section.model_copy(update={"batch_size": max(section.micro_batch_size, section.batch_size // processes)})
    stamps: list[float] = []

    def on_step(progress: Progress, figures: dict[str, float]) -> None:
        stamps.append(time.perf_counter())
        if len(stamps) > steps:
            raise _Enough

    accelerator = build_accelerator(section)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(Path(scratch), 1, {})
        hooks = Hooks(on_step, lambda progress: None)
        endless = share.model_copy(update={"steps": max(share.steps, steps + 2)})
        with suppress(_Enough):
            train(job.objective, job.dataset.examples, endless, accelerator, checkpoints, 1 << 30, 1 << 30, hooks)
    peak = peak_memory()
    taken = [after - start for start, after in pairwise(stamps)]
    return Measured(
        statistics.median(taken),
        min(taken),
        max(taken),
        _evaluation_seconds(job),
        _feature_seconds(job, examples) / processes,
        peak,
    )


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


def _feature_seconds(job: Job, examples: Sequence[Example]) -> float:
    """From one micro batch."""
    recipe = job.recipe
    if not isinstance(recipe, MedusaRecipe) or recipe.features is None:
        return 0.0
    assert job.target is not None and job.target.model is not None
    few = job.dataset.examples[: recipe.training.micro_batch_size]
    batch = collate(few, range(len(few))).to(job.target.model.device)
    start = time.perf_counter()
    OnlineTarget(job.target.model).hidden(batch).cpu()
    speed = sum(len(example.tokens) for example in few) / (time.perf_counter() - start)
    return sum(len(example.tokens) for example in examples) / speed


def peak_memory() -> int:
    """The most bytes allocated on the GPU, or without one the most this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
