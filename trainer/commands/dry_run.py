"""`headstart train RECIPE --dry-run`: what a run will take, by a few of its steps; and an untrained artefact."""

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

from trainer.commands.inspection import marked_text
from trainer.export.exporter import NO_PROMPTS, export
from trainer.files.folders import check_can_be_folder
from trainer.job import Job
from trainer.learning.spans import StepTimes, Stopwatch
from trainer.processes import Process, agreed, build_accelerator, describe, on_first
from trainer.recipe.reading import AnyRecipe
from trainer.run.assemble import assemble, check_folders
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.finish import finish
from trainer.run.heldout import evaluator_of
from trainer.run.loop import Hooks, train
from trainer.run.state import gather_weights
from trainer.run.train import ensure_answered, ensure_built
from trainer.terminal.console import say, standard_error, standard_output, title

STEPS = 4
"""Steps that are done; the first one warms up and is not counted."""
FOLDER = "dry-run"
"""The folder of the untrained artefact, in the run's output."""


class _Enough(Exception):  # not an error
    """The steps wanted are done."""


class _BegunAt(Checkpoints):
    """A stand-in for a run's checkpoints: steps begin at ``step``, and no checkpoint is written."""

    def __init__(self, job: Job, step: int) -> None:
        self._saved = Saved(Progress(step, 0), gather_weights(job.objective.module), {}) if step else None

    def latest(self) -> Saved | None:
        return self._saved

    def steps(self) -> list[int]:
        return [self._saved.progress.step] if self._saved else []

    def read(self, step: int) -> Saved:
        assert self._saved is not None
        return self._saved

    def save(self, saved: Saved) -> None:
        """Drop the state that a stopped run would save."""


class _Times(NamedTuple):
    """Seconds of one step, of the target's forward in it, and of one writing of texts during the training."""

    step: float
    target: float
    writing: float
    writings: int
    """How often texts are written in the whole run."""


def dry_run(recipe: AnyRecipe, console: Console | None = None) -> Table:
    """Print a row as trained, and the parameters, memory, disk and time of a run; write an untrained artefact.

    The last steps of the recipe are measured, which cost the most, under the launcher that runs this program. Nothing
    else is left on the disk. ValueError for what training refuses.
    """
    console = console or standard_output()
    ensure_built(recipe.target_name)
    ensure_answered(recipe.data.train)
    agreed(lambda: check_folders(recipe))
    agreed(lambda: check_can_be_folder(Path(recipe.output) / FOLDER, FOLDER))
    accelerator = build_accelerator(recipe.training.mixed_precision)
    process = Process(accelerator.process_index, accelerator.num_processes, standard_error())
    with tempfile.TemporaryDirectory() as scratch:
        small = recipe.without_store().model_copy(update={"output": scratch})
        job = agreed(lambda: assemble(small, accelerator.device, process))
        parameters: Counter[str] = Counter()
        for name, parameter in job.objective.module.named_parameters():
            if parameter.requires_grad:
                parameters["adapters" if "lora_" in name else name.partition(".")[0]] += parameter.numel()
        disk = _disk(recipe, job, sum(parameters.values()))
        on_first(lambda: disk.update(_artefact(recipe, job, accelerator, Path(scratch))))
        seconds_of_evaluation = _evaluation_seconds(job, accelerator)
        times = _step_times(job, accelerator, process)
        table = _table(recipe, job, parameters, disk, times, seconds_of_evaluation, _peak_memory(accelerator))
    if process.is_first:
        example = job.dataset.examples[0]
        say(console, marked_text(example, job.tokenizer, console.is_terminal and not console.no_color))
        console.print(table)
    return table


def _artefact(recipe: AnyRecipe, job: Job, accelerator: Accelerator, scratch: Path) -> dict[str, int]:
    """Write the untrained artefact in the format that servers load, else in our own; return its bytes."""
    made, folder = scratch / "final", Path(recipe.output) / FOLDER
    finish(job, made, Progress(0, 0), [], describe(accelerator))
    written = made
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier dry run
    for format in ("vllm", "headstart") if recipe.kind == "medusa" else ("draft",) if recipe.kind == "draft" else ():
        with suppress(ValueError):  # not every head fits a server
            written = export(made, folder, format, prompts=NO_PROMPTS).folder
            break
    return {"the finished artefact": sum(path.stat().st_size for path in written.rglob("*") if path.is_file())}


