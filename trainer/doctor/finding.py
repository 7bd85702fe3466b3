"""A finding of `headstart doctor`: the outcome of one check, in a sentence, with what to do. Imports no PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``found`` is a sentence with the values, ``remedy`` what to do; only ``ok`` has none.

    ``figures`` are the values as numbers, for JSON.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.status != "ok"), f"{self.check}: whatever is not ok has a remedy"


@dataclass(frozen=True)
class Section:
    """Findings under one title: the machine, the target, a drafter."""

    title: str
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "findings": list(map(asdict, self.findings))}


def has_problem(findings: Sequence[Finding]) -> bool:
    """Return True if any of the findings is a problem."""
    return any(finding.status == "problem" for finding in findings)


def ok(check: str, found: str, **figures: Any) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(check, "ok", found, figures=figures)


def note(check: str, found: str, remedy: str, **figures: Any) -> Finding:
    """Return the finding of something that works, but could cost speed or surprise later."""
    return Finding(check, "note", found, remedy, figures)


def problem(check: str, found: str, remedy: str, **figures: Any) -> Finding:
    """Return the finding of something that will fail, or draft in vain."""
    return Finding(check, "problem", found, remedy, figures)
