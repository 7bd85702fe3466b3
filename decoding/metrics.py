"""Acceptance figures from step counts, each with its number of observations and a 95% interval.

Two figures describe acceptance; their formulas are defined here:
- tokens per target pass: tokens emitted / target passes; the target's own tokens are counted, but not the prefill;
- per-position acceptance at i (from 1): drafts accepted to depth i / drafts of depth i or more that were accepted to
  depth i - 1.

Other programs report other ratios of the same counts. These ratios are computed only for comparison:
- `Acceptance.unconditional`: drafts accepted to depth i / drafts of depth i or more;
- `Acceptance.reached`: passes that accepted at least i drafted tokens / all passes;
- `Acceptance.acceptance_length`: 1 + accepted tokens / all passes;
- `Acceptance.accepted_per_drafted`: accepted tokens / drafted tree nodes.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_Z95 = 1.959964


class StepCount(NamedTuple):
    """Counts of one target pass; `decoding.text.Step` explains the fields."""

    emitted: int
    accepted: int
    offered: int
    drafted: int
    room: int = sys.maxsize


FEWEST = 8
"""With fewer texts than this number, a bootstrap interval cannot be trusted."""
_RESAMPLES = 2000


class Estimate(NamedTuple):
    """An estimated figure, its 95% interval, and its number of observations."""

    value: float
    low: float
    high: float
    observations: int


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Estimate (sum of first entries) / (sum of second entries), with a bootstrap interval over pairs.

    Each text has one pair. The steps of a text are correlated, so whole texts are resampled, with a fixed seed.
    """
    values = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    return resampled((values,), lambda sums: sums[0][:, 0] / sums[0][:, 1])


def ratio_of_rates(texts: Sequence[tuple[float, float, float, float]]) -> Estimate:
    """Estimate the ratio of two methods' speeds, each in tokens per second over all texts.

    An entry is for one text: tokens and seconds of the first method, then tokens and seconds of the second. The
    bootstrap resamples whole entries, with a fixed seed.
    """
    values = torch.tensor(texts, dtype=torch.float64).reshape(-1, 4)
    # Products are formed first, so that two equal methods have a ratio of exactly 1 and a two-sided interval.
    return resampled((values,), lambda sums: sums[0][:, 0] * sums[0][:, 3] / (sums[0][:, 1] * sums[0][:, 2]))


def share(texts: Sequence[tuple[int, int]]) -> Estimate:
    """Estimate successes / trials over all texts, from a pair (successes, trials) for each text; trials are the
    observations.

    Whole texts are resampled. If all trials had the same outcome, all resamples are equal, so the interval of Wilson
    (1927) is used instead, as if each text were one trial. With fewer than `FEWEST` texts the interval is NaN.
    """
    counted = [text for text in texts if text[1]]
    value, low, high, few = ratio_of_sums(counted)
    if few < FEWEST:
        low = high = math.nan
    elif value in (0.0, 1.0):
        wide = _Z95**2 / (few + _Z95**2)
        low, high = (0.0, wide) if value == 0 else (1 - wide, 1.0)
    return Estimate(value, low, high, sum(trials for _, trials in counted))


def resampled(tables: Sequence[Tensor], ratio: Callable[[Sequence[Tensor]], Tensor]) -> Estimate:
    """Apply ``ratio`` to the sums of ``tables``; the 95% interval comes from an expanded percentile bootstrap.

    A table has the shape (texts, columns) or (seeds, texts, columns); both texts and seeds are resampled, in the same
    way in all tables. ``ratio`` receives the sums of each table, of shape (resamples, columns), and returns one value
    for each resample.

    With few texts, the interval between the percentiles 2.5% and 97.5% contains the true value less than 95% of the
    time (88% with eight texts). The normal quantile that leads to these percentiles is therefore replaced by the
    quantile of Student's t distribution, times sqrt(n / (n - 1)), as in Hesterberg (1411.5279, expanded percentiles).
    """
    tables = [table if table.ndim == 3 else table[None] for table in tables]
    seeds, texts, _ = tables[0].shape
    value = float(ratio([table.sum((0, 1))[None] for table in tables])) if texts else math.nan
    if not math.isfinite(value):
        return Estimate(math.nan, math.nan, math.nan, texts)
    drawn = _draws(seeds, texts)
    ratios = ratio([drawn @ table.flatten(0, 1) for table in tables])
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64) * expanded_quantile(texts)
    finite = ratios[ratios.isfinite()]  # NaN if a resample contains only empty texts
    low, high = finite.quantile(torch.special.ndtr(ends)).tolist()
    # Rounding must not move the value out of the interval.
    return Estimate(value, min(low, value), max(high, value), texts)


@lru_cache(maxsize=8)
def _draws(seeds: int, texts: int) -> Float[Tensor, "resamples seeds*texts"]:
    """Return how often each resample draws each text, for every seed."""
    generator, counts = torch.Generator().manual_seed(0), []
    for items in (texts, seeds):
        drawn = torch.randint(items, (_RESAMPLES, items), generator=generator)
        drawn += items * torch.arange(_RESAMPLES)[:, None]
        counts.append(drawn.flatten().bincount(minlength=_RESAMPLES * items).view(_RESAMPLES, items).double())
    return (counts[1][:, :, None] * counts[0][:, None]).flatten(1)


