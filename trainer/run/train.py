"""From a recipe to a finished folder: assemble, train, evaluate, write."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors import safe_open

from decoding.model.finite import check_finite
from trainer import quickstart
from trainer.files.folders import write_folder
from trainer.files.lock import hold
from trainer.job import Job, Kind, trained_numbers
from trainer.recipe.recipe import AnyRecipe
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.run.distributed import build_accelerator, describe, whole_parameters
from trainer.run.embedded import ensure_answered
from trainer.run.heldout import Evaluator, Watch, evaluator_at_end
from trainer.run.kinds import check_folders, kind_of
from trainer.run.log import Log
from trainer.run.loop import Hooks, on_main, train
from trainer.run.provenance import provenance, write_provenance
from trainer.run.tracking import address_of, is_installed, tracker_of
from trainer.terminal.console import say, standard_error
from trainer.terminal.place import Place

CHECKPOINTS, FINAL = "checkpoints", "final"


def run_recipe(recipe: AnyRecipe, console: Console | None = None) -> Path:
    """Train a recipe to its end, resuming if it was stopped before; returns the folder of the finished artefact.

    The embedded target is trained first, and writes its answers, where the recipe asks for them.
    """
    console, kind = console or standard_error(), kind_of(recipe)
    ensure_built(kind.target)
    ensure_answered(kind.recipe.data.train)
    check_folders(kind)
    accelerator = _accelerator(recipe)
    with _alone_in(Path(recipe.output), accelerator):
        _run(kind, accelerator, Place(accelerator.process_index, accelerator.num_processes, console))
    accelerator.end_training()
    return Path(recipe.output) / FINAL


@contextmanager
def _alone_in(output: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run's folder; where another run does, ValueError on every process."""
    with ExitStack() as held:
        on_main(accelerator, lambda: held.enter_context(hold(output)))
        yield


def _run(kind: Kind, accelerator: Accelerator, place: Place) -> None:
    recipe, output = kind.recipe, Path(kind.recipe.output)
    # A run that was begun may go on, however busy the machine is now.
    begun = any((output / CHECKPOINTS).glob("step-*"))
    job = kind.assemble(accelerator.device, place, check_costs=not begun)
    keep, settings = recipe.checkpoint.keep, _settings(recipe, place.world)
    checkpoints = Checkpoints(output / CHECKPOINTS, keep, job.identity, settings)
    _announce(place, kind, job)
    with Log(recipe, accelerator, place.console) as log:
        if (address := address_of(accelerator)) is not None:
            say(place.console, f"figures also go to {address}")
        watch = Watch(job, log, checkpoints)
        on_main(accelerator, watch.check)

        def on_begin(progress: Progress) -> None:
            log.begun(progress, checkpoints)
            watch.begun(progress)

        progress = train(
            job.objective,
            job.source(recipe.training, place),
            recipe.training,
            accelerator,
            checkpoints,
            recipe.checkpoint.every,
            recipe.evaluation.every,
            Hooks(log.step, watch.evaluate, on_begin),
        )

        def finish() -> None:
            finished = watch.choose_weights(progress)
            evaluator = evaluator_at_end(job, accelerator.device)
            _finish(job, evaluator, output / FINAL, finished, checkpoints, accelerator)
            if evaluator is not None:
                log.evaluation(progress, evaluator.evaluate(job.objective), finished.step)
                log.forecast()
            place.say(_end(recipe, progress, finished))

        with whole_parameters(accelerator, job.objective.module):
            on_main(accelerator, finish)
        accelerator.wait_for_everyone()


def _settings(recipe: AnyRecipe, num_processes: int) -> dict[str, Any]:
    """Return the settings that may change where a run goes on, and that change the figures of its steps."""
    names = ("learning_rate", "mixed_precision", "micro_batch_size")
    return {**{name: getattr(recipe.training, name) for name in names}, "num_processes": num_processes}


def _as_trained(recipe: AnyRecipe, stretches: Sequence[Mapping[str, Any]]) -> AnyRecipe:
    """Return the recipe with the settings of its last stretch of steps; they may have been changed after that."""
    names = type(recipe.training).model_fields
    last = {name: value for name, value in stretches[-1].items() if name in names} if stretches else {}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=last)})


def _end(recipe: AnyRecipe, progress: Progress, finished: Progress) -> str:
    """Return the run's last line: the folder, the weights chosen, and an early end."""
    steps, section = recipe.training.steps, recipe.evaluation
    line = f"finished: {Path(recipe.output) / FINAL}"
    if section.keep == "best":
        line += f", the weights of step {finished.step}, which were the best"
    if progress.step < steps:
        line += f"; ended at step {progress.step} of {steps}, after {section.patience} evaluations without a new best"
    return line


def _finish(
    job: Job,
    evaluator: Evaluator | None,
    destination: Path,
    progress: Progress,
    checkpoints: Checkpoints,
    accelerator: Accelerator,
) -> None:
    """Choose the heads' tree; write the artefact with its provenance, whole or not at all.

    ValueError if a weight is not finite in the dtype that is written.
    """
    objective = job.objective
    objective.module.eval()  # the target may be part of it
    if evaluator is not None:  # and by other texts than are evaluated
        job.choose_tree(evaluator.target, lambda: evaluator.greedy_texts(job.dataset))
    stretches = [stretch for stretch in checkpoints.stretches if stretch["first_step"] < progress.step]
    made_from = provenance(
        _as_trained(job.recipe, stretches),
        (job.dataset, job.heldout),
        job.target.fingerprint if job.target else None,
        progress.step,
        progress.tokens,
        {**describe(accelerator), "stretches": stretches},
    )

    def write(folder: Path) -> None:
        objective.save(folder)
        _check_weights(folder)
        write_provenance(folder, made_from)

    write_folder(destination, write)


def _check_weights(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                remedy = "lower training.learning_rate, or set dtype to one with a wider range, such as bf16"
                check_finite({name: stored.get_tensor(name)}, f"what was to be written as {path.name}", remedy)


def ensure_built(target: str | None) -> None:
    """Train the embedded default target if ``target`` names it and it is not there yet."""
    if target is None or target.partition("/")[0] != quickstart.NAME or quickstart.is_built():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the quickstart target is not built yet: train once with one process, which builds it first")
    console = standard_error()
    with hold(quickstart.folder().parent, lambda line: say(console, line)):
        if quickstart.is_built():  # by the run that was waited for
            return
        run_recipe(quickstart.recipe(), console)
    AcceleratorState._reset_state(True)  # what comes next in this process may want another precision


def _accelerator(recipe: AnyRecipe) -> Accelerator:
    return build_accelerator(recipe.training, log_with=tracker_of(recipe.tracking), project_dir=recipe.output)


def _announce(place: Place, kind: Kind, job: Job) -> None:
    recipe = job.recipe
    if recipe.tracking == "wandb" and not is_installed():
        place.say("wandb is not installed: figures go to metrics.jsonl alone")
    aim = f" for {kind.target}" if kind.target is not None else ""
    place.say(
        f"{recipe.name}: {recipe.kind}{aim}; {trained_numbers(job.objective) / 1e6:.2f}M parameters trained; "
        f"{job.dataset.describe()}; {recipe.training.steps} steps of {recipe.training.batch_size} sequences"
    )
