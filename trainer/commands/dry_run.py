"""`headstart train RECIPE --dry-run`: measures a few steps, predicts what the run needs, and writes an untrained
artefact.
"""

import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from decoding.errors import UserError
from trainer.commands.inspection import marked_text
from trainer.doctor.machine import size
from trainer.export.exporter import NO_PROMPTS, export
from trainer.export.task import DRAFT, DSPARK, EAGLE3, HEADS, kind_held_in
from trainer.learning.spans import StepTimes, Stopwatch
from trainer.processes import Process, agreed, build_accelerator, describe, on_first
from trainer.recipe.reading import AnyRecipe
from trainer.run.checkpoint import Best, Checkpoints, Progress, Saved
from trainer.run.distributed import check_launch
from trainer.run.heldout import evaluator_of
from trainer.run.job import Job, assemble
from trainer.run.loop import Hooks, train
from trainer.run.state import gather_weights
from trainer.run.train import check_folders, finish
from trainer.target.loading import Target
from trainer.terminal.console import say, standard_error, standard_output, title

STEPS = 4
"""Number of steps to run, including the first, which warms up and is not timed."""
FOLDER = "dry-run"
"""Folder of the untrained artefact in the run's output."""


class _Enough(BaseException):  # not a subclass of Exception, so the training loop saves nothing
    """An exception that ends the training once all wanted steps have run."""


class _BegunAt(Checkpoints):
    """A substitute for a run's checkpoints: training starts at ``step`` and writes no checkpoint."""

    def __init__(self, job: Job, step: int) -> None:
        super().__init__(Path(job.recipe.output), 1, {})
        self._saved = Saved(Progress(step, 0), gather_weights(job.objective.module), {}) if step else None

    def latest(self) -> Saved | None:
        return self._saved

    def steps(self) -> list[int]:
        return [self._saved.progress.step] if self._saved else []

    def read(self, step: int) -> Saved:
        assert self._saved is not None
        return self._saved

    def save(self, saved: Saved, best: Best | None = None) -> None:
        """Do nothing, because a dry run saves no state."""


class _Times(NamedTuple):
    """Durations in seconds: of one step, of the target's pass in this step, and of one phase in which training writes
    texts.
    """

    step: float
    target: float
    writing: float
    writings: int
    """Number of phases that write texts in the whole run."""


def dry_run(recipe: AnyRecipe, console: Console | None = None) -> None:
    """Print a row as training sees it, and the parameters, memory, disk space and time that a run needs; write an
    untrained artefact.

    The last steps of the recipe are measured, because they cost the most; they run on as many processes as the launcher
    started. Only the artefact remains on disk. Raises UserError for any recipe that training rejects.
    """
    console = console or standard_output()
    agreed(lambda: check_folders(recipe))
    accelerator = build_accelerator(recipe.training.mixed_precision)
    check_launch(accelerator, recipe.training)
    process = Process(accelerator.process_index, accelerator.num_processes, standard_error())
    with tempfile.TemporaryDirectory() as scratch:
        small = recipe.without_store().model_copy(update={"output": scratch})
        job = agreed(lambda: assemble(small, accelerator.device, process))
        parameters: Counter[str] = Counter()
        for name, parameter in job.objective.module.named_parameters():
            if parameter.requires_grad:
                parameters["adapters" if "lora_" in name else name.partition(".")[0]] += parameter.numel()
        on_first(lambda: _write_artefact(recipe, job, accelerator, Path(scratch), console))
        start, evaluator = time.perf_counter(), evaluator_of(job, accelerator)
        if evaluator is not None:
            evaluator.evaluate(job.objective)
        evaluation = time.perf_counter() - start
        table = _table(recipe, job, parameters, _times(job, accelerator, process), evaluation)
        if isinstance(job.target, Target) and (states := job.target.model.state_bytes()):
            table.add_row("memory", "recurrent states of one decoded text, stored twice", size(2 * states))
        table.add_row("memory", "peak of one process", _size(_peak_memory(accelerator)))
    if process.is_first:
        say(console, marked_text(job.dataset.examples[0], job.tokenizer, console.is_terminal and not console.no_color))
        console.print(table)


