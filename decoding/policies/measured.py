"""The measured policy: most tokens per second by the running acceptance and the costs measured on this machine."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

from decoding.metrics import StepCount
from decoding.model.cost_curve import Costs
from decoding.policies.acceptance import Acceptance
from decoding.policies.base import PLAIN, Budget, Rehearsal
from decoding.policies.survey import Survey

_SURVEY_SECONDS = 2.0
_GAIN_TO_SWITCH = 1.02
"""Times the rate of the choice in use that another must promise: without it equally good budgets would alternate."""
_DOUBT = 0.6
"""Added to that where the two draft other shapes, over the root of the trials of the less known one."""
_LEAST_GAIN = 1.03
"""Times the speed of plain decoding, which is the surer of the two, that drafting must promise."""
_EXPLORED_SHARE = 0.01
"""Share of the tokens that trials of other budgets may cost."""
_LEAST_PRICE, _DEAREST = 0.15, 2.0
"""Least price of a trial in tokens, and the most tokens that are saved up for trials."""
_LEVEL_RATE, _FACTOR_RATE, _HICCUP = 0.05, 0.2, 0.2
"""Share of a surprise in a step's seconds that the level takes over, and a budget's factor; the largest surprise."""
_USE_RATE = 0.05
"""Share of a step that the use of the budgets takes over."""


class _Choice:
    """One of the budgets: its cost beside the measured one, relative to the budget in use, and its last step."""

    __slots__ = ("budget", "factor", "last_step")

    def __init__(self, budget: Budget) -> None:
        self.budget, self.factor, self.last_step = budget, 1.0, 0


class MeasuredPolicy:
    """Takes the budget, or plain decoding, of most expected tokens per second. Depends on the clock.

    The costs are given, or measured once, before the first batch of other rows than all before: two seconds of steps on
    its own prompts; those of rows between two known ones are not measured. Afterwards the budget in use shows the
    present speed of the machine, and trials of other budgets their costs relative to it. Trials cost a hundredth of the
    tokens: the dearer a budget, the rarer its trials.
    """

    name = "measured"

    def __init__(
        self, costs: Mapping[int, Costs] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``costs``: by rows; those of rows between are interpolated."""
        self._costs, self._clock = dict(costs or {}), clock
        self._acceptance = Acceptance()
        self._budgets: Sequence[Budget] = ()
        self._choices: list[_Choice] = []
        self._seconds: dict[tuple[int, Budget], float] = {}  # of steps, as measured at the start
        self._of_choices: dict[int, list[float]] = {}  # by rows, of each choice
        self._current = 0  # the place of the choice in use
        self._level = 1.0  # seconds now over those measured at the start
        self._use = 1.0  # share of a budget's extra cost that its drafts have: some find nothing to draft
        self._rate = 0.0  # tokens expected in a second of the measurement
        self._steps = 0
        self._saved, self._price = 0.0, 0.0  # tokens saved up for trials, and expected to be lost by the last one

    def begin(self, budgets: Sequence[Budget], rows: int, rehearse: Rehearsal) -> None:
        """Measure the costs of one row and of ``rows``, where they are not known yet."""
        if not budgets or (self._costs and min(self._costs) <= rows <= max(self._costs)):
            return
        missing = sorted({1, rows} - set(self._costs))
        for count in missing:
            self._survey(budgets, count, _SURVEY_SECONDS / len(missing), rehearse)
        self._seconds.clear()
        self._of_choices.clear()

    def _survey(self, budgets: Sequence[Budget], rows: int, seconds: float, rehearse: Rehearsal) -> None:
        """Measure the costs of batches of ``rows``: at least two steps, and no more after ``seconds``."""
        survey, began = Survey(budgets, self._acceptance), self._clock()
        for turn, _ in enumerate(rehearse(survey, rows)):
            if turn == 0 and not survey.steps:
                began = self._clock()  # the first prefill takes its own time
            if survey.done or (survey.steps != 1 and self._clock() - began > seconds):
                break
        if survey.steps > 1:  # one step has one size, from which no cost follows for the others
            self._costs[rows] = survey.costs()

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets or not self._costs:
            return budgets[-1] if budgets else PLAIN
        if budgets != self._budgets:
            self._budgets, self._choices = budgets, [_Choice(budget) for budget in (PLAIN, *budgets)]
            self._current = len(budgets)
            self._of_choices.clear()
        measured = self._measured(rows)
        tokens = [1.0, *self._acceptance.expected_tokens(budgets)]
        seconds = [
            choice.factor * (measured[0] + self._use * (whole - measured[0]))
            for choice, whole in zip(self._choices, measured, strict=True)
        ]
        rates = [expected / cost for expected, cost in zip(tokens, seconds, strict=True)]
        rates[0] *= _LEAST_GAIN
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > self._margin(best) * rates[self._current]:
            self._current = best
        self._rate = rates[self._current]
        self._saved = min(self._saved + _EXPLORED_SHARE * tokens[self._current], _DEAREST)
        chosen = self._choices[self._trial(tokens, seconds)]
        self._steps += 1
        chosen.last_step = self._steps
        return chosen.budget

    def _margin(self, other: int) -> float:
        """Return the multiple of the present choice's rate that another must promise: larger where less is known."""
        budgets = [self._choices[place].budget for place in (self._current, other) if place]
        if not other or (len(budgets) == 2 and self._acceptance.related(*budgets)):
            return _GAIN_TO_SWITCH
        return _GAIN_TO_SWITCH + _DOUBT / math.sqrt(1 + min(map(self._acceptance.trials, budgets), default=0.0))

    def _trial(self, tokens: Sequence[float], seconds: Sequence[float]) -> int:
        """Return the place of the choice for this step: the one in use, or one that is to be tried.

        A choice's urgency is the steps since its last use, over the price of a trial; the most urgent one is tried as
        soon as its price is saved up.
        """
        chosen, most_urgent, needed = self._current, 0.0, 0.0
        if self._saved >= _LEAST_PRICE:
            for place, choice in enumerate(self._choices):
                price = max(_LEAST_PRICE, seconds[place] * self._rate - tokens[place])
                urgency = (self._steps - choice.last_step) / price
                if place != self._current and urgency > most_urgent and price <= _DEAREST:
                    chosen, most_urgent, needed = place, urgency, price
        affordable = needed <= self._saved
        self._price = needed if affordable else 0.0
        return chosen if affordable else self._current

    def observe(self, budget: Budget, rows: int, steps: Sequence[StepCount], *seconds: float) -> None:
        place = next((place for place, choice in enumerate(self._choices) if choice.budget == budget), None)
        if place is None or not steps or seconds[-1] <= 0:
            return
        choice, measured = self._choices[place], self._measured(rows)
        drafted = max(step.drafted for step in steps)
        actual = measured[place]
        if drafted + 1 != budget.nodes:
            actual = self._step(rows, Budget(min(budget.depth, drafted), drafted + 1))
        extra = measured[place] - measured[0]
        if extra > 0 and any(step.room >= budget.depth for step in steps):
            self._use += _USE_RATE * (min(max((actual - measured[0]) / extra, 0.0), 1.0) - self._use)
        self._acceptance.observe(budget, steps)
        expected = actual * choice.factor
        surprise = min(max(seconds[-1] / (expected * self._level), 1 - _HICCUP), 1 + _HICCUP)
        if place == self._current:
            self._level *= surprise**_LEVEL_RATE
            return
        choice.factor *= surprise**_FACTOR_RATE
        lost = expected * self._rate - sum(step.emitted for step in steps) / len(steps)
        if lost > 0:  # a trial that was better than the choice in use is free, so that more can follow
            self._saved -= self._price
        self._price = 0.0  # a plain step at a text's end, which nobody chose, is no trial

    def _measured(self, rows: int) -> list[float]:
        """Return the seconds of each choice as measured at the start."""
        if rows not in self._of_choices:
            self._of_choices[rows] = [self._step(rows, choice.budget) for choice in self._choices]
        return self._of_choices[rows]

    def _step(self, rows: int, budget: Budget) -> float:
        """Return the seconds of a step as measured at the start, linear between the measured rows; above 0."""
        if (rows, budget) not in self._seconds:
            below = max((count for count in self._costs if count <= rows), default=min(self._costs))
            above = min((count for count in self._costs if count >= rows), default=below)
            low, high = (self._costs[count].step(*budget) for count in (below, above))
            share = (rows - below) / (above - below) if above > below else 0.0
            self._seconds[rows, budget] = max(low + share * (high - low), 1e-9)
        return self._seconds[rows, budget]
