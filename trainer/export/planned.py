"""A plan's part for the weights to export: their tree, and the depths by batch size that servers take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.registry import parse_drafter
from decoding.measure.planning.plan_file import Plan, read_plan
from decoding.measure.redact import without_local_paths
from decoding.model.fingerprint import stored_fingerprint
from decoding.rules.best_tree import Paths
from decoding.rules.tree import checked_paths


@dataclass(frozen=True)
class Planned:
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
        """Depth of the deepest chain of the schedule; 0 where none pays."""
        return max((depth for _, _, depth in self.schedule), default=0)

    @property
    def alone(self) -> int:
        """Depth of the best chain at batch size 1; 0 where none pays."""
        return self.schedule[0][2] if self.schedule else 0


def read_planned(path: Path, source: Path) -> Planned:
    """Read a plan's part for the weights in ``source``; ValueError if it was made with other weights."""
    plan = read_plan(path)
    return planned_for(plan, plan.drafter_of(stored_fingerprint(source)))


def planned_for(plan: Plan, drafter: Mapping[str, Any]) -> Planned:
    """Return the part of a plan for one of its drafters."""
    tree = plan.best_of(drafter["drafter"])["best"]["tree"]
    hardware = plan.content["hardware"]
    machine = str(hardware.get("gpu") or f"{hardware['processor']}, {hardware['threads']} threads")
    return Planned(
        machine=str(without_local_paths(machine)),
        tree=checked_paths(tree, 1 << 30) if tree else (),
        schedule=tuple((first, last, depth) for first, last, depth in drafter["depth_by_batch_size"] or ()),
        drawn=plan.content["temperature"] > 0 and parse_drafter(drafter["drafter"]).options.get("sampled", True),
    )
