"""Seconds of the decoding loop's own steps by the size of the draft, and the choice that follows from them.

The loop runs with the real drafter, so that the seconds hold what a pass alone does not show: the draft's cache that
catches up, masks, rules, the commit. Plain steps and drafts of several sizes take turns in one decoding.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

import torch

from decoding.drafters.base import Drafter
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import StepCount, predicted_speedup
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs
from decoding.policies import PLAIN, Budget
from decoding.rules.best_tree import Paths

LEAST_GAIN = 1.02
"""Speed-up below which speculation is not worth turning on."""
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


# --- measured ---------------------------------------------------------------------------------------------------------


class StepSurvey:
    """Policy that takes plain decoding and the given budgets in turns, and keeps the seconds of their steps."""

    name = "step survey"

    def __init__(self, budgets: Sequence[Budget], rows: int, samples: int) -> None:
        """Until every budget has ``samples`` steps of all ``rows``."""
        # Plain steps before each pair of budgets: their seconds stand in every speed-up.
        order = [turn for index in range(0, len(budgets), 2) for turn in (PLAIN, *budgets[index : index + 2])]
        self._turns: Iterator[Budget] = cycle([budget for budget in order for _ in range(BLOCK)])
        self._left = _ROUNDS * len(order) * BLOCK
        self._rows, self._samples = rows, samples
        self._found: defaultdict[Budget, list[StepSeconds]] = defaultdict(list)
        self._wanted = (PLAIN, *budgets)
        self._last: Budget | None = None

    def is_done(self, in_time: bool = True) -> bool:
        """Return True once every budget has its samples; out of time one each will do, or four rounds of trying."""
        if not in_time and self._left <= 0:
            return True
        return all(len(self._found[budget]) >= (self._samples if in_time else 1) for budget in self._wanted)

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        self._left -= 1
        return next(self._turns)

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float) -> None:
        """Keep a step's seconds unless it is the first of its budget, lacks rows, or a text had no room for it."""
        first, self._last = budget != self._last, budget
        no_room = any(step.room < budget.depth for step in steps)
        if not (first or no_room or len(steps) < self._rows or budget not in self._wanted):
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
    budgets = drafter.budgets_on(target)
    fitting = [each for each in budgets if each.depth <= config.max_new_tokens // 2] or budgets[:1]
    spaced = [fitting[round(index * (len(fitting) - 1) / (_SIZES - 1))] for index in range(_SIZES)]
    survey = StepSurvey(list(dict.fromkeys(spaced)), rows, samples)
    texts = list(islice(cycle(prompts), max(_MOST_TEXTS, 8 * rows)))
    spent = 0.0
    for _, step in Engine(target, drafter, survey).steps(texts, config, batch_size=rows):
        spent += 0.0 if step.is_prefill else step.total_seconds
        if survey.is_done() or (spent > seconds and survey.is_done(in_time=False)):
            break
    found = survey.seconds()
    if PLAIN not in found or len(found) == 1:
        raise ValueError(
            f"the texts of {config.max_new_tokens} new tokens are too short to measure drafts of "
            f"{drafter.max_depth} tokens: raise --max-new-tokens, or give other prompts"
        )
    return found


# --- modelled ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step with one drafter, at one batch size, for every depth and number of nodes.

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


# --- chosen -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A form of a drafter: its spec, its size, and the tokens that a target pass brings with it, the target's own too.

    ``tree``: the paths of its tree, empty for a chain and where the drafter has a tree of its own.
    """

    spec: DrafterSpec
    budget: Budget
    tokens: float
    tree: Paths = ()

    @property
    def is_chain(self) -> bool:
        return self.budget.nodes == self.budget.depth + 1


@dataclass(frozen=True)
class Prediction:
    """A candidate with the seconds of its step and of a plain one. ``tokens`` per step over seconds: the speed-up."""

    candidate: Candidate
    step: StepSeconds
    plain: float

    @property
    def speedup(self) -> float:
        """S = E / (draft + verify + overhead), all in steps of plain decoding, whose own overhead is one of its parts.

        E: `Candidate.tokens`.
        """
        parts = (part / self.plain for part in self.step)
        return predicted_speedup(self.candidate.tokens, *parts)

    @property
    def cost(self) -> float:
        """Seconds of its step in steps of plain decoding: the tokens that it must bring to pay."""
        return self.step.total / self.plain


def best(candidates: Sequence[Candidate], costs: StepCosts) -> Prediction:
    """Return the candidate with the greatest speed-up by these costs; of equals the smaller one."""
    predictions = [Prediction(each, costs.step(each.budget), costs.plain) for each in candidates]
    return max(predictions, key=lambda found: (found.speedup, -found.candidate.budget.nodes))


def depth_by_batch_size(chains: Mapping[int, float], costs: Mapping[int, StepCosts]) -> list[tuple[int, int, int]]:
    """Return the best chain's depth for every batch size up to the largest measured, as (first, last, depth) ranges.

    ``chains``: tokens per pass by depth. ``costs``: by measured batch size; those between are linear. A depth of 0 is
    plain decoding.
    """
    sizes = sorted(costs)
    ranges: list[tuple[int, int, int]] = []
    for rows in range(1, sizes[-1] + 1):
        low = max((size for size in sizes if size <= rows), default=sizes[0])
        high = min(size for size in sizes if size >= rows)
        share = (rows - low) / (high - low) if high > low else 0.0

        def seconds(depth: int, low: int = low, high: int = high, share: float = share) -> float:
            budget = Budget(depth, depth + 1)
            return (1 - share) * costs[low].step(budget).total + share * costs[high].step(budget).total

        gains = {0: LEAST_GAIN} | {depth: tokens * seconds(0) / seconds(depth) for depth, tokens in chains.items()}
        depth = max(gains, key=lambda depth: (gains[depth], -depth))
        first = ranges.pop()[0] if ranges and ranges[-1][2] == depth else rows
        ranges.append((first, rows, depth))
    return ranges
