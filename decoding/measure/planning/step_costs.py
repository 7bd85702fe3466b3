"""Seconds of the decoding loop's own steps by the size of the draft, and a model of those in between.

The loop runs with the real drafter, so that the seconds hold what a pass alone does not show: the draft's cache that
catches up, masks, rules, the commit. Plain steps and drafts of several sizes take turns in one decoding.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

import torch

from decoding.drafters.base import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs
from decoding.policies import PLAIN, Budget

BLOCK = 4
"""Steps of one budget in a row. The first is not counted: it pays for the change."""
_SIZES = 7
"""Most budgets of a drafter that are measured; the others are computed."""
_HICCUP = 3.0
"""Times the median of a budget's steps beyond which a step is left out."""
_MOST_TEXTS = 400
_ROUNDS = 4
"""Rounds of all budgets after which a survey ends without a sample of each: texts have no room for the deepest."""


class StepSeconds(NamedTuple):
    """Seconds of one step of a whole batch, in the loop's three parts."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


class StepSurvey:
    """Policy that takes plain decoding and the given budgets in turns, and keeps the seconds of their steps."""

    name = "step survey"

    def __init__(self, budgets: Sequence[Budget], rows: int, samples: int) -> None:
        """Until every budget has ``samples`` steps of all ``rows``."""
        # Plain steps before each pair of budgets: their seconds stand in every speed-up.
        order = [turn for place in range(0, len(budgets), 2) for turn in (PLAIN, *budgets[place : place + 2])]
        self._turns: Iterator[Budget] = cycle([budget for budget in order for _ in range(BLOCK)])
        self._left = _ROUNDS * len(order) * BLOCK
        self._rows, self._samples = rows, samples
        self._found: defaultdict[Budget, list[StepSeconds]] = defaultdict(list)
        self._wanted = (PLAIN, *budgets)
        self._last: Budget | None = None

    @property
    def done(self) -> bool:
        """True once every budget has its samples."""
        return all(len(self._found[budget]) >= self._samples for budget in self._wanted)

    @property
    def measured(self) -> bool:
        """True once every budget has a sample, or has been tried for four rounds."""
        return self._left <= 0 or all(self._found[budget] for budget in self._wanted)

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        self._left -= 1
        return next(self._turns)

    def observe(self, budget: Budget, rows: int, steps: Sequence[StepCount], *seconds: float) -> None:
        """Keep a step's seconds unless it is the first of its budget, lacks rows, or a text had no room for it."""
        first, self._last = budget != self._last, budget
        if first or rows < self._rows or budget not in self._wanted or any(step.room < budget.depth for step in steps):
            return
        draft, verify, total = seconds
        self._found[budget].append(StepSeconds(draft, verify, total - draft - verify))

    def seconds(self) -> dict[Budget, StepSeconds]:
        """Return the usual seconds of each budget's steps."""
        return {budget: _typical(found) for budget, found in self._found.items() if found}


def _typical(samples: Sequence[StepSeconds]) -> StepSeconds:
    """Return the mean of the steps within `_HICCUP` times their median.

    A mean, as speed-ups are ratios of sums: a lookup's steps are of two kinds, with and without a draft, and on a busy
    machine plain steps, which wait for memory, are slowed down more than wide ones.
    """
    most = _HICCUP * statistics.median(sample.total for sample in samples)
    kept = [sample for sample in samples if sample.total <= most]
    return StepSeconds(*(statistics.fmean(part) for part in zip(*kept, strict=True)))


def surveyed_budgets(budgets: Sequence[Budget], room: int) -> list[Budget]:
    """Return up to seven of a drafter's budgets of at most ``room`` tokens' depth, evenly spaced, both ends among them.

    The smallest one is returned in any case.
    """
    budgets = [budget for budget in budgets if budget.depth <= room] or budgets[:1]
    last = len(budgets) - 1
    return list(dict.fromkeys(budgets[round(place * last / (_SIZES - 1))] for place in range(_SIZES)))


