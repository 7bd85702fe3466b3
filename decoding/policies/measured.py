"""Policies that go by what was measured on this machine."""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from decoding.metrics import StepCount
from decoding.policies.base import PLAIN, Budget, Policy
from decoding.policies.simple import FixedPolicy


class _Acceptance:
    """Decayed counts of acceptance by position, conditional on the one before; what is not offered is not accepted,
    unless the text had no room for it: of such positions nothing is known.

    All chains are one family, since a cut chain is the same chain; each tree shape is a family of its own. A position's
    prior is what the other families saw there, theirs is the position before, and the first position's is even odds.
    """

    _MEMORY = 0.96  # what a step leaves of the counts before it: about 25 steps are remembered
    _PRIOR_WEIGHT = 1.5  # in observations: less than one imagined success, so that a useless drafter is found out soon

    def __init__(self) -> None:
        # For each family and position: times accepted, times the position before was.
        self._counts: defaultdict[Budget | None, list[list[float]]] = defaultdict(list)
        # Tokens drafted, and tokens that the budgets allowed.
        self._drafted, self._allowed = 1.0, 1.0
        self._expected: defaultdict[Budget | None, list[float]] = defaultdict(list)  # by depth, until the counts change

    @property
    def fill(self) -> float:
        """The share of its budget that the drafter uses: below 1 if it often finds nothing, or stops by itself."""
        return self._drafted / self._allowed

    def forget(self, kept: float) -> None:
        """Trust what was seen so far only by the share ``kept``."""
        for table in self._counts.values():
            for entry in table:
                entry[0] *= kept
                entry[1] *= kept
        self._drafted *= kept
        self._allowed *= kept
        self._expected.clear()

    def observe(self, budget: Budget, steps: Sequence[StepCount]) -> None:
        self.forget(self._MEMORY)
        table = self._counts[self._family(budget)]
        table += [[0.0, 0.0] for _ in range(budget.depth - len(table))]
        for step in steps:
            # Where a text ends inside the draft, nothing is known of the positions behind its end.
            ended = step.emitted <= step.accepted
            for position in range(min(step.accepted + (0 if ended else 1), budget.depth, step.room)):
                table[position][0] += position < step.accepted
                table[position][1] += 1
        if _has_room(budget, steps):
            self._drafted += max(step.drafted for step in steps)
            self._allowed += budget.nodes - 1

    def expected_tokens(self, budget: Budget) -> float:
        """Tokens per row and target pass, the target's own included: 1 + Σi Π(j≤i) aj."""
        family = self._family(budget)
        if len(self._expected[family]) <= budget.depth:
            self._expected[family] = self._expected_by_depth(family, 2 * budget.depth)
        return self._expected[family][budget.depth]

    def _expected_by_depth(self, family: Budget | None, depth: int) -> list[float]:
        tables = [table for key, table in self._counts.items() if key != family] + [self._counts.get(family, [])]
        rate, reached, expected = 0.5, 1.0, [1.0]
        for position in range(depth):
            for table in tables:
                if position < len(table):
                    accepted, trials = table[position]
                    rate = (accepted + self._PRIOR_WEIGHT * rate) / (trials + self._PRIOR_WEIGHT)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected

    @staticmethod
    def _family(budget: Budget) -> Budget | None:
        return None if budget.nodes == budget.depth + 1 else budget


def _has_room(budget: Budget, steps: Sequence[StepCount]) -> bool:
    """Whether any row could have taken a draft as deep as the budget."""
    return any(step.room >= budget.depth for step in steps)


Points = Sequence[tuple[float, float]]


def _interpolate(points: Points, at: float, extrapolate: bool) -> float:
    """Piecewise linear through ``points``, sorted by x; flat before them; behind them flat, or on as a rising line."""
    after = bisect_right(points, (at, math.inf))
    if after == 0 or len(points) == 1 or (after == len(points) and not extrapolate):
        return points[max(after - 1, 0)][1]
    right_end = min(after, len(points) - 1)
    (left, low), (right, high) = points[right_end - 1], points[right_end]
    slope = (high - low) / (right - left)
    return low + slope * (at - left) if at <= right else high + max(0.0, slope) * (at - right)


def _alike(rows: int, other: int) -> bool:
    """Within a factor of two: what was measured for one number of rows will do for the other."""
    return rows <= 2 * other and other <= 2 * rows


