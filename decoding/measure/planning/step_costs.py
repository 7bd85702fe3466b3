"""How many seconds a step of the decoding loop takes, by the size of the draft, and which form of a drafter is the
fastest.

The loop runs with the real drafter, so the seconds include everything around the target pass: updating the draft's
cache, masks, rules and the commit. Plain steps and drafts of several sizes alternate within one decoding.
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
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.metrics import StepCount, predicted_speedup
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import pass_over
from decoding.policies import NO_DRAFT, Budget
from decoding.rules.best_tree import Paths

LEAST_GAIN = 1.02
"""Speed-up below which speculation is not worth turning on."""
BLOCK = 4
"""Number of consecutive steps with one budget. The first step is not counted: it includes the cost of the switch."""
_SIZES = 7
"""Largest number of budgets measured for a drafter; the costs of all other budgets are computed."""
_HICCUP = 3.0
"""Steps that take longer than this multiple of the median for their kind are left out: see `_typical`."""
_MOST_TEXTS = 400
_ROUNDS = 4
"""After this many rounds a survey may end without samples of budgets for which texts are too short."""


class StepSeconds(NamedTuple):
    """Seconds of one step of a whole batch, split into drafting, verifying and overhead."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


# --- measured ---------------------------------------------------------------------------------------------------------


class StepSurvey:
    """Policy that alternates between plain decoding and the given budgets, and records how many seconds their steps
    take.
    """

    name = "step survey"

    def __init__(self, budgets: Sequence[Budget], rows: int, samples: int) -> None:
        """Plan a survey that ends when each budget has been measured in ``samples`` steps, each with ``rows`` texts."""
        # Plain steps come before each pair of budgets, because every speed-up depends on their seconds.
        order = [turn for index in range(0, len(budgets), 2) for turn in (NO_DRAFT, *budgets[index : index + 2])]
        self._turns: Iterator[Budget] = cycle([budget for budget in order for _ in range(BLOCK)])
        self._left = _ROUNDS * len(order) * BLOCK
        self._rows, self._samples = rows, samples
        self._seconds: defaultdict[Budget, list[tuple[int, StepSeconds]]] = defaultdict(list)
        self._wanted = (NO_DRAFT, *budgets)
        self._last: Budget | None = None

    def is_done(self, in_time: bool = True) -> bool:
        """Return True once every budget has all samples.

        Once the time limit has passed, measuring stops as soon as each budget has one sample or `_ROUNDS` rounds have
        run.
        """
        if not in_time and self._left <= 0:
            return True
        return all(len(self._seconds[budget]) >= (self._samples if in_time else 1) for budget in self._wanted)

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        self._left -= 1
        return next(self._turns)

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float) -> None:
        """Record a step's seconds, unless the budget has just changed, some rows have no text, or a text had no room
        for the draft.
        """
        first, self._last = budget != self._last, budget
        no_room = any(step.room < budget.depth for step in steps)
        if not (first or no_room or len(steps) < self._rows or budget not in self._wanted):
            drafted = sum(step.drafted for step in steps)
            self._seconds[budget].append((drafted, StepSeconds(draft, verify, total - draft - verify)))

    def seconds(self) -> dict[Budget, StepSeconds]:
        """Return, for each budget, the typical seconds of its steps."""
        return {budget: _typical(steps) for budget, steps in self._seconds.items() if steps}


