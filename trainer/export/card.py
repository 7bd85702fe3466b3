"""The model card: a description of the artefact, its use, its measured figures and its provenance.

Cards are published, so they hold no local path (see `without_local_paths`).
"""

import json
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined
from yaml import YAMLError

from decoding.measure.markdown import code, fenced, one_line, text
from decoding.measure.redact import basename, is_hub_id, without_local_paths
from decoding.model.header import read_object
from trainer.export.artefact import Artefact
from trainer.export.formats import FORMATS
from trainer.export.measured import Measured

if TYPE_CHECKING:
    from trainer.export.planned import Planned

CARD_NAME = "README.md"
PROVENANCE_NAME = "provenance.json"
_TAG = "headstart"
"""A tag of every card: `export` replaces no folder whose card lacks it."""
_PROVENANCE_REMEDY = "the trainer writes it: copy it again from the training run, or remove it"
_UNKNOWN_TARGET = "TARGET"
_ADAPTED_TARGET = "ADAPTED_TARGET"
_NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Provenance:
    """The origin of an artefact, as texts for the card; ``not recorded`` stands for a missing entry."""

    commit: str
    versions: str
    hardware: str
    target: str
    fingerprint: str
    steps: str
    tokens: str
    settings: tuple[str, ...]
    """One line per stretch of steps that was trained under the same settings, such as the learning rate."""
    data: tuple[tuple[str, str, str], ...]
    """(file name, SHA-256, rows)"""
    recipe: str
    """JSON"""
    adapted: bool
    """True where the target was trained too: the artefact then belongs to the adapted model, not to ``target``."""


def read_stored_provenance(source: Path) -> dict[str, Any] | None:
    """Read ``provenance.json`` beside the weights; None if there is none.

    `ValueError` unless it is a JSON object whose recipe, target, versions, hardware and data are objects.
    """
    path = source / PROVENANCE_NAME
    if not path.is_file():
        return None
    stored = read_object(path, _PROVENANCE_REMEDY)
    objects = {key: _object(stored, key, path) for key in ("recipe", "target", "versions", "hardware", "data")}
    return {**stored, **objects}


def read_provenance(source: Path) -> Provenance | None:
    """Read ``provenance.json`` as texts for the card; None if there is none. Errors: see `read_stored_provenance`."""
    stored = read_stored_provenance(source)
    if stored is None:
        return None
    path, recipe, target, data = source / PROVENANCE_NAME, stored["recipe"], stored["target"], stored["data"]
    name = str(target.get("name") or recipe.get("target") or _UNKNOWN_TARGET)
    return Provenance(
        commit=_text(stored.get("commit")),
        versions=_pairs(stored["versions"]),
        hardware=_pairs(stored["hardware"]),
        target=name if is_hub_id(name) else one_line(without_local_paths(basename(name))) or _UNKNOWN_TARGET,
        fingerprint=_text(target.get("fingerprint")),
        steps=_count(stored.get("steps")),
        tokens=_count(stored.get("tokens")),
        settings=_settings(stored),
        data=tuple(
            (_text(basename(name)), _text(_object(data, name, path).get("sha256")), _count(data[name].get("rows")))
            for name in data
        ),
        recipe=json.dumps(without_local_paths(recipe), indent=2, ensure_ascii=False) if recipe else "",
        adapted=recipe.get("adapters") is not None,
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


def read_report(path: Path) -> dict[str, Any]:
    """Read a report by `decoding.measure.evaluate`; `ValueError` if it is missing or no JSON object."""
    remedy = "give the report.json that `headstart evaluate` wrote"
    if not path.is_file():
        raise ValueError(f"there is no report {path}: {remedy}, or export without one")
    return read_object(path, remedy)


def render_card(
    artefact: Artefact,
    provenance: Provenance | None,
    measured: Measured | None,
    planned: "Planned | None" = None,
) -> str:
    """Return the card: YAML front matter for the Hub, then Markdown. Missing facts are named as missing.

    Every text from a recipe, a report or a name passes one of the filters `text`, `code`, `fenced` or `quoted`, so that
    it cannot act as Markdown.
    """
    target = provenance.target if provenance else _UNKNOWN_TARGET
    kind = "draft-model" if artefact.is_draft else "hydra" if artefact.sequential else "medusa"
    front_matter = ModelCardData(
        library_name=FORMATS[artefact.format].library,
        base_model=target if is_hub_id(target) else None,
        tags=["speculative-decoding", kind, _TAG],
        pipeline_tag="text-generation" if artefact.is_draft else None,
    )
    environment = Environment(  # the output is Markdown, not HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {"text": text, "code": code, "fenced": fenced, "quoted": json.dumps}
    template = environment.from_string(files("trainer.export").joinpath("card.md.j2").read_text(encoding="utf-8"))
    return template.render(
        front_matter=front_matter.to_yaml(),
        artefact=artefact,
        target=target,
        target_argument=_ADAPTED_TARGET if provenance and provenance.adapted else shlex.quote(target),
        provenance=provenance,
        measured=measured,
        planned=planned,
    )


def is_own_card(path: Path) -> bool:
    """Return True for a card that `render_card` wrote, also after somebody edited it."""
    if not path.is_file():
        return False
    try:
        card = ModelCard(path.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True)
    except (ValueError, YAMLError):
        return False
    return _TAG in (card.data.get("tags") or ())


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
