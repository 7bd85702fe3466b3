"""The origin of an artefact: ``provenance.json`` beside its weights, as it is stored and as texts for the card."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.measure.markdown import one_line
from decoding.measure.redact import basename, hub_repository, is_hub_id, without_local_paths
from decoding.model.stored import read_object
from trainer import quickstart
from trainer.export.artefact import PROVENANCE_NAME

UNKNOWN_TARGET = "TARGET"
"""The target's name in the commands where no folder and no id of the Hub is known."""
_PROVENANCE_REMEDY = "the trainer writes it: copy it again from the training run, or remove it"
_OBJECTS = ("recipe", "target", "revisions", "versions", "hardware", "data")
_NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Data:
    """One data set of a training run, as texts for the card."""

    name: str
    sha256: str
    rows: str
    source: str
    license: str
    hub_id: str | None
    """Id of the Hub's data set that the rows come from; None if they come from elsewhere."""


@dataclass(frozen=True)
class Provenance:
    """The origin of an artefact, as texts for the card; ``not recorded`` stands for a missing entry."""

    commit: str
    versions: str
    hardware: str
    processes: str
    target: str
    fingerprint: str
    revision: str
    """Commit of the target on the Hub; empty where it is from elsewhere."""
    steps: str
    tokens: str
    settings: tuple[str, ...]
    """One line per stretch of steps that was trained under the same settings, such as the learning rate."""
    data: tuple[Data, ...]
    recipe: str
    """JSON"""
    adapted: bool
    """True where the target was trained too: the artefact then belongs to the adapted model, not to ``target``."""

    @property
    def embedded(self) -> bool:
        """True for the embedded target, which each machine builds for itself."""
        return self.target == quickstart.NAME

    @property
    def on_hub(self) -> bool:
        return is_hub_id(self.target)

    @property
    def hub_data(self) -> tuple[str, ...]:
        """Ids of the Hub's data sets, each once."""
        return tuple(dict.fromkeys(data.hub_id for data in self.data if data.hub_id is not None))


def read_stored_provenance(source: Path) -> dict[str, Any] | None:
    """Read ``provenance.json`` beside the weights; None if there is none.

    `ValueError` unless it is a JSON object whose recipe, target and the other `_OBJECTS` are objects.
    """
    path = source / PROVENANCE_NAME
    if not path.is_file():
        return None
    stored = read_object(path, _PROVENANCE_REMEDY)
    objects = {key: _object(stored, key, path) for key in _OBJECTS}
    return {**stored, **objects}


def read_provenance(source: Path) -> Provenance | None:
    """Read ``provenance.json`` as texts for the card; None if there is none. Errors: see `read_stored_provenance`."""
    stored = read_stored_provenance(source)
    if stored is None:
        return None
    path, recipe, target = source / PROVENANCE_NAME, stored["recipe"], stored["target"]
    name = str(target.get("name") or recipe.get("target") or UNKNOWN_TARGET)
    return Provenance(
        commit=_text(stored.get("commit")),
        versions=_pairs(stored["versions"]),
        hardware=_pairs(stored["hardware"]),
        processes=_count(stored.get("num_processes")),
        target=name if is_hub_id(name) else one_line(without_local_paths(basename(name))) or UNKNOWN_TARGET,
        fingerprint=_text(target.get("fingerprint")),
        revision=_text(stored["revisions"]["target"]).partition("@")[2] if "target" in stored["revisions"] else "",
        steps=_count(stored.get("steps")),
        tokens=_count(stored.get("tokens")),
        settings=_settings(stored),
        data=tuple(_data(name, _object(stored["data"], name, path)) for name in stored["data"]),
        recipe=json.dumps(without_local_paths(recipe), indent=2, ensure_ascii=False) if recipe else "",
        adapted=recipe.get("adapters") is not None,
    )


def _data(name: str, about: dict[str, Any]) -> Data:
    """Describe one data set; ``name`` is its file, its folder, or its id on the Hub."""
    source = about.get("source")
    hub_id = source if isinstance(source, str) and is_hub_id(source) else None
    return Data(
        name=_text(name if hub_id is not None and hub_repository(name) == hub_id else basename(name)),
        sha256=_text(about.get("sha256")),
        rows=_count(about.get("rows")),
        source=_text(source),
        license=_text(about.get("license")),
        hub_id=hub_id,
    )


def _settings(stored: dict[str, Any]) -> tuple[str, ...]:
    """Write ``from step 1: learning_rate 0.001, ...``; steps count from 1 here, as in the metrics."""
    stretches = stored.get("stretches") or []
    if not isinstance(stretches, list) or not all(isinstance(stretch, dict) for stretch in stretches):
        raise ValueError(f"{PROVENANCE_NAME} holds {stretches!r:.60} as stretches: {_PROVENANCE_REMEDY}")
    lines = []
    for stretch in stretches:
        first, held = stretch.get("first_step"), {k: v for k, v in stretch.items() if k != "first_step"}
        lines.append(f"from step {first + 1 if isinstance(first, int) else _NOT_RECORDED}: {_pairs(held)}")
    return tuple(lines)


def _object(stored: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object under ``key`` of a JSON object; an empty one if the key is missing."""
    value = stored.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {value!r} as {key}, not an object: {_PROVENANCE_REMEDY}")
    return value


def _text(value: Any) -> str:
    return str(without_local_paths(value)) if value not in (None, "") else _NOT_RECORDED


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _NOT_RECORDED


def _pairs(values: dict[str, Any]) -> str:
    """Write versions as ``torch 2.13.0, transformers 5.23.0``"""
    return ", ".join(f"{name} {value}" for name, value in without_local_paths(values).items()) or _NOT_RECORDED
