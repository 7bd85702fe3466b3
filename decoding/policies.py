"""Policies, which choose before each step how much to draft: a fixed amount, or what writes most in a second.

A policy is state of the caller, one for each pair of target and drafter; it learns over texts and batches. No policy
changes what a lossless rule guarantees. The seconds of a step come from the loop; only the adaptive policy reads them.
"""

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
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

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        """Return one of the drafter's ``budgets`` (by increasing cost, `PLAIN` not among them), or `PLAIN`.

        ``rows``: the number of texts that are decoded at a time.
        """

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        """Learn from a step of ``budget``: one count per row, and the batch's seconds of draft, pass and all."""


class FixedPolicy:
    """The largest budget within the limits, `PLAIN` if none is."""

    name = "fixed"

    def __init__(self, depth: int | None = None, nodes: int | None = None) -> None:
        if (depth is not None and depth < 0) or (nodes is not None and nodes < 1):
            raise ValueError(f"a depth of {depth} and {nodes} nodes: give a depth from 0 and nodes from 1 (the root)")
        self._depth = math.inf if depth is None else depth
        self._nodes = math.inf if nodes is None else nodes

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        within = [budget for budget in budgets if budget.depth <= self._depth and budget.nodes <= self._nodes]
        return within[-1] if within else PLAIN

    def observe(self, *step: object) -> None:
        pass


class _Acceptance:
    """Shares of drafted tokens accepted at each depth, given that those before were; older trials weigh less."""

    def __init__(self, like: "_Acceptance | None" = None, factor: float = 1.0) -> None:
        """The first guess is ``factor`` times the shares of ``like``."""
        self._like, self._factor, self._trials, self._hits = like, factor, list[float](), list[float]()

    def add(self, budget: Budget, step: StepCount) -> None:
        ended = step.emitted <= step.accepted  # nothing was refused: the text ended inside the draft
        for depth in range(min(budget.depth, step.room, step.accepted + (not ended))):
            if depth == len(self._trials):
                self._trials.append(0.0)
                self._hits.append(0.0)
            self._trials[depth] = _MEMORY * self._trials[depth] + 1
            self._hits[depth] = _MEMORY * self._hits[depth] + (depth < step.accepted)

    def _share(self, depth: int) -> tuple[float, float]:
        """Return the share accepted behind a path of ``depth`` tokens, and its trials; a guess counts as some."""
        if self._like is not None:
            guess, weight = self._factor * self._like._share(depth)[0], 4.0
        else:
            guess, weight = self._share(depth - 1)[0] if depth else _GUESS, 1.0
        trials, hits = (self._trials[depth], self._hits[depth]) if depth < len(self._trials) else (0.0, 0.0)
        return (hits + weight * guess) / (trials + weight), trials + weight

    def tokens(self, depth: int, luck: float) -> float:
        """Return the tokens of a step to this depth, ``luck`` standard deviations above what is expected."""
        total = reached = 1.0
        for index in range(depth):
            share, trials = self._share(index)
            reached *= min(max(share + luck * math.sqrt(share * (1 - share) / trials), 0.0), 1.0)
            total += reached
        return total


