"""The survey: a short rehearsal that takes a drafter's budgets in turn and notes what their steps cost."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle

from decoding.metrics import StepCount
from decoding.model.cost_curve import Costs
from decoding.policies.acceptance import Acceptance
from decoding.policies.base import PLAIN, Budget

_SIZES, _ROUNDS = 6, 20


class Survey:
    """Policy that takes plain decoding and up to six of the budgets in turn, twenty times."""

    name = "survey"

    def __init__(self, budgets: Sequence[Budget], acceptance: Acceptance) -> None:
        """``acceptance`` learns from the steps as well."""
        last = len(budgets) - 1
        spaced = [budgets[round(place * last / (_SIZES - 1))] for place in range(_SIZES)]
        # The ends first: a target so slow that time is up before the first round is done still gets a line.
        turns = tuple(dict.fromkeys([PLAIN, budgets[last], *spaced]))
        self._turns, self._whole, self._acceptance = cycle(turns), _ROUNDS * len(turns), acceptance
        self.steps = 0
        """Steps chosen by the survey; a plain step where no text has room for a draft is not."""
        self._passes: defaultdict[int, list[float]] = defaultdict(list)
        self._drafts: defaultdict[int, list[float]] = defaultdict(list)

    @property
    def done(self) -> bool:
        """True after twenty rounds."""
        return self.steps >= self._whole

    def begin(self, *_: object) -> None:
        """Do nothing: a survey is the preparation."""

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        self.steps += 1
        return next(self._turns)

    def observe(self, budget: Budget, rows: int, steps: Sequence[StepCount], *seconds: float) -> None:
        draft_seconds, _, total_seconds = seconds
        drafted = max((step.drafted for step in steps), default=0)
        self._passes[drafted + 1].append(total_seconds - draft_seconds)
        self._drafts[min(budget.depth, drafted)].append(draft_seconds)
        self._acceptance.observe(budget, steps)

    def costs(self) -> Costs:
        """Take the lower third of the samples, since hiccups only add; a larger size is taken to cost no less."""
        passes, drafts = (
            {size: sorted(times)[(len(times) - 1) // 3] for size, times in samples.items()}
            for samples in (self._passes, self._drafts)
        )
        return Costs(_never_falling(passes), _never_falling(drafts))


def _never_falling(curve: Mapping[int, float]) -> dict[int, float]:
    """Return the curve nearest by least squares that never falls: neighbours that fall share their mean."""
    blocks: list[tuple[float, int]] = []  # mean, sizes
    for _, seconds in sorted(curve.items()):
        mean, sizes = seconds, 1
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean, sizes = (mean * sizes + before * others) / (sizes + others), sizes + others
        blocks.append((mean, sizes))
    means = [mean for mean, sizes in blocks for _ in range(sizes)]
    return dict(zip(sorted(curve), means, strict=True))
