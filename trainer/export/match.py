"""The check that a report measured the very weights whose card its figures go on."""

from pathlib import Path
from typing import Any

from decoding.model.fingerprint import stored_fingerprint
from trainer.export.origin import read_stored_provenance
from trainer.heads.medusa2 import TARGET_FOLDER

_REMEDY = "measure this one with `headstart evaluate`, or export without a report"


def drafters_of(report: dict[str, Any], source: Path) -> frozenset[str]:
    """Return the drafters, by their names in the report's rows, that drafted with the weights in ``source``."""
    mine = stored_fingerprint(source)
    return frozenset(name for name, fingerprint in _weights(report).items() if fingerprint == mine)


def check_measured(report: dict[str, Any], name: str, source: Path, kind: str) -> None:
    """Raise `ValueError` unless the report measured the artefact in ``source``, on its own target.

    ``kind`` is "heads" or "draft"; ``name`` is the report's, for errors.
    """
    found = report.get("fingerprints")
    if not isinstance(found, dict):
        raise ValueError(f"{name} does not tell by fingerprints what it measured: {_REMEDY}")
    weights = _weights(report)
    of_kind = {weights.get(row.get("drafter")) for row in report["rows"] if row.get("artefact") == kind}
    roles = (
        (kind, of_kind - {None}, stored_fingerprint(source)),
        ("target", {found.get("target")}, trained_for(source)),
    )
    for role, measured, wanted in roles:
        if wanted is not None and not measured - {None}:
            raise ValueError(f"{name} measured no {role}: {_REMEDY}")
        if wanted is not None and wanted not in measured:
            mine = f"{source} holds" if role == kind else f"what {source} holds was trained for"
            others = " and ".join(sorted(map(str, measured)))
            raise ValueError(f"{name} measured the {role} {others}, but {mine} {wanted}: {_REMEDY}")


def _weights(report: dict[str, Any]) -> dict[Any, Any]:
    """Return the fingerprint of each drafter's weights, by the drafter's name in the rows; None if it has none."""
    found, specs = report.get("fingerprints"), report.get("drafters")
    if not isinstance(found, dict) or not isinstance(specs, dict):
        return {}
    return {name: found.get(spec) for name, spec in specs.items()}


def trained_for(source: Path) -> str | None:
    """Return the fingerprint of the target that the artefact in ``source`` belongs to; None where it is not recorded.

    Heads trained jointly with adapters belong to the adapted target beside them, not to the target at the start.
    """
    stored = read_stored_provenance(source)
    if stored is None:
        return None
    if stored["recipe"].get("adapters") is not None:
        adapted = source / TARGET_FOLDER
        return stored_fingerprint(adapted) if adapted.is_dir() else None
    fingerprint = stored["target"].get("fingerprint")
    return None if fingerprint is None else str(fingerprint)
