"""Files that accompany exported weights: provenance, report, plan and adapted target.

The published provenance and report contain neither local paths nor secrets.
"""

import filecmp
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.registry import parse_drafter
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.stored import CONFIG_NAME, read_object
from decoding.measure.markdown import one_line
from decoding.measure.planning.plan_file import read_plan
from decoding.measure.redact import basename, hub_repository, is_hub_id, without_local_paths
from decoding.rules.best_tree import Paths
from decoding.rules.tree import checked_paths
from trainer.heads.medusa2 import TARGET_FOLDER

PROVENANCE_NAME, REPORT_NAME = "provenance.json", "report.json"
UNKNOWN_TARGET = "TARGET"
"""Placeholder for the target in commands, used if neither the folder nor the Hub id is known."""
USUAL_DRAFT_TOKENS = 4
"""Depth of a draft's chain if neither its provenance nor a plan records a depth."""
_COPIED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Suffixes of the model files that are copied; code is not copied."""
_OBJECTS = ("recipe", "target", "revisions", "versions", "hardware", "data")

Provenance = dict[str, Any]


# --- provenance -------------------------------------------------------------------------------------------------------


def read_provenance(source: Path) -> Provenance | None:
    """Read ``provenance.json`` next to the weights; return None if the file is missing. Raises `UserError` unless the
    file contains a JSON object in which each of the keys `_OBJECTS` is absent, empty or an object.
    """
    path = source / PROVENANCE_NAME
    if not path.is_file():
        return None
    remedy = "the trainer writes this file: copy it again from the training run, or remove it"
    stored = read_object(path, remedy)
    for key in _OBJECTS:
        stored[key] = stored.get(key) or {}
        if not isinstance(stored[key], dict):
            raise UserError(f"{path} has {stored[key]!r} as {key}, which must be an object: {remedy}")
    return stored


def is_adapted(stored: Provenance | None) -> bool:
    """Return True if the target was trained together with the heads; in this case the adapted target must be next to
    the artefact.
    """
    return stored is not None and stored["recipe"].get("adapters") is not None


def target_name(stored: Provenance | None) -> str:
    """Return the target's name without local folders: a Hub id (with a GGUF file), or the last part of a path."""
    held: Provenance = stored or {"target": {}, "recipe": {}}
    name = str(held["target"].get("name") or held["recipe"].get("target") or UNKNOWN_TARGET)
    return name if is_hub_id(hub_repository(name)) else one_line(without_local_paths(basename(name))) or UNKNOWN_TARGET


def target_of(source: Path) -> str | None:
    """Return the folder or ORG/NAME@COMMIT of the target that an artefact was trained for; None if it is not recorded.

    The folder may exist only on the machine that trained the artefact.
    """
    stored = read_provenance(source)
    if stored is None:
        return _verifier_in(source)
    if is_adapted(stored):
        return str(source / TARGET_FOLDER)
    name = stored["revisions"].get("target") or stored["target"].get("name") or stored["recipe"].get("target")
    return None if not name else str(name)


def _verifier_in(source: Path) -> str | None:
    """Return the target that is named in the nested ``config.json`` of the library ``speculators``."""
    path = source / CONFIG_NAME
    value: Any = read_object(path, "copy it again") if path.is_file() else {}
    for key in ("speculators_config", "verifier", "name_or_path"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value != UNKNOWN_TARGET else None


def trained_for(source: Path) -> str | None:
    """Return the fingerprint of the target that an artefact was trained for; None if it is not recorded."""
    stored = read_provenance(source)
    if stored is None:
        return None
    if is_adapted(stored):
        adapted = source / TARGET_FOLDER
        return stored_fingerprint(adapted) if adapted.is_dir() else None
    fingerprint = stored["target"].get("fingerprint")
    return None if fingerprint is None else str(fingerprint)


def chain_length(source: Path) -> int:
    """Return how many tokens a draft was trained to write at a time; `USUAL_DRAFT_TOKENS` if this is not recorded."""
    stored = read_provenance(source)
    section = stored["recipe"].get("draft") if stored else None
    length = section.get("num_draft_tokens") if isinstance(section, dict) else None
    return length if type(length) is int and length > 0 else USUAL_DRAFT_TOKENS


def published_provenance(stored: Provenance) -> Provenance:
    """Return a provenance without the local folders of target and data sets."""
    target = dict(stored["target"])
    if (name := target.get("name")) is not None and not is_hub_id(hub_repository(str(name))):
        target["name"] = basename(str(name))
    data = {name if is_hub_id(hub_repository(name)) else basename(name): held for name, held in stored["data"].items()}
    published: Provenance = without_local_paths({**stored, "target": target, "data": data})
    return published


# --- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServingPlan:
    """The part of a plan that concerns one artefact. ``machine`` is for the card: the machine on which the plan's costs
    were measured.
    """

    machine: str
    tree: Paths
    """The best tree at the smallest batch size; empty for a drafter without trees."""
    schedule: tuple[tuple[int, int, int], ...]
    """Rows (first, last, depth): the best chain's depth for batch sizes first to last; depth 0 is plain decoding."""
    drawn: bool = False
    """True if a draft model's tokens were drawn from its distribution when the plan was made."""

    @property
    def deepest(self) -> int:
        """Depth of the deepest chain in the schedule; 0 if no chain pays."""
        return max((depth for _, _, depth in self.schedule), default=0)


def read_serving_plan(path: Path, source: Path) -> ServingPlan:
    """Read the part of a plan that concerns the weights in ``source``.

    Raises UserError if the plan was made for other weights.
    """
    plan = read_plan(path)
    drafter = plan.drafter_of(stored_fingerprint(source))
    tree = plan.best_of(drafter["drafter"])["best"]["tree"]
    hardware = plan.content["hardware"]
    machine = str(hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} threads")
    return ServingPlan(
        machine=str(without_local_paths(machine)),
        tree=checked_paths(tree, 1 << 30) if tree else (),
        schedule=tuple((first, last, depth) for first, last, depth in drafter["depth_by_batch_size"] or ()),
        drawn=plan.content["temperature"] > 0 and parse_drafter(drafter["drafter"]).options.get("sampled", True),
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def copy_target(source: Path, folder: Path) -> str:
    """Copy the adapted target of the heads in ``source`` to ``folder`` and compare the copy; return a sentence.

    Raises UserError for files that read back differently.
    """
    source, folder = source / TARGET_FOLDER, folder / TARGET_FOLDER
    folder.mkdir()
    names = sorted(path.name for path in source.iterdir() if path.is_file() and path.suffix in _COPIED)
    for name in names:
        shutil.copyfile(source / name, folder / name)
    _, mismatched, unreadable = filecmp.cmpfiles(source, folder, names, shallow=False)
    if wrong := [*mismatched, *unreadable]:
        raise UserError(f"{folder / wrong[0]} differs from its original after copying: export again")
    return f"{len(names)} files of the adapted target are bit-equal when read back"


def write_companions(folder: Path, source: Path, report: dict[str, Any] | None) -> None:
    """Write the published provenance and report of the weights in ``source`` to the exported ``folder``.

    The report loses its samples, because they quote the prompts and answers of the measurement, which may be private.
    """
    provenance = read_provenance(source)
    contents = {
        PROVENANCE_NAME: None if provenance is None else published_provenance(provenance),
        REPORT_NAME: None if report is None else without_local_paths({**report, "samples": []}),
    }
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
