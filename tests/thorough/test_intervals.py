"""Simulated evaluations: how often 95% intervals contain the true figure, and how often equal methods are called
different.

Bounds are 4.75 standard errors from the stated shares, so a sound interval fails one run in a million. Plain
percentiles must fail them.
"""

import pytest
import torch
from torch import Tensor

from decoding import metrics
from decoding.measure.compare import conclusion
from decoding.metrics import ratio_of_rates, ratio_of_sums

TRIALS = 1500


def normal(generator: torch.Generator, texts: int) -> Tensor:
    return torch.randn(texts, generator=generator, dtype=torch.float64)


def covered(texts: int) -> float:
    """Return the share of intervals that contain the true tokens per pass, for texts with skewed figures: 1 + a
    lognormal number.
    """
    generator, held = torch.Generator().manual_seed(1), 0
    for _ in range(TRIALS):
        tokens = torch.randint(16, 97, (texts,), generator=generator).double()
        passes = tokens / (1 + (0.6 * normal(generator, texts)).exp())
        found = ratio_of_sums(torch.stack([tokens, passes], 1).tolist())
        held += found.low <= 2 <= found.high  # the mean of 1 / (1 + exp z) is 1/2 for any symmetric z
    return held / TRIALS


def told_apart(texts: int) -> float:
    """Return the share of comparisons that call two methods really different, although their runs differ only by 5%
    noise.
    """
    generator, real = torch.Generator().manual_seed(1), 0
    for _ in range(TRIALS):
        tokens = torch.randint(16, 97, (texts,), generator=generator).double()
        speed = (0.3 * normal(generator, texts)).exp()
        mine, other = (tokens / speed * (0.05 * normal(generator, texts)).exp() for _ in range(2))
        real += conclusion(ratio_of_rates(torch.stack([tokens, mine, tokens, other], 1).tolist())).kind == "real"
    return real / TRIALS


@pytest.mark.parametrize("mutant", [False, True])
def test_intervals_called_95_percent_hold_93_percent_at_published_sizes(
    mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant:
        monkeypatch.setattr(metrics, "expanded_quantile", lambda texts: metrics._Z95)
    few = (covered(8) + covered(10)) / 2
    assert (few > 0.93 - 4.75 * (0.93 * 0.07 / (2 * TRIALS)) ** 0.5) == (not mutant), few
    assert covered(27) > 0.93 - 4.75 * (0.93 * 0.07 / TRIALS) ** 0.5


@pytest.mark.parametrize("mutant", [False, True])
def test_about_one_in_twenty_equal_pairs_is_called_real(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is one in twenty with 27 or more prompts, and at most one in thirteen with eight or ten prompts."""
    if mutant:
        monkeypatch.setattr(metrics, "expanded_quantile", lambda texts: metrics._Z95)
    few = (told_apart(8) + told_apart(10)) / 2
    assert (few < 1 / 13 + 4.75 * (1 / 13 * 12 / 13 / (2 * TRIALS)) ** 0.5) == (not mutant), few
    assert abs(told_apart(27) - 0.055) < 4.75 * (0.055 * 0.945 / TRIALS) ** 0.5