def survey_steps(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    rows: int,
    samples: int = 24,
    seconds: float = 10.0,
) -> dict[Budget, StepSeconds]:
    """Decode the prompts, again and again, in batches of ``rows``, and return the seconds of steps by budget.

    ``seconds`` bounds the time of the steps, prefills apart; every budget that the texts have room for gets a sample
    anyway. ValueError where they have room for none.
    """
    survey = StepSurvey(surveyed_budgets(drafter.budgets, config.max_new_tokens // 2), rows, samples)
    texts = list(islice(cycle(prompts), max(_MOST_TEXTS, 8 * rows)))
    spent = 0.0
    for _, step in Engine(target, drafter, survey).steps(texts, config, batch_size=rows):
        spent += 0.0 if step.is_prefill else step.total_seconds
        if survey.done or (survey.measured and spent > seconds):
            break
    found = survey.seconds()
    if PLAIN not in found or len(found) == 1:
        raise ValueError(
            f"the texts of {config.max_new_tokens} new tokens are too short to measure drafts of "
            f"{drafter.max_depth} tokens: raise --max-new-tokens, or give other prompts"
        )
    return found


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step with one drafter, at one batch size and context, for every depth and number of nodes.

    ``found`` are the measured steps, `PLAIN` among them; ``curve`` the seconds of a target pass alone by its tokens.
    Between the measured ones drafting is linear in depth and nodes, the overhead in nodes, and verifying follows the
    curve: its seconds are linear in those of the pass alone.
    """

    found: Mapping[Budget, StepSeconds]
    curve: Mapping[int, float]

    @property
    def plain(self) -> float:
        """Seconds of a step of plain decoding, its overhead included."""
        return self.found[PLAIN].total

    def step(self, budget: Budget) -> StepSeconds:
        """Return the seconds of a step that drafts a tree of this depth and these nodes, the root included."""
        if budget == PLAIN:
            return self.found[PLAIN]
        drafts = {size: held for size, held in self.found.items() if size != PLAIN}
        if len(drafts) == 1 and budget in drafts:  # a drafter of one size: nothing is to be computed
            return drafts[budget]
        passes = Costs(self.curve)
        chains = all(size.nodes == size.depth + 1 for size in drafts)
        draft = _fitted(
            [((size.depth, 0 if chains else size.nodes), held.draft) for size, held in drafts.items()],
            (budget.depth, 0 if chains else budget.nodes),
        )
        overhead = _fitted([((size.nodes,), held.overhead) for size, held in drafts.items()], (budget.nodes,))
        verify = _fitted(
            [((passes.pass_over(size.nodes),), held.verify) for size, held in self.found.items()],
            (passes.pass_over(budget.nodes),),
        )
        return StepSeconds(draft, verify, overhead)

    def of_chains(self, depths: Iterable[int]) -> dict[int, float]:
        """Return the cost of a step by the depth of its chain, in steps of plain decoding."""
        return {depth: self.step(Budget(depth, depth + 1)).total / self.plain for depth in depths}


def _fitted(points: Sequence[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """Return the value ``at`` a place by least squares of relative errors, with an offset and no negative slope.

    A slope that comes out negative, or cannot be told by these points, is 0. The value is never negative.
    """
    used = [axis for axis in range(len(at)) if len({place[axis] for place, _ in points}) > 1]
    values = torch.tensor([value for _, value in points], dtype=torch.float64)
    weights = 1 / values.clamp(min=max(1e-9, float(values.max()) / 20))
    while True:
        rows = [[1.0, *(place[axis] for axis in used)] for place, _ in points]
        design = torch.tensor(rows, dtype=torch.float64)
        scale = design.abs().amax(0)  # seconds beside node counts
        solved = (
            torch.linalg.lstsq(design / scale * weights[:, None], values * weights, driver="gelsd").solution / scale
        )
        if all(slope >= 0 for slope in solved[1:]):
            break
        used.pop(int(solved[1:].argmin()))
    return max(
        0.0, float(solved[0]) + sum(float(slope) * at[axis] for slope, axis in zip(solved[1:], used, strict=True))
    )
