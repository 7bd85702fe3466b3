"""Tests of sampled tokens against a known distribution, with exact bounds on false alarms at any sample size.

Each test computes evidence e >= 0 whose mean is at most 1 if the tokens come from the distribution. By Markov's
inequality e reaches 1/alpha with probability at most alpha, so 1/e is a p-value. Normal or chi-square approximations
would be unreliable at 1e-7.
"""

import math
from collections.abc import Iterable
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_TILTS = tuple(sign * size for size in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8) for sign in (1, -1))
_CONCENTRATIONS = (0.1, 0.3, 1.0, 3.0, 10.0)
_POWER = 0.8416  # the 80% point of the normal distribution
_LEAST_EXPECTED = 5.0
_MOST = 690.0  # keeps p-values above 1e-300: a p-value of 0 means that an impossible token occurred


# --- mean log-probability ---------------------------------------------------------------------------------------------


class LogProbability(NamedTuple):
    """Sums over tokens, where each token is judged given the text before it; `plus` adds the sums of two texts.

    ``excess`` sums log p(x) minus the mean of log p under p. ``variance`` sums the variance of log p under p.
    ``log_evidence``: for each tilt t, the sum of t (log p(x) - mean) - log E exp(t (log p - mean)); its exponential has
    mean 1.
    """

    tokens: int
    excess: float
    variance: float
    log_evidence: Float[Tensor, " tilts"]
    impossible: int
    """Number of tokens of probability 0, which are left out of all other sums."""

    @staticmethod
    def none() -> "LogProbability":
        return LogProbability(0, 0.0, 0.0, torch.zeros(len(_TILTS), dtype=torch.float64), 0)

    @staticmethod
    def of(p: Float[Tensor, "positions vocab"], tokens: Int[Tensor, " positions"]) -> "LogProbability":
        """Judge each token by the distribution at its position."""
        log_p = p.double().log()
        written = log_p.gather(1, tokens[:, None]).squeeze(1)
        possible = written > -math.inf
        log_p, written, p = log_p[possible], written[possible], p[possible].double()
        mean = torch.special.xlogy(p, p).sum(1)
        deviation = torch.where(p > 0, log_p - mean[:, None], 0.0)
        evidence = [
            (tilt * (written - mean) - (((1 + tilt) * log_p).logsumexp(1) - tilt * mean)).sum() for tilt in _TILTS
        ]
        variance = (p * deviation.square()).sum()
        impossible = int((~possible).sum())
        return LogProbability(
            len(written), float((written - mean).sum()), float(variance), torch.stack(evidence).cpu(), impossible
        )

    def plus(self, other: "LogProbability") -> "LogProbability":
        return LogProbability(*map(add, self, other))

    @property
    def z(self) -> float:
        """The mean excess in units of its standard error."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def shift(self) -> float:
        """Mean log-probability of the tokens minus its expectation, in nats."""
        return self.excess / self.tokens if self.tokens else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of `shift`, in nats."""
        return math.sqrt(self.variance) / self.tokens if self.tokens else math.inf

    def least_found(self, alpha: float) -> float:
        """Return the shift, in nats, that these tokens detect with 80% probability at level ``alpha``."""
        return (math.sqrt(2 * math.log(len(_TILTS) / alpha)) + _POWER) * self.standard_error

    @property
    def p_value(self) -> float:
        return 0.0 if self.impossible else _p_value(self.log_evidence)


def _p_value(log_evidence: Float[Tensor, " alternatives"]) -> float:
    mean = float(log_evidence.logsumexp(0)) - math.log(len(log_evidence))
    return math.exp(-min(max(0.0, mean), _MOST))


# --- counts -----------------------------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """Counts of draws from one distribution over a few cells, in one context."""

    counts: Float[Tensor, " cells"]
    p: Float[Tensor, " cells"]

    @staticmethod
    def pooled(counts: Float[Tensor, " outcomes"], p: Float[Tensor, " outcomes"]) -> "Cells":
        """Keep the outcomes that are expected at least five times in this number of draws from p; pool the others."""
        counts, p = counts.double(), p.double()
        kept = p * counts.sum() >= _LEAST_EXPECTED
        rest = (p[~kept].sum() if bool((~kept).any()) else p.new_zeros(())).clamp(min=0)
        if float(rest) == 0 and float(counts[~kept].sum()) == 0:
            return Cells(counts[kept], p[kept])
        return Cells(torch.cat([counts[kept], counts[~kept].sum()[None]]), torch.cat([p[kept], rest[None]]))

    @property
    def log_evidence(self) -> Float[Tensor, " concentrations"]:
        """Return the logarithm of a Bayes factor, for each concentration.

        The factor compares probabilities drawn from a Dirichlet distribution around p with p itself.
        """
        counts, p = self.counts, self.p / self.p.sum()
        if bool(((p <= 0) & (counts > 0)).any()):
            return torch.full((len(_CONCENTRATIONS),), math.inf, dtype=torch.float64)
        counts, p = counts[p > 0], p[p > 0]
        draws = counts.sum()
        if float(draws) == 0:
            return torch.zeros(len(_CONCENTRATIONS), dtype=torch.float64)
        evidence = []
        for concentration in _CONCENTRATIONS:
            prior = concentration * draws * p
            log_ratio = torch.lgamma(prior + counts) - torch.lgamma(prior) - torch.special.xlogy(counts, p)
            evidence.append(log_ratio.sum() + torch.lgamma(prior.sum()) - torch.lgamma(prior.sum() + draws))
        return torch.stack(evidence)


class CountTest(NamedTuple):
    """One test of the counts in the cells of several contexts; ``p_value`` is 0 if an outcome of probability 0 was
    drawn.
    """

    draws: int
    degrees: int
    """Number of free cells: all cells but one in each context. Without a free cell nothing can be detected."""
    p_value: float

    @staticmethod
    def of(contexts: Iterable[Cells]) -> "CountTest":
        """Test the counts of all cells. Each context must be chosen before anything is drawn in it."""
        every = [cells for cells in contexts if float(cells.counts.sum()) > 0]
        if not every:
            return CountTest(0, 0, 1.0)
        evidence = torch.stack([cells.log_evidence for cells in every]).sum(0)
        draws = int(sum(float(cells.counts.sum()) for cells in every))
        degrees = sum(max(0, int((cells.p > 0).sum()) - 1) for cells in every)
        return CountTest(draws, degrees, 0.0 if bool(evidence.isinf().any()) else _p_value(evidence))