def _disk(recipe: AnyRecipe, job: Job, trained: int) -> dict[str, int]:
    """Return the bytes of all else that a run writes: AdamW keeps two moments of each parameter, Muon at least one."""
    keep, checkpoint = recipe.checkpoint.keep + 1, 12 * trained
    disk = {f"checkpoints, {keep - 1} and one being written": keep * checkpoint}
    if recipe.evaluation.keep == "best":
        disk[f"the best weights, {keep} times"] = keep * 4 * trained
    return disk


def _evaluation_seconds(job: Job, accelerator: Accelerator) -> float:
    """Return the seconds of one evaluation of the untrained weights; trained ones take fewer."""
    evaluator = evaluator_of(job, accelerator)
    start = time.perf_counter()
    if evaluator is not None:
        evaluator.evaluate(job.objective)
    return time.perf_counter() - start


def _step_times(job: Job, accelerator: Accelerator, process: Process) -> _Times:
    """Do the last steps of the run, from where texts are written if any are; return the medians."""
    section, source = job.recipe.training, agreed(lambda: job.source(process))
    last = max(0, section.steps - STEPS)
    writing_steps = [step for step in range(section.steps) if source.writes_at(step)]
    begin = max((step for step in writing_steps if step <= last), default=0 if writing_steps else last)
    times: list[StepTimes] = []
    written: list[float] = []
    with Stopwatch(accelerator.device) as stopwatch, suppress(_Enough):

        def on_step(progress: Progress, figures: dict[str, float]) -> None:
            seconds, found = figures.get("generated/seconds", 0.0), stopwatch.step()
            written.append(seconds)
            if found is not None:
                times.append(found._replace(seconds=found.seconds - seconds))
            if len(written) == STEPS:
                raise _Enough

        hooks = Hooks(on_step, lambda progress: None)
        train(job.objective, source, section, accelerator, _BegunAt(job, begin), 1 << 30, 1 << 30, hooks)
    step = statistics.median(each.seconds for each in times) if times else 0.0
    target = statistics.median(each.spans.get("target", 0.0) for each in times) if times else 0.0
    return _Times(step, target, max(written), len(writing_steps))


def _peak_memory(accelerator: Accelerator) -> int:
    """Return the most bytes that one process of the run has held: on its GPU, else as a program."""
    if accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(accelerator.gather(torch.tensor([peak], device=accelerator.device)).max())


def _table(
    recipe: AnyRecipe,
    job: Job,
    parameters: Mapping[str, int],
    disk: Mapping[str, int],
    times: _Times,
    evaluation: float,
    peak: int,
) -> Table:
    section, examples = recipe.training, job.dataset.examples
    sequences = section.steps * section.batch_size
    share, trained = sequences / len(examples), sum(int(example.trained.sum()) for example in examples)
    evaluations = 0
    if job.target is not None and recipe.evaluation.prompts:
        evaluations = (section.steps - 1) // recipe.evaluation.every + 1
    seconds, stored = {"a step": (times.step, section.steps)}, 0.0
    if recipe.store is not None:  # the target ran in the measured steps, and will run once for each sequence
        stored = times.target * len(examples) / section.batch_size
        seconds = {"a step": (times.step - times.target, section.steps), f"writing {recipe.store[1]}": (stored, 1)}
    seconds["writing texts"] = times.writing, times.writings
    seconds["an evaluation, of untrained weights"] = evaluation, evaluations
    hours = sum(each * count for each, count in seconds.values()) / 3600
    output = Path(recipe.output).absolute()
    free = shutil.disk_usage(next(path for path in (output, *output.parents) if path.exists())).free
    table = Table("what", "part", "amount", title=title(f"{recipe.name}: what it will take"))
    parts = {
        "trained parameters": {part: f"{count:,}" for part, count in parameters.items()},
        "data": {
            "sequences": f"{section.steps:,} x {section.batch_size} = {sequences:,}, {share:.2f} times all rows",
            "tokens trained": f"about {share * trained:,.0f}",
        },
        "memory of one process": {"most that was held": f"{peak / 1e9:,.3f} GB"},
        "disk": {part: f"{size / 1e9:,.3f} GB" for part, size in {**disk, "free now": free}.items()},
        "time, by what was measured": {
            part: f"{each:.2f} s x {count:,}" for part, (each, count) in seconds.items() if count
        },
        "time": {"together": f"{hours:.2f} h"},
    }
    for what, amounts in parts.items():
        for part, amount in amounts.items():
            table.add_row(what, part, amount)
            what = ""
        table.add_section()
    return table
