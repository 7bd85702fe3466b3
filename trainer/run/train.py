"""Runs a recipe to the finished folder, and makes the artefact of a checkpoint.

A checkpoint's tensors are whole under any launcher (see `state`), so a single process can write its artefact. The
result is the same as if the run had ended at this step.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors import safe_open

from decoding.errors import UserError
from decoding.files.folder import quantisation
from decoding.files.gguf_file import source_of
from decoding.files.hub import hub_name, local_folder, revisions
from decoding.files.stored import check_finite
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.redact import hub_repository
from trainer.data.answers import described_prompts
from trainer.data.dataset import Dataset, not_held_out
from trainer.files.folders import check_can_be_folder, hold, write_folder
from trainer.learning.spans import Stopwatch
from trainer.processes import Process, agreed, any_process, build_accelerator, describe, from_first, on_first
from trainer.recipe.common import DataSection
from trainer.recipe.reading import AnyRecipe, parse_recipe
from trainer.run.checkpoint import Checkpoints, Progress, bound, compare, read_apart
from trainer.run.distributed import check_launch, whole_parameters
from trainer.run.heldout import Evaluator, Watch, evaluator_at_end
from trainer.run.job import Job, assemble
from trainer.run.log import Log, installed_trackers, trackers_of
from trainer.run.loop import Hooks, train
from trainer.run.state import load_weights
from trainer.terminal.console import standard_error


def check_folders(recipe: AnyRecipe) -> None:
    """Raise UserError if a file is in the way of a folder that the recipe writes."""
    output = Path(recipe.output)
    for key, folder in (("output", output), ("the folder of the finished run", output / "final")):
        check_can_be_folder(folder, key)
    if recipe.store is not None:
        key, name = recipe.store
        check_can_be_folder(Path(name), key)


FILE_NAME = "provenance.json"
_STORED = ("features", "draft.teacher")
"""Keys of a job's origin about stored features or logits, which finished weights no longer need."""


def choose_tree(job: Job, evaluator: Evaluator | None) -> None:
    """Fit the tree of finished heads on training prompts; without an evaluator keep a chain.

    Every process must call this, and the tree is the same on all processes.
    """
    job.objective.module.eval()  # the module may contain the target, which decodes in evaluation mode
    if evaluator is not None:
        job.objective.choose_tree(evaluator.target, lambda: evaluator.greedy_texts(job.dataset))


def finish(
    job: Job, destination: Path, progress: Progress, stretches: Sequence[Mapping[str, Any]], launch: Mapping[str, Any]
) -> None:
    """Write the artefact with its provenance, whole or not at all.

    ``launch``: further entries of the provenance. The recipe in the provenance has the settings of the last trained
    steps, because settings may have changed since then. Raises UserError if a weight is not finite in the dtype in
    which it is written.
    """
    stretches = [stretch for stretch in stretches if stretch["first_step"] < progress.step]
    training = job.recipe.training
    last = {name: value for name, value in stretches[-1].items() if hasattr(training, name)} if stretches else {}
    recipe = job.recipe.model_copy(update={"training": training.model_copy(update=last)})
    made_from = _provenance(recipe, job, progress, {**launch, "stretches": stretches})

    def write(folder: Path) -> None:
        job.objective.save(folder)
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # not a mapping
                    remedy = "lower training.learning_rate, or set dtype to a type with a wider range, such as bf16"
                    check_finite({name: stored.get_tensor(name)}, f"the new {path.name}", remedy)
        (folder / FILE_NAME).write_text(json.dumps(made_from, indent=2) + "\n")

    write_folder(destination, write)


