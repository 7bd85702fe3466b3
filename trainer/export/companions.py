"""What is known of weights: provenance and report, written fit to publish beside them, and the part of a plan.

The published form holds no path of this machine and no secret.
"""

import filecmp
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.registry import parse_drafter
from decoding.measure.markdown import one_line
from decoding.measure.planning.plan_file import read_plan
from decoding.measure.redact import basename, hub_repository, is_hub_id, without_local_paths
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.stored import read_object
from decoding.rules.best_tree import Paths
from decoding.rules.tree import checked_paths
from trainer import quickstart
from trainer.heads.medusa2 import TARGET_FOLDER

PROVENANCE_NAME, REPORT_NAME = "provenance.json", "report.json"
UNKNOWN_TARGET = "TARGET"
"""The target's name in commands if no folder and no id of the Hub is known."""
USUAL_DRAFT_TOKENS = 4
"""Depth of a draft's chain if neither its training nor a plan records one."""
_COPIED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Suffixes of a model's files, code not among them."""
_OBJECTS = ("recipe", "target", "revisions", "versions", "hardware", "data")

Provenance = dict[str, Any]


# --- provenance -------------------------------------------------------------------------------------------------------


def read_provenance(source: Path) -> Provenance | None:
    """Read ``provenance.json`` beside the weights; None if there is none.

    `ValueError` unless it is a JSON object whose recipe, target and the other `_OBJECTS` are objects.
    """
    path = source / PROVENANCE_NAME
    if not path.is_file():
        return None
    remedy = "the trainer writes it: copy it again from the training run, or remove it"
    stored = read_object(path, remedy)
    for key in _OBJECTS:
        stored[key] = stored.get(key) or {}
        if not isinstance(stored[key], dict):
            raise ValueError(f"{path} holds {stored[key]!r} as {key}, not an object: {remedy}")
    return stored


def is_adapted(stored: Provenance | None) -> bool:
    """Return True if the target was trained too: the artefact then belongs to the adapted model beside it."""
    return stored is not None and stored["recipe"].get("adapters") is not None


def target_name(stored: Provenance | None) -> str:
    """Return the target's name without its folder: an id of the Hub, or the last part of a path."""
    held: Provenance = stored or {"target": {}, "recipe": {}}
    name = str(held["target"].get("name") or held["recipe"].get("target") or UNKNOWN_TARGET)
    return name if is_hub_id(name) else one_line(without_local_paths(basename(name))) or UNKNOWN_TARGET


def target_of(source: Path) -> str | None:
    """Return the folder or ORG/NAME@COMMIT of the model that an artefact was trained for; None if it is not recorded.

    A folder of another machine may not be here.
    """
    stored = read_provenance(source)
    if stored is None:
        return None
    if is_adapted(stored):
        return str(source / TARGET_FOLDER)
    name = stored["revisions"].get("target") or stored["target"].get("name") or stored["recipe"].get("target")
    return None if not name else quickstart.resolve(str(name))


def trained_for(source: Path) -> str | None:
    """Return the fingerprint of the target that an artefact belongs to; None if it is not recorded."""
    stored = read_provenance(source)
    if stored is None:
        return None
    if is_adapted(stored):
        adapted = source / TARGET_FOLDER
        return stored_fingerprint(adapted) if adapted.is_dir() else None
    fingerprint = stored["target"].get("fingerprint")
    return None if fingerprint is None else str(fingerprint)


def chain_length(source: Path) -> int:
    """Return the tokens that a draft was trained to draft at a time; the usual depth if that is not recorded."""
    stored = read_provenance(source)
    section = stored["recipe"].get("draft") if stored else None
    length = section.get("num_draft_tokens") if isinstance(section, dict) else None
    return length if type(length) is int and length > 0 else USUAL_DRAFT_TOKENS


def published_provenance(stored: Provenance) -> Provenance:
    """Return a provenance in which target and data sets are named without their folders."""
    target = dict(stored["target"])
    if (name := target.get("name")) is not None and not is_hub_id(str(name)):
        target["name"] = basename(str(name))
    data = {name if is_hub_id(hub_repository(name)) else basename(name): held for name, held in stored["data"].items()}
    published: Provenance = without_local_paths({**stored, "target": target, "data": data})
    return published


# --- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServingPlan:
    """A plan's part for one artefact. ``machine``: the hardware of its costs, for the card."""

    machine: str
    tree: Paths
    """Best tree at the smallest batch size; empty for a drafter that has none."""
    schedule: tuple[tuple[int, int, int], ...]
    """(first, last, depth) of the best chain, for all batch sizes from 1 on; a depth of 0 is plain decoding."""
    drawn: bool = False
    """True if a draft model's tokens were drawn from its distribution when the plan was made."""

    @property
    def deepest(self) -> int:
        """Depth of the deepest chain of the schedule; 0 if none pays."""
        return max((depth for _, _, depth in self.schedule), default=0)


def read_serving_plan(path: Path, source: Path) -> ServingPlan:
    """Read a plan's part for the weights in ``source``; ValueError if it was made with other weights."""
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
    """Copy the adapted target beside the heads in ``source``, read it back and compare; return a sentence.

    ValueError for files that read back differently.
    """
    source, folder = source / TARGET_FOLDER, folder / TARGET_FOLDER
    folder.mkdir()
    names = sorted(path.name for path in source.iterdir() if path.is_file() and path.suffix in _COPIED)
    for name in names:
        shutil.copyfile(source / name, folder / name)
    _, mismatched, unreadable = filecmp.cmpfiles(source, folder, names, shallow=False)
    if wrong := [*mismatched, *unreadable]:
        raise ValueError(f"{folder / wrong[0]} reads back with other bytes than were written: export again")
    return f"the adapted target beside them: {len(names)} files equal to the bit"


def write_companions(folder: Path, source: Path, report: dict[str, Any] | None) -> None:
    """Write to the exported ``folder`` what is known of the weights in ``source``: provenance and report."""
    provenance = read_provenance(source)
    contents = {
        PROVENANCE_NAME: None if provenance is None else published_provenance(provenance),
        REPORT_NAME: None if report is None else without_local_paths(report),
    }
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
