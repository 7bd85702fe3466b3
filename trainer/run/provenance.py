"""Provenance of an artefact: commit, versions, resolved recipe, data and target, written beside its weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoding.measure.machine import commit, hardware, versions
from decoding.measure.redact import hub_repository
from decoding.model.hub import hub_name, revisions
from trainer.data.dataset import Dataset
from trainer.quickstart import resolve
from trainer.recipe.common import DataSection
from trainer.recipe.recipe import AnyRecipe

FILE_NAME = "provenance.json"


def provenance(
    recipe: AnyRecipe,
    datasets: Sequence[Dataset],
    target: str | None,
    steps: int,
    tokens: int,
    launch: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the provenance as plain JSON values, none of them secret: a recipe holds no keys.

    ``target`` is the `stored_fingerprint` of its weights, ``launch`` what `trainer.run.distributed.describe` says.
    """
    content = recipe.model_dump(mode="json")
    name = content.get("target")
    if name is not None and Path(name).is_dir():
        name = str(Path(name).resolve())  # never to be taken for a hub id
    elif name is not None and (named := hub_name(name)) is not None:
        name = named.repo_id  # its commit stands under the revisions
    return {
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "recipe": content,
        "data": {dataset.path: _about(dataset, recipe.data) for dataset in datasets},
        "target": {"name": name, "fingerprint": target} if target else None,
        "revisions": revisions(_names(content)) if target else {},
        "steps": steps,
        "tokens": tokens,
        **launch,
    }


def _about(dataset: Dataset, section: DataSection) -> dict[str, Any]:
    """Describe a data set: its digest, rows and commit, and the source and licence that are known, else null.

    A data set of the hub is its own source, by its id without revision and configuration.
    """
    hub_id = None if Path(dataset.path).exists() else hub_repository(dataset.path)
    return {
        "sha256": dataset.sha256,
        "rows": dataset.account.num_rows,
        "commit": dataset.commit,
        "source": section.source if hub_id is None else hub_id,
        "license": section.license,
    }


def _names(recipe: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the names of all models that a recipe reads, by their keys in it."""
    heads, draft = recipe.get("heads") or {}, (recipe.get("draft") or {}).get("init") or {}
    return {
        "target": resolve(recipe["target"]),
        "heads.init": heads.get("init"),
        "draft.init.from_model": draft.get("from_model"),
    }


def write_provenance(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")