def consolidate(checkpoint: Path, destination: Path, trust_remote_code: bool = False) -> str:
    """Write the artefact of a checkpoint with its provenance; return a sentence that names the checkpoint's step.

    Reads the recipe's target and data again. Code of models runs only with ``trust_remote_code``, whatever the stored
    recipe says. Raises UserError if the target or the data have changed since training, or if the checkpoint is damaged
    or lacks its recipe.
    """
    state, saved = read_apart(checkpoint)
    recipe = parse_recipe(state["recipe"], f"{checkpoint.name}/state.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stored = recipe.without_store().model_copy(update={"trust_remote_code": trust_remote_code})
    job = assemble(stored, device, Process())
    refused = compare(state["identity"], json.loads(json.dumps(dict(job.origin)))).refused
    if changed := [str(change) for change in refused if not change.name.startswith(_STORED)]:
        raise UserError(f"since {checkpoint} was written, its {', '.join(changed)} changed: restore the original")
    load_weights(job.objective.module, saved.weights)
    choose_tree(job, evaluator_at_end(job, device))
    launch = {**state["launch"], "checkpoint": checkpoint.name}
    finish(replace(job, recipe=recipe), destination, saved.progress, state["stretches"], launch)
    done, steps = saved.progress.step, recipe.training.steps
    return f"made from the checkpoint {checkpoint}: weights after step {done} of {steps}, not the finished weights"


def _provenance(recipe: AnyRecipe, job: Job, progress: Progress, launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance as plain JSON values. The provenance contains no secrets, because a recipe has none."""
    content = recipe.model_dump(mode="json")
    heads, draft = content.get("heads") or {}, (content.get("draft") or {}).get("init") or {}
    models = {
        "target": recipe.target,
        "heads.init": heads.get("init"),
        "draft.init.from_model": draft.get("from_model"),
    }
    name = recipe.target
    if Path(name).exists():
        name = str(Path(name).resolve())  # an absolute path is not mistaken for a Hub id
    elif (named := hub_name(name)) is not None:
        name = str(named._replace(revision=None))  # its commit is in the revisions
    folder = local_folder(recipe.target, weights=False)
    known = {"name": name, "fingerprint": job.target.fingerprint, **(source_of(folder) or {})}
    if (method := quantisation(folder)) is not None:
        known["quantisation"] = method
    return {
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "recipe": content,
        "data": {dataset.path: _about(dataset, recipe.data) for dataset in (job.dataset, job.heldout)},
        "target": known,
        "revisions": revisions(models),
        "steps": progress.step,
        "tokens": progress.tokens,
        **launch,
    }


def _about(dataset: Dataset, section: DataSection) -> dict[str, Any]:
    """Describe a data set: digest, rows, commit, the prompts to which its answers belong, source and licence (null if
    they are unknown). The source of a hub data set is the id without revision and configuration.
    """
    hub_id = None if Path(dataset.path).exists() else hub_repository(dataset.path)
    return {
        "sha256": dataset.sha256,
        "rows": dataset.account.num_rows,
        "commit": dataset.commit,
        "source": section.source if hub_id is None else hub_id,
        "prompts": described_prompts(Path(dataset.path)),
        "license": section.license,
    }


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
    # These settings affect a step's figures, but they may change when a run resumes.
    names = ("learning_rate", "mixed_precision", "micro_batch_size")
    settings = {**{name: getattr(recipe.training, name) for name in names}, "num_processes": process.world}
    origin = {**job.origin, "launch": made_by["launch"]}
    checkpoints = Checkpoints(folder, recipe.checkpoint.keep, origin, settings, made_by)
    _announce(process, job)
    with ExitStack() as logging:
        log = agreed(lambda: logging.enter_context(Log(recipe, accelerator, process.console)))
        watch = Watch(job, log, checkpoints, accelerator)
        progress = _train(job, accelerator, log, watch, checkpoints)
        with whole_parameters(accelerator, job.objective.module):
            finished = watch.choose_weights(progress)
            _finish(job, accelerator, log, checkpoints, progress, finished)
        best = f", with the best weights (step {finished.step})" if finished.step < progress.step else ""
        process.say(f"finished: {Path(recipe.output) / FINAL}{best}")
        accelerator.wait_for_everyone()


def _check_one_job(job: Job) -> None:
    """Check that all processes have read the same rows and weights, because each reads from its own disk or the hub."""
    mine = bound(job.origin)
    if any_process(from_first(lambda: mine) != mine):
        raise UserError(
            "the processes have read different recipes, rows or targets: give all machines the same files, and write "
            "hub names with a commit, ORG/NAME@COMMIT"
        )


def _train(job: Job, accelerator: Accelerator, log: Log, watch: Watch, checkpoints: Checkpoints) -> Progress:
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
            stopwatch.restart()  # the time of the next step must not include the evaluation

        hooks = Hooks(on_step, evaluate, on_begin)
        training, every = recipe.training, recipe.checkpoint.every
        return train(
            job.objective, job.source, training, accelerator, checkpoints, every, recipe.evaluation.every, hooks
        )


def _finish(
    job: Job, accelerator: Accelerator, log: Log, checkpoints: Checkpoints, progress: Progress, finished: Progress
) -> None:
    """Write the artefact with the weights of step ``finished``, then evaluate them; every process takes part."""
    evaluator = agreed(lambda: evaluator_at_end(job, accelerator.device, accelerator))
    agreed(lambda: choose_tree(job, evaluator))
    destination, launch = Path(job.recipe.output) / FINAL, describe(accelerator)
    on_first(lambda: finish(job, destination, finished, checkpoints.stretches, launch))
    if evaluator is not None:
        evaluation = evaluator.evaluate(job.objective)
        on_first(lambda: log.evaluation(progress, evaluation, finished.step))


def _announce(process: Process, job: Job) -> None:
    recipe = job.recipe
    for name in recipe.tracking or ():
        if name not in installed_trackers():
            process.say(f"{name} is not installed, so it gets no figures: pip install {name}")
    if job.heldout.sha256 == job.dataset.sha256:
        process.say(not_held_out("data.heldout", "data.train"))
    process.say(
        f"{recipe.name}: {recipe.kind} for {recipe.target}; {job.trained_numbers / 1e6:.2f}M trained parameters; "
        f"{job.dataset.describe()}; {recipe.training.steps} steps of {recipe.training.batch_size} sequences"
    )