class _Seconds:
    """Seconds of steps by budget, for one number of rows: medians of the last steps with trees of about one size."""

    def __init__(self) -> None:
        self._of: dict[Budget, dict[int, deque[float]]] = {}
        self._shares: dict[Budget, dict[int, float]] = {}
        self._tried_at: dict[Budget, int] = {}
        self._steps = 0

    def add(self, budget: Budget, drafted: int, seconds: float) -> None:
        self._steps += 1
        if self._steps - self._tried_at.get(budget, self._steps) > _STALE:
            del self._of[budget], self._shares[budget]
        self._tried_at[budget] = self._steps
        size = drafted.bit_length()
        self._of.setdefault(budget, {}).setdefault(size, deque(maxlen=_KEPT)).append(seconds)
        shares = self._shares.setdefault(budget, {})
        for each in shares:
            shares[each] *= _MEMORY
        shares[size] = shares.get(size, 0.0) + 1

    def known(self, budget: Budget) -> tuple[float, float] | None:
        """Return the seconds of a step of a budget and their relative standard deviation; None if it was not tried."""
        if not (shares := self._shares.get(budget)):
            return None
        trials, age = sum(shares.values()), self._steps - self._tried_at[budget]
        total, most = 0.0, math.inf
        for size in sorted(shares, reverse=True):  # a smaller tree takes no longer
            most = min(most, median_low(self._of[budget][size]))
            total += shares[size] * most
        mean = total / trials
        return mean, math.hypot(_NOISE / math.sqrt(min(trials, _KEPT)), age / _AGEING)

    def guess(self, budget: Budget, known: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the same of a budget that was not tried, from the (`_rough`, seconds) of those that were, sorted."""
        rough = _rough(budget)
        after = bisect_right(known, (rough, math.inf))
        if 0 < after < len(known):
            (low, least), (high, most) = known[after - 1 : after + 1]
            return least + (most - least) * (rough - low) / (high - low), _BETWEEN
        near, seconds = known[min(after, len(known) - 1)] if known else (1.0, 1.0)
        return seconds * rough / near * (0.5 if budget == PLAIN and known else 1.0), _BEYOND


def _rough(budget: Budget) -> float:
    """Return the seconds of a step in plain steps, before anything is known."""
    return 1.0 if budget == PLAIN else 1.1 + 0.02 * (budget.depth + budget.nodes)


def _arms(budgets: Sequence[Budget]) -> dict[Budget, _Acceptance]:
    """Return the budgets to choose from with their acceptance: the largest to each of a few depths, and chains as deep.

    The depths are the whole and a half, a quarter, ... of it. Cuts of one tree share its acceptance. With one budget
    for each depth, as of a hybrid, smaller trees are not the beginnings of the largest: only the largest is chosen.
    """
    largest = {budget.depth: budget for budget in budgets}
    depths = [budgets[-1].depth]
    while depths[-1] > 1:
        depths.append((depths[-1] + 1) // 2)
    whole = _Acceptance()
    arms = {largest[depth]: whole for depth in depths if depth in largest}
    chains = [budget for budget in budgets if budget.nodes == budget.depth + 1]
    if len(chains) < len(budgets) == len(largest):
        return {budgets[-1]: whole}  # to learn each tree's acceptance costs more than the best of them gains
    smaller = (chain for chain in chains if chain.depth in depths[:-1] and chain not in arms)
    return arms | {chain: _Acceptance(whole, _OF_LARGER) for chain in smaller}


_MEMORY = 0.9975
"""Weight of a trial beside the one after it."""
_GUESS, _OF_LARGER = 0.75, 0.8
"""Share accepted before anything is known, and that of a chain over that of the tree around it."""
_KEPT, _STALE, _AGEING = 31, 500, 4000.0
"""Steps of a budget that are kept; steps after which they are forgotten; steps that put them in doubt by a factor e."""
_NOISE, _BETWEEN, _BEYOND = 0.15, 0.04, 0.3
"""Relative standard deviations: of a step's seconds, and of guesses between and beyond budgets that were tried."""
_CAUTION = 0.5
"""Share of a standard deviation that is explored; half of it is always added to the acceptance."""
_HELD = 2
"""Steps between two choices."""


class AdaptivePolicy:
    """The budget expected to write the most tokens in a second, or `PLAIN` where drafting does not pay.

    Tokens follow from the running acceptance by depth, seconds from the steps of late; those of a budget that was not
    tried lie between those of its neighbours. A budget is chosen as often as it may well be the best (Thompson 1933):
    what is known to lose is hardly tried again. Seconds depend on the number of texts decoded at a time, so each power
    of two of it has its own. Reads the clock: sampled texts of a seed differ from run to run.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self._seconds: dict[int, _Seconds] = {}
        self._held: dict[int, tuple[Budget, int]] = {}
        self._chance = random.Random(0)
        self._arms: dict[tuple[Budget, ...], dict[Budget, _Acceptance]] = {}
        self._acceptance: dict[Budget, _Acceptance] = {}

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets:
            return PLAIN
        size, budgets = rows.bit_length(), tuple(budgets)
        if budgets not in self._arms:
            self._arms[budgets] = _arms(budgets)
            self._acceptance |= self._arms[budgets]
        held, left = self._held.get(size, (PLAIN, 0))
        if not left or (held != PLAIN and held not in budgets):
            held, left = self._best(size, self._arms[budgets]), _HELD
        self._held[size] = held, left - 1
        return held

    def _best(self, size: int, arms: Mapping[Budget, _Acceptance]) -> Budget:
        seconds, luck = self._seconds.setdefault(size, _Seconds()), self._doubt(1.0) + _CAUTION / 2
        known = {arm: found for arm in (PLAIN, *arms) if (found := seconds.known(arm)) is not None}
        points = sorted((_rough(arm), found[0]) for arm, found in known.items())
        rates: dict[Budget, float] = {}
        for arm in (PLAIN, *arms):
            mean, deviation = known.get(arm) or seconds.guess(arm, points)
            tokens = arms[arm].tokens(arm.depth, luck) if arm in arms else 1.0
            rates[arm] = tokens / (mean * math.exp(self._doubt(deviation) if points else 0.0))
        return max(rates, key=lambda arm: rates[arm])

    def _doubt(self, deviation: float) -> float:
        return _CAUTION * self._chance.gauss(0.0, deviation)

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        if not steps or total <= 0:
            return
        size = len(steps).bit_length()
        drafted = max(step.drafted for step in steps)
        self._seconds.setdefault(size, _Seconds()).add(budget, drafted, total)
        for step in steps if budget in self._acceptance else ():
            self._acceptance[budget].add(budget, step)


_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "adaptive": AdaptivePolicy,
    "fixed": FixedPolicy,
}


def default_policy(seed: int | None, greedy: bool) -> str:
    """Name the policy of who asks for none: it follows the clock unless a ``seed`` is to repeat a sampled text."""
    return "adaptive" if greedy or seed is None else "fixed"


def named_policy(name: str) -> Policy:
    """Make a new policy, ``adaptive`` or ``fixed``; ValueError for a name that is none of them."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
