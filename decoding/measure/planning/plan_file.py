"""Reading and writing of plan.json, which contains fingerprints of all measured weights."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.registry import parse_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.hub import short_name
from decoding.files.stored import read_object
from decoding.measure.machine import hardware
from decoding.measure.planning.step_costs import LEAST_GAIN

FORMAT = "headstart plan 1"
_KEYS = frozenset({"cells", "curves", "drafters", "dtype", "fingerprints", "hardware", "temperature"})
_REMEDY = "make a plan with `headstart plan`"


def plan_fingerprints(target: str, specs: Sequence[DrafterSpec], trusted: bool = False) -> dict[str, Any]:
    """Return the fingerprints of the target and, by spec, of each drafter's weights; None for a drafter without
    weights.
    """
    return {
        "target": stored_fingerprint(target, trusted),
        "drafters": {
            str(spec): None if spec.path is None else stored_fingerprint(spec.path, trusted) for spec in specs
        },
    }


def write_plan(content: Mapping[str, Any], path: Path) -> None:
    """Write a plan as JSON. ``content`` contains a planner's figures, ``dtype``, ``fingerprints`` and more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **content}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_plan(path: Path) -> "Plan":
    """Read a plan; raise UserError if the file is missing or is not a plan that chooses a drafter."""
    if not path.is_file():
        raise UserError(f"the plan {path} does not exist: {_REMEDY}")
    content = read_object(path, _REMEDY)
    if content.get("format") != FORMAT:
        raise UserError(f"{path} is not a plan of this version (its format is {content.get('format')!r}): {_REMEDY}")
    if "prospects" in content:
        raise UserError(
            f"{path} was made without a drafter, so it cannot choose one: make a plan with `headstart plan --drafter`"
        )
    if missing := sorted(_KEYS - content.keys()):
        raise UserError(f"{path} lacks {', '.join(missing)}: {_REMEDY}")
    return Plan(str(path), content)


@dataclass(frozen=True)
class Plan:
    """A plan read from the file ``name``."""

    name: str
    content: Mapping[str, Any]

    def check(self, target: str, dtype: str, trusted: bool = False) -> list[str]:
        """Return warnings; raise UserError if the plan was made for other weights or another dtype.

        ``target`` is a folder or Hub id, and ``dtype`` is a torch name such as ``bfloat16``.
        """
        if dtype != self.content["dtype"]:
            raise UserError(
                f"{self.name} was measured in {self.content['dtype']}, and its costs do not apply to {dtype}: "
                f"{_REMEDY} in the new dtype, or decode in the plan's dtype (--dtype)"
            )
        known = self.content["fingerprints"]
        weights = [(parse_drafter(spec).path, fingerprint) for spec, fingerprint in known["drafters"].items()]
        for path, fingerprint in ((target, known["target"]), *weights):
            if path is not None and (present := stored_fingerprint(path, trusted)) != fingerprint:
                raise UserError(
                    f"{self.name} was made with weights {fingerprint}, but {short_name(path)} has {present}: "
                    f"{_REMEDY} with these weights"
                )
        if hardware() != self.content["hardware"]:
            return [f"{self.name} was made on other hardware or with another number of threads: costs may differ here"]
        return []

    @property
    def batch_sizes(self) -> list[int]:
        """The planned batch sizes."""
        return sorted({cell["batch_size"] for cell in self.content["cells"]})

    def choice(self, batch_size: int) -> dict[str, Any] | None:
        """Return the fastest planned form of any drafter at the nearest batch size, or None for plain decoding."""
        fastest: dict[str, Any] = max(
            (choice["best"] for choice in self._choices(batch_size)), key=lambda best: best["speedup"]
        )
        return fastest if fastest["speedup"] >= LEAST_GAIN else None

    def _choices(self, batch_size: int) -> list[dict[str, Any]]:
        nearest = min(self.content["cells"], key=lambda cell: abs(math.log(cell["batch_size"] / batch_size)))
        choices: list[dict[str, Any]] = nearest["choices"]
        return choices

    def drafter_of(self, fingerprint: str) -> dict[str, Any]:
        """Return the plan's drafter with these weights; raise UserError if there is none.

        If several drafters share the weights, such as heads alone and in a hybrid, return the first drafter for which
        the plan could choose a size: only such drafters have a planned tree or depths.
        """
        weights = self.content["fingerprints"]["drafters"]
        with_them = [drafter for drafter in self.content["drafters"] if weights[drafter["drafter"]] == fingerprint]
        if not with_them:
            raise UserError(f"{self.name} does not cover the weights to export ({fingerprint}): {_REMEDY}")
        drafter: dict[str, Any] = min(with_them, key=lambda drafter: drafter["kind"] == "fixed")
        return drafter

    def best_of(self, spec: str) -> dict[str, Any]:
        """Look up the drafter with this spec, and return what the plan chose for it at batch size 1."""
        return next(choice for choice in self._choices(1) if choice["drafter"] == spec)