def _typical(samples: Sequence[tuple[int, StepSeconds]]) -> StepSeconds:
    """Return the mean seconds of the steps, without hiccups. ``samples`` are pairs (number of drafted tokens, seconds).

    The mean is used because speed-ups are ratios of sums. On a busy machine plain steps, which are limited by memory,
    slow down more than wide steps. A lookup has steps with and without a draft, and a draft may take as long as several
    plain steps. A hiccup is therefore a step that takes more than `_HICCUP` times the median of all steps that drafted
    at least as many tokens.
    """
    most = {
        size: _HICCUP * statistics.median(step.total for drafted, step in samples if drafted >= size)
        for size in {drafted for drafted, _ in samples}
    }
    kept = [step for drafted, step in samples if step.total <= most[drafted]]
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
    """Decode the prompts repeatedly in batches of ``rows``; return each budget's seconds per step.

    ``seconds`` limits the total time of all steps except prefills; even so, every budget that fits the texts gets a
    sample. Raises UserError if the texts are too short for all budgets.
    """
    budgets = drafter.budgets_on(target)
    fitting = [budget for budget in budgets if budget.depth <= config.max_new_tokens // 2] or budgets[:1]
    spaced = [fitting[round(index * (len(fitting) - 1) / (_SIZES - 1))] for index in range(_SIZES)]
    survey = StepSurvey(list(dict.fromkeys(spaced)), rows, samples)
    texts = list(islice(cycle(prompts), max(_MOST_TEXTS, 8 * rows)))
    spent = 0.0
    for _, step in Engine(target, drafter, survey).steps(texts, config, batch_size=rows):
        spent += 0.0 if step.is_prefill else step.total_seconds
        if survey.is_done() or (spent > seconds and survey.is_done(in_time=False)):
            break
    measured = survey.seconds()
    if NO_DRAFT not in measured or len(measured) == 1:
        raise UserError(
            f"texts of {config.max_new_tokens} new tokens are too short to measure drafts of "
            f"{drafter.max_depth} tokens: raise --max-new-tokens or use other prompts"
        )
    return measured


# --- modelled ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCosts:
    """Seconds that a step with one drafter takes at one batch size, for every depth and number of nodes.

    ``measured`` holds the measured steps, including `NO_DRAFT`. ``curve`` maps the number of tokens of a target pass to
    its seconds. Costs of other sizes come from a fit: drafting is linear in depth and nodes, overhead is linear in
    nodes, and verifying is linear in the seconds that ``curve`` predicts for the pass.
    """

    measured: Mapping[Budget, StepSeconds]
    curve: Mapping[int, float]

    @property
    def plain(self) -> float:
        """Seconds of a step of plain decoding, including overhead."""
        return self.measured[NO_DRAFT].total

    def step(self, budget: Budget) -> StepSeconds:
        """Return the seconds of a step that drafts a tree of this depth and number of nodes, including the root."""
        if budget == NO_DRAFT:
            return self.measured[NO_DRAFT]
        drafts = {size: held for size, held in self.measured.items() if size != NO_DRAFT}
        if len(drafts) == 1 and budget in drafts:  # a drafter with one size needs no fit
            return drafts[budget]
        chains = all(size.nodes == size.depth + 1 for size in drafts)
        draft = _fitted(
            [((size.depth, 0 if chains else size.nodes), held.draft) for size, held in drafts.items()],
            (budget.depth, 0 if chains else budget.nodes),
        )
        overhead = _fitted([((size.nodes,), held.overhead) for size, held in drafts.items()], (budget.nodes,))
        verify = _fitted(
            [((pass_over(self.curve, size.nodes),), held.verify) for size, held in self.measured.items()],
            (pass_over(self.curve, budget.nodes),),
        )
        return StepSeconds(draft, verify, overhead)


def _fitted(points: Sequence[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """Fit a linear function by least squares of relative errors; return its value at the point ``at``, but at least 0.

    A slope is 0 if the fitted slope is negative or if the points do not determine it.
    """
    used = [axis for axis in range(len(at)) if len({point[axis] for point, _ in points}) > 1]
    values = torch.tensor([value for _, value in points], dtype=torch.float64)
    weights = 1 / values.clamp(min=max(1e-9, float(values.max()) / 20))
    while True:
        rows = [[1.0, *(point[axis] for axis in used)] for point, _ in points]
        design = torch.tensor(rows, dtype=torch.float64)
        scale = design.abs().amax(0)  # the columns have different units
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
    """A form that a drafter may take: its spec, its size, and its tokens per target pass.

    ``tree``: the paths of the tree, if the plan chose a tree; otherwise empty.
    """

    spec: DrafterSpec
    budget: Budget
    tokens_per_pass: float
    tree: Paths = ()

    @property
    def is_chain(self) -> bool:
        return self.budget.nodes == self.budget.depth + 1


@dataclass(frozen=True)
class Prediction:
    """A candidate, the seconds that its step and a plain step take, and the resulting speed-up."""

    candidate: Candidate
    step: StepSeconds
    plain: float

    @property
    def speedup(self) -> float:
        """Speed-up S = E / (draft + verify + overhead), with E = `Candidate.tokens_per_pass` and all costs in units of
        a step of plain decoding, which includes the overhead of that step.
        """
        parts = (part / self.plain for part in self.step)
        return predicted_speedup(self.candidate.tokens_per_pass, *parts)

    @property
    def cost(self) -> float:
        """Cost of the step in units of a plain step; with this many tokens per target pass the draft breaks even."""
        return self.step.total / self.plain


def best(candidates: Sequence[Candidate], costs: StepCosts) -> Prediction:
    """Return the candidate with the greatest speed-up at these costs; if several are equal, the smallest one."""
    predictions = [Prediction(candidate, costs.step(candidate.budget), costs.plain) for candidate in candidates]
    return max(predictions, key=lambda prediction: (prediction.speedup, -prediction.candidate.budget.nodes))


def depth_by_batch_size(chains: Mapping[int, float], costs: Mapping[int, StepCosts]) -> list[tuple[int, int, int]]:
    """Return the best chain depth for every batch size up to the largest measured one, as ranges (first, last, depth).

    ``chains`` maps depth to tokens per target pass. ``costs`` maps measured batch sizes to costs; for batch sizes
    between them, costs are interpolated linearly. Depth 0 is plain decoding.
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
