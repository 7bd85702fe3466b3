"""Where an artefact comes from: commit, versions, resolved recipe, data and target, written beside its weights."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decoding.machine import commit, hardware, versions
from trainer.data import Dataset
from trainer.recipe import AnyRecipe

FILE_NAME = "provenance.json"


_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "auto_map", "use_cache")
"""What a config holds of where a model came from and how it is run."""


def fingerprint(module: nn.Module) -> str:
    """A short digest of a model: of its config, and of every tensor its name, shape, dtype and all its values.

    Takes about a second a GB: SHA-256 on one core.
    """
    digest = hashlib.sha256()
    if isinstance(module, PreTrainedModel):
        digest.update(json.dumps(_behaviour(module.config.to_dict()), sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _behaviour(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config, and of those inside it, that changes what a model computes."""
    return {
        key: _behaviour(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _SAYS_NOTHING
    }


def provenance(
    recipe: AnyRecipe,
    datasets: Sequence[Dataset],
    target: str | None,
    steps: int,
    tokens: int,
    launch: Mapping[str, Any],
) -> dict[str, Any]:
    """Plain JSON values; nothing secret is among them, for a recipe holds no keys.

    ``target`` is the `fingerprint` of its weights, ``launch`` what `trainer.distributed.describe` says.
    """
    name = getattr(recipe, "target", None)
    if name is not None and Path(name).is_dir():
        name = str(Path(name).resolve())  # never to be taken for a hub id
    return {
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "recipe": recipe.model_dump(mode="json"),
        "data": {dataset.path: {"sha256": dataset.sha256, "rows": dataset.rows} for dataset in datasets},
        "target": {"name": name, "fingerprint": target} if target else None,
        "steps": steps,
        "tokens": tokens,
        **launch,
    }


def write_provenance(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")
