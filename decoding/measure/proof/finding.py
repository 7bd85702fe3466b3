"""Findings of a proof: each test's verdict with its figures, and all of them together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The verdict of one test. ``p_value`` is None for a test that draws nothing: it fails at the first fault.

    ``told`` False: too little was drawn for the test to find anything; it fails nothing.
    """

    test: str
    passed: bool
    seen: str
    """The test's figures in words, with the first fault."""
    p_value: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    told: bool = True

    @property
    def verdict(self) -> str:
        return "FAIL" if not self.passed else "PASS" if self.told else "OPEN"

    def as_json(self) -> dict[str, Any]:
        p_value = {} if self.p_value is None else {"p_value": self.p_value}
        return {"test": self.test, "verdict": self.verdict, **p_value, "seen": self.seen, **self.figures}


def all_pass(findings: Sequence[Finding]) -> bool:
    """Return True if every test passes; at least one must have run."""
    assert findings, "nothing was tested"
    return all(finding.passed for finding in findings)
