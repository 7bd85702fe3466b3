"""Provenance, report and plan beside the weights in an exported folder, in the form that is published.

That form holds no path of this machine and no secret.
"""

import json
from pathlib import Path
from typing import Any

from decoding.drafters.registry import parse_drafter
from decoding.measure.planning.plan_file import read_plan
from decoding.measure.redact import basename, hub_repository, is_hub_id, published_name, without_local_paths
from decoding.model.fingerprint import stored_fingerprint
from trainer.export.artefact import PLAN_NAME, PROVENANCE_NAME, REPORT_NAME
from trainer.export.measured import read_report
from trainer.export.origin import read_stored_provenance

_OUR_FORMATS = ("headstart", "draft")
"""Formats that this project decodes with, so that a plan can be used with what was exported."""


def write_beside(
    folder: Path, source: Path, format: str, report: Path | None, plan: Path | None, repository: str | None = None
) -> None:
    """Write to the exported ``folder`` what is known of the weights in ``source``.

    ``repository``: ORG/NAME that the folder is for; the plan then names it in place of the local path.
    """
    if (provenance := read_stored_provenance(source)) is not None:
        _write(folder / PROVENANCE_NAME, published_provenance(provenance))
    if report is not None:
        _write(folder / REPORT_NAME, without_local_paths(read_report(report)))
    if plan is not None:
        mine = stored_fingerprint(source)
        exported = stored_fingerprint(folder) if format in _OUR_FORMATS else mine
        _write(folder / PLAN_NAME, published_plan(dict(read_plan(plan).content), mine, exported, repository))


def published_provenance(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a provenance in which target and data sets are named without their folders."""
    target = dict(stored["target"])
    if (name := target.get("name")) is not None and not is_hub_id(str(name)):
        target["name"] = basename(str(name))
    data = {name if is_hub_id(hub_repository(name)) else basename(name): held for name, held in stored["data"].items()}
    published: dict[str, Any] = without_local_paths({**stored, "target": target, "data": data})
    return published


def published_plan(content: dict[str, Any], mine: str, exported: str, repository: str | None) -> dict[str, Any]:
    """Return a plan whose drafters are named without their folders.

    Those with the weights ``mine`` are named by the ``repository``, if there is one, and have the fingerprint of what
    was ``exported``: heads get the plan's own tree there, which is a part of it.
    """
    told: dict[str, str] = {}
    fingerprints = {**content["fingerprints"], "drafters": dict(content["fingerprints"]["drafters"])}
    for spec, fingerprint in fingerprints["drafters"].items():
        path = parse_drafter(spec).path
        if path is not None:
            own = fingerprint == mine and repository is not None
            told[path] = (
                str(repository) if own else published_name(basename(path) if Path(path).is_absolute() else path)
            )
            if own:
                fingerprints["drafters"][spec] = exported
    renamed = _renamed(
        {**content, "fingerprints": fingerprints}, dict(sorted(told.items(), key=lambda each: -len(each[0])))
    )
    published: dict[str, Any] = without_local_paths(renamed)
    return published


def _renamed(value: Any, told: dict[str, str]) -> Any:
    """Replace the paths in all specs of a JSON value (``draft:PATH,tokens=4``), keys included."""
    if isinstance(value, dict):
        return {_renamed(key, told): _renamed(held, told) for key, held in value.items()}
    if isinstance(value, list):
        return [_renamed(held, told) for held in value]
    if not isinstance(value, str):
        return value
    for path, name in told.items():
        head, found, rest = value.partition(f":{path}")
        if found and (not rest or rest.startswith(",")):
            return f"{head}:{name}{rest}"
    return value


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