class _Costs:
    """Seconds by rows and size, learned from samples; what was not tried is inferred from what was.

    ``known``: a curve of one row to start from. Costs of ``for_slope`` sizes show how they go on behind the largest.
    """

    _SAMPLES = 15
    _SURPRISE = 1.5  # times what the other sizes let expect: not believed before the third sample

    def __init__(self, for_slope: int, known: Mapping[int, float] | None = None) -> None:
        self._for_slope = for_slope
        self._samples: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=self._SAMPLES))
        self._curves: dict[int, dict[int, float]] = {}  # by rows and size, sizes sorted
        self._known = dict(sorted((known or {}).items()))

    def add(self, rows: int, size: int, seconds: float) -> None:
        samples = self._samples[rows, size]
        samples.append(seconds)
        # A hiccup only ever adds time, so the lower third is steadier than the median, above all for few samples.
        typical = sorted(samples)[(len(samples) - 1) // 3]
        curve = self._curves.setdefault(rows, {})
        others = [point for point in curve.items() if point[0] != size]
        if len(others) < 2:
            doubtful = len(samples) < 2
        else:
            doubtful = len(samples) < 3 and typical > self._SURPRISE * _interpolate(others, size, extrapolate=True)
        if not doubtful:
            self._curves[rows] = dict(sorted([*others, (size, typical)]))

    def sizes(self, rows: int) -> set[int]:
        """Those measured for these rows, or for some alike in number."""
        return {size for other, curve in self._curves.items() if _alike(rows, other) for size in curve}

    def curve(self, rows: int) -> Callable[[float], float]:
        """Seconds by size: through what was measured with these rows, in the shape of the nearest curve there is."""
        own = list(self._curves.get(rows, {}).items())
        shape = self._shape(rows)
        if not shape:
            return lambda size: self._at(own, size) if own else 0.0
        factors = [(size, seconds / self._at(shape, size)) for size, seconds in own if self._at(shape, size) > 0]
        return lambda size: self._at(shape, size) * (_interpolate(factors, size, extrapolate=False) if factors else 1)

    def _shape(self, rows: int) -> Points:
        """The curve of the nearest other rows; one that lacks a size for its slope counts as e times farther."""
        shapes = {other: curve for other, curve in self._curves.items() if other != rows and curve}
        if self._known:
            shapes.setdefault(1, self._known)
        lacking = {other: max(0, self._for_slope - len(curve)) for other, curve in shapes.items()}
        nearest = min(shapes, key=lambda other: abs(math.log(other / rows)) + lacking[other], default=rows)
        return list(shapes.get(nearest, {}).items())

    def _at(self, points: Points, size: float) -> float:
        return _interpolate(points, size, extrapolate=len(points) >= self._for_slope)


class Guarded:
    """Another policy, offered only the budgets that pay by the measured costs and acceptance. Depends on the clock.

    Plain decoding is timed first (two steps), then the smallest budget; larger ones come only behind those that pay, at
    most twice the largest block measured. When nothing pays, it decodes plainly for so long that what the attempt
    lost becomes a small share of the time, and tries the smallest budget again; the wait doubles twice at most.
    """

    _FIRST_TRIALS = 2  # of the smallest budget: one of them may be a hiccup
    _MARGIN = 1.03  # what speculation must gain over plain decoding
    _DEAREST_PLAIN = 1.25  # times the cheapest other step: if it looks dearer than that, its timing met hiccups
    _GROWTH = 2  # times the largest block measured: the largest tried next
    _LOSS_SHARE = 0.02  # of the time, that failed attempts may cost while they are frequent
    _WORST_LOSS = 4.0  # plain steps; what looks larger is rather a hiccup
    _SHORTEST_WAIT = 4  # plain steps
    _DOUBLINGS = 2  # of the wait, at most
    _DETOUR_SHARE = 0.01  # of the time, to look again at what is not in use
    _STALE_STEPS = 24  # not in use for so long, something is worth a look: plain decoding,
    _looks_around = False  # and the budgets beside the choice

    def __init__(self, policy: Policy, cost_curve: Mapping[int, float] | None = None) -> None:
        """``cost_curve``: seconds of a target pass of one row by its nodes, as `measure_cost_curve` gives them."""
        self.name = f"guarded {policy.name}"
        self._policy = policy
        self._acceptance = _Acceptance()
        # The step from one node to two is often a jump that does not go on, so a pass's slope takes three sizes.
        self._draft_costs, self._pass_costs = _Costs(for_slope=2), _Costs(3, cost_curve)
        self._trials: dict[int, int] = {}  # speculative steps by rows
        self._waited, self._failures, self._loss = 0, 0, 0.0
        self._steps, self._last_used = 0, dict[tuple[int, Budget], int]()
        self._credit, self._price = 0.0, 0.0  # seconds saved up for detours, and the next one's

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        measured = self._pass_costs.sizes(rows)
        if not budgets or 1 not in measured:
            return PLAIN
        tried = sum(trials for other, trials in self._trials.items() if _alike(rows, other))
        if tried < self._FIRST_TRIALS and self._acceptance.expected_tokens(budgets[0]) > 1.1:
            return budgets[0]
        reach = max(budgets[0].nodes, self._GROWTH * max(measured))
        within = [budget for budget in budgets if budget.nodes <= reach]
        costs = self._costs(within, rows)
        rates = {budget: self._acceptance.expected_tokens(budget) / cost for budget, cost in costs.items()}
        paying = [budget for budget in within if rates[budget] > self._MARGIN * rates[PLAIN]]
        if paying:
            choice = self._pick(paying, rates, rows)
            return self._detour(choice, within, rates, rows)
        return budgets[0] if self._waited >= self._wait() else PLAIN

    def observe(self, budget: Budget, rows: int, steps: Sequence[StepCount], *seconds: float) -> None:
        draft_seconds, verify_seconds, total_seconds = seconds
        drafted = max((step.drafted for step in steps), default=0)
        self._draft_costs.add(rows, min(budget.depth, drafted), draft_seconds)
        self._pass_costs.add(rows, drafted + 1, max(verify_seconds, total_seconds - draft_seconds))
        if budget.depth > 0:
            self._learn(budget, rows, steps)
        else:
            self._waited += 1
        costs = self._costs([budget], rows)
        if budget.depth > 0 and _has_room(budget, steps):
            # By the learned costs, so that no hiccup makes an attempt look dear.
            self._loss += costs[budget] / costs[PLAIN] - sum(step.emitted for step in steps) / max(1, len(steps))
        self._steps += 1
        self._last_used[rows, budget] = self._steps
        earned = self._credit - self._price + self._DETOUR_SHARE * costs[budget]
        self._credit, self._price = min(earned, self._WORST_LOSS * costs[PLAIN]), 0.0
        self._policy.observe(budget, rows, steps, draft_seconds, verify_seconds, total_seconds)

    def _learn(self, budget: Budget, rows: int, steps: Sequence[StepCount]) -> None:
        if self._waited >= self._SHORTEST_WAIT:  # a new attempt: what was believed till now may have changed
            self._failures = self._failures + 1 if self._loss > 0 else 0
            self._loss = 0.0
            self._acceptance.forget(0.5)
        self._waited = 0
        self._trials[rows] = self._trials.get(rows, 0) + 1
        self._acceptance.observe(budget, steps)

    def _pick(self, paying: Sequence[Budget], rates: Mapping[Budget, float], rows: int) -> Budget:
        return self._policy.choose(paying, rows)

    def _costs(self, budgets: Sequence[Budget], rows: int) -> dict[Budget, float]:
        """Seconds of a plain step and of one of each budget, above 0."""
        draft, target_pass, fill = self._draft_costs.curve(rows), self._pass_costs.curve(rows), self._acceptance.fill
        costs = {PLAIN: max(target_pass(1), 1e-12)}
        for depth, nodes in budgets:
            costs[Budget(depth, nodes)] = max(draft(depth * fill) + target_pass(1 + (nodes - 1) * fill), 1e-12)
        costs[PLAIN] = min(costs[PLAIN], self._DEAREST_PLAIN * min(costs.values()))
        return costs

    def _wait(self) -> float:
        """Plain steps from an attempt that did not pay to the next."""
        loss = min(self._loss, self._WORST_LOSS)
        return max(self._SHORTEST_WAIT, loss / self._LOSS_SHARE) * 2.0 ** min(self._failures, self._DOUBLINGS)

    def _detour(self, choice: Budget, budgets: Sequence[Budget], rates: Mapping[Budget, float], rows: int) -> Budget:
        """``choice``, or, if the seconds saved up for it suffice, what was longest not in use of those to look at."""
        others = [PLAIN]
        if self._looks_around:
            at = budgets.index(choice)
            others += [*budgets[max(0, at - 1) : at], *budgets[at + 1 : at + 2]]
        unused = {other: self._steps - self._last_used.get((rows, other), -self._STALE_STEPS) for other in others}
        other = max(others, key=lambda budget: unused[budget])
        price = self._acceptance.expected_tokens(other) * (1 / rates[other] - 1 / rates[choice])
        price = min(max(0.0, price), self._WORST_LOSS / rates[PLAIN])
        if unused[other] < self._STALE_STEPS or price > self._credit:
            return choice
        self._price = price
        return other


class MeasuredPolicy(Guarded):
    """The budget of most tokens per second, by the running acceptance and the costs measured here; guarded.

    Depends on the clock.
    """

    _looks_around = True
    _GAIN_TO_SWITCH = 1.03  # else it would flap between budgets that are as good as each other

    def __init__(self, cost_curve: Mapping[int, float] | None = None) -> None:
        super().__init__(FixedPolicy(), cost_curve)
        self.name = "measured"
        self._current: dict[int, Budget] = {}

    def _pick(self, paying: Sequence[Budget], rates: Mapping[Budget, float], rows: int) -> Budget:
        best = max(paying, key=lambda budget: rates[budget])
        current = self._current.get(rows, best)
        if current not in paying or rates[best] > self._GAIN_TO_SWITCH * rates[current]:
            current = best
        self._current[rows] = current
        return current
