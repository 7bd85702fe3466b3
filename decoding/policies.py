"""Policies, which choose before each step how much is drafted: always the same amount, or the amount that is expected
to be fastest.

The caller keeps one policy for each pair of target and drafter, so the policy learns from text to text. No policy
affects the guarantee of a lossless rule. The loop measures the seconds of each step, but only the adaptive policy reads
them.
"""

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple, Protocol

from decoding.errors import UserError
from decoding.metrics import StepCount


class Budget(NamedTuple):
    """Limits of one draft: the ``depth`` of its deepest token, and the ``nodes`` of its tree including the root."""

    depth: int
    nodes: int


NO_DRAFT = Budget(0, 1)
"""The budget of plain decoding: nothing is drafted."""


class Policy(Protocol):
    """A policy chooses before each step how much is drafted, and then observes the counts and seconds of the step."""

    name: str

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        """Return `NO_DRAFT` or one of the drafter's ``budgets``. They are sorted by cost, and each of them drafts
        something.

        ``rows``: the number of texts decoded together.
        """

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        """Learn from a step with this ``budget``: from the counts of each row, and from the seconds that the draft, the
        target pass and the whole step took.
        """


class FixedPolicy:
    """Policy that always chooses the largest budget within the limits, or `NO_DRAFT` if there is none."""

    name = "fixed"

    def __init__(self, depth: int | None = None, nodes: int | None = None) -> None:
        if (depth is not None and depth < 0) or (nodes is not None and nodes < 1):
            raise UserError(
                f"a depth of {depth} and {nodes} nodes: use at least depth 0 and at least 1 node (the root)"
            )
        self._depth = math.inf if depth is None else depth
        self._nodes = math.inf if nodes is None else nodes

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        within = [budget for budget in budgets if budget.depth <= self._depth and budget.nodes <= self._nodes]
        return within[-1] if within else NO_DRAFT

    def observe(self, *step: object) -> None:
        pass


class _Acceptance:
    """The per-position acceptance by depth. Older trials have less weight."""

    def __init__(self, like: "_Acceptance | None" = None, factor: float = 1.0) -> None:
        """Until there are trials, the acceptance is assumed to be ``factor`` times the acceptance in ``like``."""
        self._like, self._factor, self._trials, self._hits = like, factor, list[float](), list[float]()

    def add(self, budget: Budget, step: StepCount) -> None:
        ended = step.emitted <= step.accepted  # nothing was rejected: the text ended inside the draft
        for depth in range(min(budget.depth, step.room, step.accepted + (not ended))):
            if depth == len(self._trials):
                self._trials.append(0.0)
                self._hits.append(0.0)
            self._trials[depth] = _MEMORY * self._trials[depth] + 1
            self._hits[depth] = _MEMORY * self._hits[depth] + (depth < step.accepted)

    def _share(self, depth: int) -> tuple[float, float]:
        """Return (acceptance of the token after ``depth`` accepted tokens, number of trials).

        Both include a first guess, which counts as one or more trials.
        """
        if self._like is not None:
            guess, weight = self._factor * self._like._share(depth)[0], 4.0
        else:
            guess, weight = self._share(depth - 1)[0] if depth else _GUESS, 1.0
        trials, hits = (self._trials[depth], self._hits[depth]) if depth < len(self._trials) else (0.0, 0.0)
        return (hits + weight * guess) / (trials + weight), trials + weight

    def expected_tokens(self, depth: int, luck: float) -> float:
        """Return how many tokens a step with a draft of this depth is expected to write.

        Each acceptance is first raised by ``luck`` standard deviations.
        """
        total = reached = 1.0
        for index in range(depth):
            share, trials = self._share(index)
            reached *= min(max(share + luck * math.sqrt(share * (1 - share) / trials), 0.0), 1.0)
            total += reached
        return total


