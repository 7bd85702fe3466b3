"""Running figures of a text while it is decoded."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from decoding.generate import Step


@dataclass
class Tally:
    """Figures of the steps added so far. Prefills count in ``prefill_seconds`` alone, their token nowhere.

    ``lengths`` is the histogram of accepted lengths: number of passes by their accepted drafted tokens. Seconds are the
    loop's own; what its caller does between two steps is not among them.
    """

    passes: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(steps: Iterable[Step]) -> "Tally":
        """Return the figures of finished steps."""
        tally = Tally()
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        """Count a step."""
        if step.is_prefill:
            self.prefill_seconds += step.total_seconds
            return
        self.passes += 1
        self.tokens += len(step.tokens)
        self.accepted += step.accepted
        self.drafted += step.drafted
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.total_seconds += step.total_seconds
        self.lengths[step.accepted] += 1

    def watch(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Count each step and hand it on."""
        for step in steps:
            self.add(step)
            yield step

    @property
    def overhead_seconds(self) -> float:
        """Seconds of the loop in neither the draft nor the target pass."""
        return max(0.0, self.total_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass, the target's own included; 0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding; 0 before the first pass."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0
