"""Artefacts with provenance, written from a finished run or from a checkpoint.

A checkpoint's tensors are whole under any launcher (see `state`), so a single process can write its artefact. The
result is the same as if the run had ended at that step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open

from decoding.errors import UserError
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.redact import hub_repository
from decoding.model.folder import quantisation
from decoding.model.gguf_file import source_of
from decoding.model.hub import hub_name, local_folder, revisions
from decoding.model.stored import check_finite
from trainer.data.answers import described_prompts
from trainer.data.dataset import Dataset
from trainer.files.folders import write_folder
from trainer.job import Job
from trainer.processes import Process
from trainer.recipe.common import DataSection
from trainer.recipe.reading import AnyRecipe, parse_recipe
from trainer.run.assemble import assemble
from trainer.run.checkpoint import Progress, compare, identity_in, read_apart
from trainer.run.heldout import Evaluator, evaluator_at_end
from trainer.run.state import load_weights
from trainer.terminal.console import standard_error

FILE_NAME = "provenance.json"
_STORED = ("features", "draft.teacher")
"""Keys of a job's identity about stored features or logits: finished weights no longer need them."""


def choose_tree(job: Job, evaluator: Evaluator | None) -> None:
    """Fit the tree of finished heads on training prompts; without an evaluator keep a chain.

    Every process must call this and gets the same tree.
    """
    job.objective.module.eval()  # the module may contain the target
    if evaluator is not None:
        job.objective.choose_tree(evaluator.target, lambda: evaluator.greedy_texts(job.dataset))


def finish(
    job: Job, destination: Path, progress: Progress, stretches: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]
) -> None:
    """Write the artefact with its provenance, whole or not at all.

    ``origin`` adds entries to the provenance, such as the launch. Raises UserError if a weight is not finite in the
    dtype written.
    """
    stretches = [stretch for stretch in stretches if stretch["first_step"] < progress.step]
    made_from = provenance(
        _as_trained(job.recipe, stretches),
        (job.dataset, job.heldout),
        job.target.fingerprint,
        progress.step,
        progress.tokens,
        {**origin, "stretches": stretches},
    )

    def write(folder: Path) -> None:
        job.objective.save(folder)
        _check_weights(folder)
        (folder / FILE_NAME).write_text(json.dumps(made_from, indent=2) + "\n")

    write_folder(destination, write)


def _check_weights(folder: Path) -> None:
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                remedy = "lower training.learning_rate, or set dtype to one with a wider range, such as bf16"
                check_finite({name: stored.get_tensor(name)}, f"the new {path.name}", remedy)


def _as_trained(recipe: AnyRecipe, stretches: Sequence[Mapping[str, Any]]) -> AnyRecipe:
    """Return the recipe with the settings of its last trained stretch; the settings may have changed since."""
    names = type(recipe.training).model_fields
    last = {name: value for name, value in stretches[-1].items() if name in names} if stretches else {}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=last)})


def consolidate(
    checkpoint: Path, destination: Path, console: Console | None = None, trust_remote_code: bool = False
) -> str:
    """Write the artefact of a checkpoint with its provenance; return a sentence naming its step.

    Reads the recipe's target and data again. Models run code of their own only with ``trust_remote_code``, whatever the
    stored recipe says. Raises UserError if they have changed since, or if the checkpoint is
    damaged or lacks its recipe.
    """
    state, saved = read_apart(checkpoint)
    recipe = parse_recipe(state["recipe"], f"{checkpoint.name}/state.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = assemble(
        recipe.without_store().model_copy(update={"trust_remote_code": trust_remote_code}),
        device,
        Process(console=console or standard_error()),
    )
    recorded = identity_in(state, recipe.model_dump(mode="json"))
    refused = compare(recorded, json.loads(json.dumps(dict(job.identity)))).refused
    if changed := [str(each) for each in refused if not each.name.startswith(_STORED)]:
        raise UserError(f"since {checkpoint} was written, its {', '.join(changed)} changed: restore the original")
    load_weights(job.objective.module, saved.weights)
    choose_tree(job, evaluator_at_end(job, device))
    origin = {**state["launch"], "checkpoint": checkpoint.name}
    finish(replace(job, recipe=recipe), destination, saved.progress, state["stretches"], origin)
    done, steps = saved.progress.step, recipe.training.steps
    return f"made from the checkpoint {checkpoint}: weights after step {done} of {steps}, not the finished weights"


def provenance(
    recipe: AnyRecipe, datasets: Sequence[Dataset], target: str, steps: int, tokens: int, launch: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the provenance as plain JSON values. It contains no secrets, because a recipe has none.

    ``target`` is the `stored_fingerprint` of its weights; ``launch`` is from `trainer.processes.describe`.
    """
    content = recipe.model_dump(mode="json")
    name = recipe.target
    if Path(name).exists():
        name = str(Path(name).resolve())  # cannot be mistaken for a Hub id
    elif (named := hub_name(name)) is not None:
        name = str(named._replace(revision=None))  # the revisions have its commit
    folder = local_folder(recipe.target, weights=False)
    known = {"name": name, "fingerprint": target, **(source_of(folder) or {})}
    if (method := quantisation(folder)) is not None:
        known["quantisation"] = method
    return {
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "recipe": content,
        "data": {dataset.path: _about(dataset, recipe.data) for dataset in datasets},
        "target": known,
        "revisions": revisions(_names(content)),
        "steps": steps,
        "tokens": tokens,
        **launch,
    }


def _about(dataset: Dataset, section: DataSection) -> dict[str, Any]:
    """Describe a data set: digest, rows, commit and its answers' prompts; source and licence if known, else null.

    The source of a hub data set is its id, without revision and configuration.
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


def _names(recipe: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the names of all models that a recipe reads, by key."""
    heads, draft = recipe.get("heads") or {}, (recipe.get("draft") or {}).get("init") or {}
    return {
        "target": recipe["target"],
        "heads.init": heads.get("init"),
        "draft.init.from_model": draft.get("from_model"),
    }
