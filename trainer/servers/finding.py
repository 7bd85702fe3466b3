"""A finding: the outcome of one comparison between a server and this project's own loop."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TEMPLATE = "token ids of the prompt"
TEXT = "the target's greedy text"
ROPE = "rope and window settings"
VOCABULARY = "vocabulary sizes"
TOP_1 = "the draft's top-1"
ACCEPTANCE = "acceptance by position"
SAMPLING = "argmax or sampled drafts"
STEPS = (TEMPLATE, TEXT, ROPE, VOCABULARY, TOP_1, ACCEPTANCE, SAMPLING)
"""All comparisons, in the order in which a later difference may follow from an earlier one."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one of `STEPS`. ``differs`` None: it could not be compared, and ``found`` says why.

    ``found`` is a sentence with the figures; ``remedy`` says what to do about a difference.
    """

    step: str
    differs: bool | None
    found: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.step in STEPS, self.step
        assert bool(self.differs) == bool(self.remedy), "a difference has a remedy, and nothing else has"


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of `STEPS`."""

    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding | None:
        """The first difference; None if nothing differs."""
        return next((finding for finding in self.findings if finding.differs), None)

    @property
    def others(self) -> tuple[Finding, ...]:
        """The differences behind the first, which may follow from it."""
        return tuple(finding for finding in self.findings if finding.differs)[1:]

    def as_json(self) -> dict[str, Any]:
        """Return JSON values: the name of the first difference, or null, and every finding."""
        return {"first": None if self.first is None else self.first.step, "findings": list(map(asdict, self.findings))}


def equal(step: str, found: str, **figures: Any) -> Finding:
    """Return the finding of a comparison without a difference."""
    return Finding(step, False, found, figures=figures)


def unknown(step: str, reason: str) -> Finding:
    """Return the finding of a comparison that could not be made."""
    return Finding(step, None, reason)


def joined(step: str, differences: Sequence[tuple[str, str]], otherwise: str, **figures: Any) -> Finding:
    """Return a finding of several differences, each with its remedy; without any, one that says ``otherwise``."""
    if not differences:
        return equal(step, otherwise, **figures)
    found = "; ".join(found for found, _ in differences)
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in differences))
    return Finding(step, True, found, remedies, figures)