class _Seconds:
    """How long steps took with each budget, for a given number of rows: medians over recent steps, grouped by tree
    size.
    """

    def __init__(self) -> None:
        self._of: dict[Budget, dict[int, deque[tuple[int, float]]]] = {}
        """For each budget and class of tree sizes: (number of the step, its seconds) for the latest steps."""
        self._shares: dict[Budget, dict[int, float]] = {}
        self._tried_at: dict[Budget, int] = {}
        self._least: dict[Budget, float] = {}
        """For each budget, the lowest cost of its steps, in plain steps, since its seconds were last forgotten."""
        self._steps = 0
        self.gained = 0.0
        """Time that drafts have saved since the last plain step, in units of a plain step."""

    def add(self, budget: Budget, drafted: int, seconds: float) -> None:
        self._steps += 1
        if self._steps - self._tried_at.get(budget, self._steps) > _STALE:
            del self._of[budget], self._shares[budget]
            self._least.pop(budget, None)
        self._tried_at[budget] = self._steps
        size = drafted.bit_length()
        latest = self._of.setdefault(budget, {}).setdefault(size, deque(maxlen=_KEPT))
        while latest and self._steps - latest[0][0] > _RECENT:
            latest.popleft()
        latest.append((self._steps, seconds))
        shares = self._shares.setdefault(budget, {})
        for tree_size in shares:
            shares[tree_size] *= _MEMORY
        shares[size] = shares.get(size, 0.0) + 1

    @property
    def lacks_plain(self) -> bool:
        """True if the next step should be plain, because plain steps were never timed, were timed too rarely, or were
        timed too long ago.

        Once two plain steps are known, the next plain step is due when it would lower the speed by a share of less than
        `_TIMING`. If drafts gain little, this plain step comes soon, because only a correct measurement of plain steps
        shows whether drafts gain at all. If drafts gain much, the step comes late. On a machine whose speed changes, an
        old measurement would make drafts look faster or slower than they are.
        """
        count = sum(map(len, self._of.get(NO_DRAFT, {}).values()))
        pause = self._steps - self._tried_at.get(NO_DRAFT, 0)
        # A plain step loses what a drafting step would gain: on average, the gain since the last plain step divided by
        # the number of steps since then.
        due = pause >= _HELD and _TIMING * pause**2 >= self.gained
        return bool(self._of) and (count < 2 or due)

    def cost(self, budget: Budget, drafted: int) -> float:
        """Return the cost, in plain steps, of a step with this budget and number of drafted tokens. The cost is taken
        from recent steps with about the same number of drafted tokens.

        The cost exceeds `_DEAREST` only if no step with the budget has cost less. Otherwise a hiccup or a slow spell of
        the machine would make drafts look expensive for a while. The method also records the lowest cost.
        """
        plain, whole = self.known(NO_DRAFT), self.known(budget)
        if plain is None:
            return _rough(budget)
        if whole is not None:
            self._least[budget] = min(self._least.get(budget, math.inf), whole[0] / plain[0])
        most = max(_DEAREST, self._least.get(budget, _DEAREST))
        return min(self._median(budget, drafted.bit_length()) / plain[0], most)

    def _median(self, budget: Budget, size: int) -> float:
        return median_low(seconds for _, seconds in self._of[budget][size])

    def known(self, budget: Budget) -> tuple[float, float] | None:
        """Return (seconds of a step with this budget, relative standard deviation), or None before the second step.

        Of the first two steps only the faster one counts, because the first step of a kind may be unusually slow.
        """
        if not (shares := self._shares.get(budget)) or sum(map(len, self._of[budget].values())) < 2:
            return None
        trials, age = sum(shares.values()), self._steps - self._tried_at[budget]
        total, most = 0.0, math.inf
        for size in sorted(shares, reverse=True):  # a smaller tree cannot take longer
            most = min(most, self._median(budget, size))
            total += shares[size] * most
        mean = total / trials
        return mean, math.hypot(_NOISE / math.sqrt(min(trials, _KEPT)), age / _AGEING)

    def guess(self, budget: Budget, known: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Guess the figures that the method `known` would return for an untried budget.

        The argument ``known`` contains a pair (`_rough`, seconds) for each tried budget, sorted.
        """
        rough = _rough(budget)
        after = bisect_right(known, (rough, math.inf))
        if 0 < after < len(known):
            (low, least), (high, most) = known[after - 1 : after + 1]
            return least + (most - least) * (rough - low) / (high - low), _BETWEEN
        near, seconds = known[min(after, len(known) - 1)] if known else (1.0, 1.0)
        return seconds * rough / near * (0.5 if budget == NO_DRAFT and known else 1.0), _BEYOND


def _rough(budget: Budget) -> float:
    """Guess the cost of a step, in units of a plain step, while nothing is measured yet."""
    return 1.0 if budget == NO_DRAFT else 1.1 + 0.02 * (budget.depth + budget.nodes)


def _arms(budgets: Sequence[Budget]) -> dict[Budget, _Acceptance]:
    """Return the budgets to choose from: for a few depths, the largest tree and the chain. Each budget is mapped to the
    acceptance that applies to it.

    The depths are the full depth, half of it, a quarter, and so on. Smaller trees that are parts of the largest tree
    share its acceptance. A hybrid has one budget per depth, and its smaller trees are not parts of the largest tree, so
    only the largest tree is used.
    """
    largest = {budget.depth: budget for budget in budgets}
    depths = [budgets[-1].depth]
    while depths[-1] > 1:
        depths.append((depths[-1] + 1) // 2)
    whole = _Acceptance()
    arms = {largest[depth]: whole for depth in depths if depth in largest}
    chains = [budget for budget in budgets if budget.nodes == budget.depth + 1]
    if len(chains) < len(budgets) == len(largest):
        return {budgets[-1]: whole}  # learning the acceptance of each tree costs more than the best tree gains
    smaller = (chain for chain in chains if chain.depth in depths[:-1] and chain not in arms)
    return arms | {chain: _Acceptance(whole, _OF_LARGER) for chain in smaller}


_MEMORY = 0.9975  # weight of a trial relative to the trial after it
_GUESS, _OF_LARGER = 0.75, 0.8
"""Per-position acceptance that is assumed before any trial; ratio of a chain's acceptance to the acceptance of the tree
that contains the chain."""
_KEPT, _RECENT, _STALE, _AGEING = 31, 384, 500, 4000.0
"""Number of steps kept per budget; greatest age, in steps, of a kept step when a newer step is added; number of steps
without use after which a budget's seconds are forgotten; number of steps without use that add a relative standard
deviation of 1 to these seconds."""
_TIMING = 1 / 64  # share of the speed that may be lost by timing plain steps while drafting
_NOISE, _BETWEEN, _BEYOND = 0.15, 0.04, 0.3
"""Relative standard deviations of a step's seconds, of guesses between tried budgets, and of guesses beyond them."""
_CAUTION = 0.5  # scale of the random errors that exploration adds; half of it is always added to the acceptance
_HELD = 2  # number of steps from one choice to the next
_FIRST_LOSS, _LOSS, _MOST_GAIN, _MOST_DEBT = 0.5, 0.015, 4.0, 2.5
"""In plain steps: the loss that drafting may make at first, the further loss allowed after each plain step, and the
largest positive and the largest negative balance."""
_DEAREST = 2.0  # highest cost of a drafting step, in plain steps, unless no step with its budget has cost less


class AdaptivePolicy:
    """Policy that chooses the budget expected to write the most tokens per second, or `NO_DRAFT` if drafting does not
    pay.

    Tokens are predicted from the running per-position acceptance, and seconds are predicted from recent steps. The
    seconds of untried budgets are interpolated. A budget is chosen about as often as it is likely to be the best
    (Thompson 1933), so bad budgets are rarely tried again. A balance records how much time drafts have gained or lost
    compared with plain decoding. While the balance is negative, the policy tries no unlikely budgets. While the balance
    is below -1 plain steps, nothing is drafted at all. In simulations, drafts that do not fit the text cost about two
    plain steps at first and 1.5% of the time later, if a drafting step takes at most as long as two plain steps; more
    expensive drafts cost more. Seconds depend on the number of texts decoded together, so they are learned separately
    for each power of two. The policy reads the clock, so the shapes of passes differ between runs. Sampled texts with
    the same seed may therefore differ. In dtypes narrower than fp32, greedy texts may also differ, at tokens where the
    two best logits are almost equal.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self._seconds: dict[int, _Seconds] = {}
        self._held: dict[int, tuple[Budget, int]] = {}
        self._balance: dict[int, float] = {}
        self._chance = random.Random(0)
        self._arms: dict[tuple[Budget, ...], dict[Budget, _Acceptance]] = {}
        self._acceptance: dict[Budget, _Acceptance] = {}

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        if not budgets:
            return NO_DRAFT
        size, budgets = rows.bit_length(), tuple(budgets)
        if budgets not in self._arms:
            self._arms[budgets] = _arms(budgets)
            self._acceptance |= self._arms[budgets]
        held, left = self._held.get(size, (NO_DRAFT, 0))
        if not left or (held != NO_DRAFT and held not in budgets):
            balance, seconds = self._balance.setdefault(size, _FIRST_LOSS), self._seconds.setdefault(size, _Seconds())
            timing = seconds.lacks_plain  # a guess would hide that the drafts are slow
            plain = timing or balance < -1
            held = NO_DRAFT if plain else self._best(size, self._arms[budgets], explores=balance > 0)
            left = _HELD if not timing and (held == NO_DRAFT or balance > 1) else 1
        self._held[size] = held, left - 1
        return held

    def _best(self, size: int, arms: Mapping[Budget, _Acceptance], explores: bool) -> Budget:
        seconds, caution = self._seconds[size], _CAUTION if explores else 0.0
        luck = caution * (self._chance.gauss(0.0, 1.0) + 0.5)
        known = {arm: figures for arm in (NO_DRAFT, *arms) if (figures := seconds.known(arm)) is not None}
        points = sorted((_rough(arm), figures[0]) for arm, figures in known.items())
        rates: dict[Budget, float] = {}
        for arm in (NO_DRAFT, *arms):
            mean, deviation = known.get(arm) or seconds.guess(arm, points)
            tokens = arms[arm].expected_tokens(arm.depth, luck) if arm in arms else 1.0
            rates[arm] = tokens / (mean * math.exp(caution * self._chance.gauss(0.0, deviation) if points else 0.0))
        return max(rates, key=lambda arm: rates[arm])

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float, /) -> None:
        if not steps or total <= 0:
            return
        size = len(steps).bit_length()
        drafted = max(step.drafted for step in steps)
        seconds = self._seconds.setdefault(size, _Seconds())
        seconds.add(budget, drafted, total)
        if budget == NO_DRAFT:
            gain, seconds.gained = _LOSS, 0.0
        else:
            gain = sum(step.emitted for step in steps) / len(steps) - seconds.cost(budget, drafted)
            seconds.gained += gain
        self._balance[size] = max(min(self._balance.get(size, _FIRST_LOSS) + gain, _MOST_GAIN), -_MOST_DEBT)
        for step in steps if budget in self._acceptance else ():
            self._acceptance[budget].add(budget, step)


FIXED, ADAPTIVE = FixedPolicy.name, AdaptivePolicy.name
_POLICIES: Mapping[str, Callable[[], Policy]] = {FIXED: FixedPolicy, ADAPTIVE: AdaptivePolicy}


def default_policy(seed: int | None) -> str:
    """Return the name of the default policy: "fixed" if a ``seed`` asks for repeatable passes, otherwise "adaptive"."""
    return ADAPTIVE if seed is None else FIXED


def named_policy(name: str) -> Policy:
    """Create a policy, ``adaptive`` or ``fixed``; raise UserError for another name."""
    if name not in _POLICIES:
        raise UserError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