def _write_artefact(recipe: AnyRecipe, job: Job, accelerator: Accelerator, scratch: Path, console: Console) -> None:
    """Write the untrained artefact in a served format, and print the commands that load it."""
    made, folder = scratch / "final", Path(recipe.output) / FOLDER
    finish(job, made, Progress(0, 0), [], describe(accelerator))
    if (folder / "provenance.json").is_file():  # left by an earlier dry run
        shutil.rmtree(folder)
    format = {HEADS: "heads", DRAFT: "draft", DSPARK: "dspark", EAGLE3: "eagle3"}[kind_held_in(made)]
    try:
        say(console, str(export(made, folder, format, prompts=NO_PROMPTS)))
    except UserError as error:  # no served format can describe some drafts
        say(console, f"the untrained artefact was not written as {format}: {error}")


def _times(job: Job, accelerator: Accelerator, process: Process) -> _Times:
    """Run the last steps, starting at a step that writes texts if there is one; return the median durations."""
    section, source = job.recipe.training, job.source
    last = max(0, section.steps - STEPS)
    writing_steps = [step for step in range(section.steps) if source.writes_at(step)]
    begin = max((step for step in writing_steps if step <= last), default=0 if writing_steps else last)
    times: list[StepTimes] = []
    written: list[float] = []
    with Stopwatch(accelerator.device) as stopwatch, suppress(_Enough):

        def on_step(progress: Progress, figures: dict[str, float]) -> None:
            seconds, spent = figures.get("generated/seconds", 0.0), stopwatch.step()
            written.append(seconds)
            if spent is not None:
                times.append(spent._replace(seconds=spent.seconds - seconds))
            if len(written) == STEPS:
                raise _Enough

        hooks = Hooks(on_step, lambda progress: None)
        train(job.objective, source, section, accelerator, _BegunAt(job, begin), 1 << 30, 1 << 30, hooks)
    step, target = (
        statistics.median(seconds) if seconds else 0.0
        for seconds in ([one.seconds for one in times], [one.spans.get("target", 0.0) for one in times])
    )
    return _Times(step, target, max(written), len(writing_steps))


def _peak_memory(accelerator: Accelerator) -> int:
    """Return the largest peak memory of any process, in bytes: GPU memory if there is a GPU, and otherwise the memory
    of the whole process.
    """
    if accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(accelerator.gather(torch.tensor([peak], device=accelerator.device)).max())


def _size(count: int) -> str:
    return f"{count / 1e9:,.3f} GB"


def checkpoint_bytes(recipe: AnyRecipe, trained: int) -> int:
    """Return the size of a run's checkpoints on disk, in bytes. Each contains the weights, the optimizer's two moments
    and, if they are kept, the best weights.
    """
    return (recipe.checkpoint.keep + 1) * trained * (16 if recipe.evaluation.keep == "best" else 12)


def _table(recipe: AnyRecipe, job: Job, parameters: Mapping[str, int], times: _Times, evaluation: float) -> Table:
    section, examples, trained = recipe.training, job.dataset.examples, sum(parameters.values())
    sequences, tokens = section.steps * section.batch_size, sum(int(example.trained.sum()) for example in examples)
    share = sequences / len(examples)
    evaluations = (section.steps - 1) // recipe.evaluation.every + 1 if job.target and recipe.evaluation.prompts else 0
    seconds = {"a step": (times.step, section.steps), "writing texts": (times.writing, times.writings)}
    if recipe.store is not None:  # in the real run the target runs only once per sequence, unlike in the measured steps
        seconds["a step"] = times.step - times.target, section.steps
        seconds[f"writing {recipe.store[1]}"] = times.target * len(examples) / section.batch_size, 1
    seconds["an evaluation (untrained weights)"] = evaluation, evaluations
    output = Path(recipe.output).absolute()
    free = shutil.disk_usage(next(path for path in (output, *output.parents) if path.exists())).free
    rows = [("trained parameters", part, f"{count:,}") for part, count in parameters.items()]
    many = f"{section.steps:,} x {section.batch_size} = {sequences:,}, which is {share:.2f} times all rows"
    rows += [("data", "sequences", many), ("data", "tokens trained", f"about {share * tokens:,.0f}")]
    best = ", and the best weights of each" * (recipe.evaluation.keep == "best")
    name = f"{recipe.checkpoint.keep + 1} checkpoints, one of them in progress{best}"
    rows.append(("disk", name, _size(checkpoint_bytes(recipe, trained))))
    rows.append(("disk", "free now", _size(free)))
    rows += [("time", part, f"{duration:.2f} s x {count:,}") for part, (duration, count) in seconds.items() if count]
    rows.append(("time", "total", f"{sum(duration * count for duration, count in seconds.values()) / 3600:.2f} h"))
    table = Table("what", "part", "amount", title=title(f"{recipe.name}: requirements"))
    for row in rows:
        table.add_row(*row)
    return table
