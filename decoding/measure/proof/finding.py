"""`Finding`: the outcome of one check of a proof, server, machine or model. This module does not import PyTorch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "open", "problem"]
"""``note``: the checked thing works, but may cost speed. ``open``: the check could not decide. ``problem``: the checked
thing fails, or its drafts are useless."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: a sentence, a remedy if there is one, and figures for JSON.

    Tests that draw samples have ``figures["p_value"]``.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """False only for a problem."""
        return self.status != "problem"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judged(check: str, passed: bool, found: str, **figures: Any) -> Finding:
    """Return the finding of a test that passes or fails."""
    return Finding(check, "ok" if passed else "problem", found, figures=figures)


def ok(check: str, found: str, **figures: Any) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(check, "ok", found, figures=figures)


def note(check: str, found: str, remedy: str, **figures: Any) -> Finding:
    """Return the finding of something that works but may cost speed or cause surprises later."""
    return Finding(check, "note", found, remedy, figures)


def undecided(check: str, reason: str) -> Finding:
    """Return the finding of a check that could not be made or had too few samples."""
    return Finding(check, "open", reason)


def problem(check: str, found: str, remedy: str, **figures: Any) -> Finding:
    """Return the finding of something that fails or whose drafts are useless."""
    return Finding(check, "problem", found, remedy, figures)


def all_pass(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is a problem; at least one check must have run."""
    every = list(findings)
    assert every, "nothing was tested"
    return all(finding.passed for finding in every)