def expanded_quantile(texts: int) -> float:
    """Return half the width, in standard errors, of the interval that `resampled` computes.

    For n texts the result is sqrt(n / (n - 1)) times Student's 97.5% quantile with n - 1 degrees of freedom.

    The quantile is computed by expansion 26.7.5 of Abramowitz and Stegun, whose error is at most 0.001 for eight texts
    or more.
    """
    z, free = _Z95, max(1, texts - 1)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2) + third / free**3
    return quantile * math.sqrt(1 + 1 / free)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of texts. Tuples start at position 1, the first drafted token.

    ``conditional`` is the per-position acceptance.
    """

    passes: int
    tokens_per_pass: Estimate
    conditional: tuple[Estimate, ...]
    unconditional: tuple[Estimate, ...]
    accepted_per_drafted: Estimate
    reached: tuple[Estimate, ...]
    ended_in_draft: int
    """Passes whose text ended inside the draft, before the target wrote a token."""
    length_histogram: dict[int, int]

    @property
    def acceptance_length(self) -> float:
        """One plus the sum of ``reached``; NaN without passes.

        Servers use this name for 1 + accepted tokens / passes with a draft. The number of tokens per target pass is
        lower than this value by ``ended_in_draft`` / passes.
        """
        return 1.0 + sum(share.value for share in self.reached) if self.passes else math.nan


def acceptance(texts: Sequence[Sequence[StepCount]]) -> Acceptance:
    """Compute the figures from texts; each text is a list of its decoding steps without the prefill."""
    texts = [text for text in texts if text]
    steps = [step for text in texts for step in text]
    deepest = max((step.offered for step in steps), default=0)
    conditional, unconditional = [], []
    for position in range(1, deepest + 1):
        offered = [[step for step in text if step.offered >= position] for text in texts]
        accepted = [sum(step.accepted >= position for step in text) for text in offered]
        reached = [sum(step.accepted >= position - 1 for step in text) for text in offered]
        if not any(reached):  # no draft was accepted up to here, so later positions were never observed
            break
        conditional.append(share(list(zip(accepted, reached, strict=True))))
        unconditional.append(share(list(zip(accepted, map(len, offered), strict=True))))
    accepted_tokens = sum(step.accepted for step in steps)
    lengths = Counter(step.accepted for step in steps)
    figures = Acceptance(
        passes=len(steps),
        tokens_per_pass=ratio_of_sums([(sum(step.emitted for step in text), len(text)) for text in texts]),
        conditional=tuple(conditional),
        unconditional=tuple(unconditional),
        accepted_per_drafted=share(
            [(sum(step.accepted for step in text), sum(step.drafted for step in text)) for text in texts]
        ),
        reached=tuple(
            share([(sum(step.accepted >= position for step in text), len(text)) for text in texts])
            for position in range(1, max(lengths, default=0) + 1)
        ),
        ended_in_draft=sum(step.emitted == step.accepted for step in steps),
        length_histogram=dict(sorted(lengths.items())),
    )
    if steps:
        assert math.isclose(figures.acceptance_length, 1 + accepted_tokens / len(steps), rel_tol=1e-9), figures
        # Check with another count: each pass emits its accepted tokens, and one more token unless the text ended.
        emitted = sum(step.emitted for step in steps)
        assert emitted == len(steps) + accepted_tokens - figures.ended_in_draft, figures
    return figures


def tokens_per_pass(steps: Sequence[StepCount], depth: int | None = None) -> float:
    """Return the tokens per target pass that the counts imply for chains cut to ``depth``.

    A pass that emitted e tokens then emits min(e, depth + 1). The ends of texts are included.
    """
    return sum(step.emitted if depth is None else min(step.emitted, depth + 1) for step in steps) / len(steps)


def expected_tokens(acceptance_rate: float, depth: int) -> float:
    """Return the expected tokens per target pass with a chain of ``depth`` tokens.

    ``acceptance_rate`` is a constant per-position acceptance (Leviathan et al. 2211.17192, eq. 1).
    """
    if acceptance_rate == 1:
        return depth + 1.0
    return (1 - acceptance_rate ** (depth + 1)) / (1 - acceptance_rate)


def predicted_speedup(tokens_per_pass: float, draft_cost: float, verify_cost: float, overhead: float = 0.0) -> float:
    """Predict the speed-up over plain decoding: tokens per target pass / (draft cost + verify cost + overhead).

    Costs are per target pass, in units of one plain decoding step.
    """
    return tokens_per_pass / (draft_cost + verify_cost + overhead)


def break_even(costs: Mapping[int, float]) -> float | None:
    """Return the constant per-position acceptance above which the best chain is faster than plain decoding.

    ``costs`` maps chain depth to the cost of a target pass with its drafting, in units of one plain decoding step.
    Returns None if even a chain that is always accepted is not faster.
    """

    def gains(rate: float) -> bool:
        return any(expected_tokens(rate, depth) > cost for depth, cost in costs.items())

    if not gains(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high
