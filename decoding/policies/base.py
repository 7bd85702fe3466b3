"""The policy protocol: a policy chooses before each step how much to draft, and observes its result afterwards."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from decoding.metrics import StepCount


class Budget(NamedTuple):
    """The bounds of one draft: ``depth`` of its deepest token, ``nodes`` of its tree, the root included."""

    depth: int
    nodes: int


PLAIN = Budget(0, 1)
"""Draft nothing: plain decoding."""


class Policy(Protocol):
    """Chooser of how much to draft, before each step of the loop; it observes each step's counts and seconds."""

    name: str

    def begin(self, budgets: Sequence[Budget], rows: int, rehearse: "Rehearsal", /) -> None:
        """Prepare for batches of up to ``rows`` texts; a policy that measures first may call ``rehearse``."""

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        """Return one of the drafter's ``budgets`` (by increasing cost, `PLAIN` not among them), or `PLAIN`."""

    def observe(
        self,
        budget: Budget,
        rows: int,
        steps: Sequence[StepCount],
        draft_seconds: float,
        verify_seconds: float,
        total_seconds: float,
        /,
    ) -> None:
        """Learn from a step of ``budget``: one count per row; the seconds are the whole batch's."""


Rehearsal = Callable[[Policy, int], Iterator[object]]
"""Function (policy, rows) -> steps of the first prompts, decoded by that policy; the texts are dropped."""
