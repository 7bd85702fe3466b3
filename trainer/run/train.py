"""A whole run, from a recipe to a finished folder: assemble, train, evaluate, write."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from decoding.errors import UserError
from trainer.data.dataset import not_held_out
from trainer.files.lock import hold
from trainer.job import Job
from trainer.learning.spans import Stopwatch
from trainer.processes import Process, agreed, any_process, build_accelerator, describe, from_first, on_first
from trainer.recipe.reading import AnyRecipe
from trainer.run.assemble import assemble, check_folders
from trainer.run.checkpoint import Checkpoints, Progress, bound
from trainer.run.distributed import check_launch, whole_parameters
from trainer.run.finish import choose_tree, finish
from trainer.run.heldout import Watch, evaluator_at_end
from trainer.run.log import Log, installed_trackers, trackers_of
from trainer.run.loop import Hooks, train
from trainer.terminal.console import standard_error

CHECKPOINTS, FINAL = "checkpoints", "final"


def run_recipe(recipe: AnyRecipe, console: Console | None = None) -> Path:
    """Train a recipe to its end, resuming if it was stopped before; return the folder of the finished artefact."""
    console = console or standard_error()
    precision, trackers = recipe.training.mixed_precision, trackers_of(recipe.tracking) or None
    accelerator = build_accelerator(precision, log_with=trackers, project_dir=recipe.output)
    check_launch(accelerator, recipe.training)
    agreed(lambda: check_folders(recipe))
    with ExitStack() as held:
        on_first(lambda: held.enter_context(hold(Path(recipe.output))))
        _run(recipe, accelerator, Process(accelerator.process_index, accelerator.num_processes, console))
    accelerator.end_training()
    return Path(recipe.output) / FINAL


def _run(recipe: AnyRecipe, accelerator: Accelerator, process: Process) -> None:
    folder = Path(recipe.output) / CHECKPOINTS
    begun = from_first(lambda: any(folder.glob("step-*")))
    job = agreed(lambda: assemble(recipe, accelerator.device, process, begins=not begun))
    _check_one_job(job)
    made_by = {"recipe": job.recipe.model_dump(mode="json"), "launch": describe(accelerator)}
    identity = {**job.identity, "launch": made_by["launch"]}
    checkpoints = Checkpoints(folder, recipe.checkpoint.keep, identity, _settings(recipe, process.world), made_by)
    _announce(process, job)
    with ExitStack() as logging:
        log = agreed(lambda: logging.enter_context(Log(recipe, accelerator, process.console)))
        watch = Watch(job, log, checkpoints, accelerator)
        progress = _train(job, accelerator, log, watch, checkpoints, process)
        with whole_parameters(accelerator, job.objective.module):
            finished = watch.choose_weights(progress)
            _finish(job, accelerator, log, checkpoints, progress, finished)
        best = f", with the best weights (step {finished.step})" if finished.step < progress.step else ""
        process.say(f"finished: {Path(recipe.output) / FINAL}{best}")
        accelerator.wait_for_everyone()


def _check_one_job(job: Job) -> None:
    """Check that all processes have read the same rows and weights, each from its own disk or the hub."""
    mine = bound(job.identity)
    if any_process(from_first(lambda: mine) != mine):
        raise UserError(
            "the processes have read different recipes, rows or targets: give all machines the same files, and write "
            "hub names with a commit, ORG/NAME@COMMIT"
        )


def _train(
    job: Job, accelerator: Accelerator, log: Log, watch: Watch, checkpoints: Checkpoints, process: Process
) -> Progress:
    recipe = job.recipe
    with Stopwatch(accelerator.device) as stopwatch:

        def on_begin(progress: Progress) -> None:
            if progress.step == recipe.training.steps:
                checkpoints.check_finished()
            log.begun(progress, checkpoints)

        def on_step(progress: Progress, figures: dict[str, float]) -> None:
            log.step(progress, figures, stopwatch.step())

        def evaluate(progress: Progress) -> None:
            watch.evaluate(progress)
            stopwatch.restart()  # keeps the evaluation out of the next step's time

        hooks = Hooks(on_step, evaluate, on_begin)
        every, source = recipe.checkpoint.every, agreed(lambda: job.source(process))
        return train(
            job.objective, source, recipe.training, accelerator, checkpoints, every, recipe.evaluation.every, hooks
        )


def _finish(
    job: Job, accelerator: Accelerator, log: Log, checkpoints: Checkpoints, progress: Progress, finished: Progress
) -> None:
    """Write the artefact of the weights of step ``finished``, then evaluate them; every process takes part."""
    evaluator = agreed(lambda: evaluator_at_end(job, accelerator.device, accelerator))
    agreed(lambda: choose_tree(job, evaluator))
    destination, origin = Path(job.recipe.output) / FINAL, describe(accelerator)
    on_first(lambda: finish(job, destination, finished, checkpoints.stretches, origin))
    if evaluator is not None:
        evaluation = evaluator.evaluate(job.objective)
        on_first(lambda: log.evaluation(progress, evaluation, finished.step))


def _settings(recipe: AnyRecipe, num_processes: int) -> dict[str, Any]:
    """Return the settings that affect a step's figures but may change when a run resumes."""
    names = ("learning_rate", "mixed_precision", "micro_batch_size")
    return {**{name: getattr(recipe.training, name) for name in names}, "num_processes": num_processes}


def _announce(process: Process, job: Job) -> None:
    recipe = job.recipe
    for name in recipe.tracking or ():
        if name not in installed_trackers():
            process.say(f"{name} is not installed, so it gets no figures: pip install {name}")
    if job.heldout.sha256 == job.dataset.sha256:
        process.say(not_held_out("data.heldout", "data.train"))
    process.say(
        f"{recipe.name}: {recipe.kind} for {recipe.target}; {job.trained_numbers / 1e6:.2f}M parameters trained; "
        f"{job.dataset.describe()}; {recipe.training.steps} steps of {recipe.training.batch_size} sequences"
    )
