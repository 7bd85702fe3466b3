"""The end of a run: its finished artefact, with its provenance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from decoding.model.stored import check_finite
from trainer.files.folders import write_folder
from trainer.job import Job
from trainer.recipe.recipe import AnyRecipe
from trainer.run.checkpoint import Progress
from trainer.run.heldout import Evaluator
from trainer.run.provenance import provenance, write_provenance


def choose_tree(job: Job, evaluator: Evaluator | None) -> None:
    """Fit the tree of finished heads by other texts than are evaluated; a chain stays where there is no evaluator.

    Every process must call this, and gets the same tree.
    """
    job.objective.module.eval()  # the target may be part of it
    if evaluator is not None:
        job.choose_tree(evaluator.target, lambda: evaluator.greedy_texts(job.dataset))


def finish(
    job: Job,
    recipe: AnyRecipe,
    destination: Path,
    progress: Progress,
    stretches: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
) -> None:
    """Write the artefact with its provenance, whole or not at all.

    ``recipe``: the run's own; ``origin``: further entries of the provenance, such as the launch. ValueError if a weight
    is not finite in the dtype that is written.
    """
    stretches = [stretch for stretch in stretches if stretch["first_step"] < progress.step]
    made_from = provenance(
        _as_trained(recipe, stretches),
        (job.dataset, job.heldout),
        job.target.fingerprint if job.target else None,
        progress.step,
        progress.tokens,
        {**origin, "stretches": stretches},
    )

    def write(folder: Path) -> None:
        job.objective.save(folder)
        _check_weights(folder)
        write_provenance(folder, made_from)

    write_folder(destination, write)


def _check_weights(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                remedy = "lower training.learning_rate, or set dtype to one with a wider range, such as bf16"
                check_finite({name: stored.get_tensor(name)}, f"what was to be written as {path.name}", remedy)


def _as_trained(recipe: AnyRecipe, stretches: Sequence[Mapping[str, Any]]) -> AnyRecipe:
    """Return the recipe with the settings of its last stretch of steps; they may have been changed after that."""
    names = type(recipe.training).model_fields
    last = {name: value for name, value in stretches[-1].items() if name in names} if stretches else {}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=last)})
