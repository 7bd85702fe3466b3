"""Forecast of the tokens per target pass that more training would bring, by a run's own held-out evaluations.

The law is a - b * n^-c of n trained tokens, with c between 0.1 (nearly logarithmic) and 2. Its a and b come from least
squares, its c from a grid.

The interval holds 95% of 1,000 refits to simulated evaluations. Each of these differs from the law by noise of its own:
the larger of the curve's residual and of the error with which few prompts measure an evaluation. All evaluations decode
the same prompts, so an error that they share moves the curve as a whole and is left out.

Limits: the law knows nothing of the learning rate. A cosine schedule makes the last evaluations of a run steeper than
the law, as small steps harvest what large ones have prepared, so that a run planned for twice the tokens need not pass
through this run's points. Repeated rows count as new tokens.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.metrics import Estimate

LEAST_POINTS = 4
"""Evaluations that the law needs: it has three parameters."""
NOISY = 0.2
"""Width of a gain's interval, as a share of the tokens per pass, from which it tells nothing."""
_EXPONENTS = torch.arange(2, 41, dtype=torch.float64) / 20
_DRAWS = 1000


class Evaluated(NamedTuple):
    """An evaluation of a run: its trained tokens, the nodes of its largest tree, tokens and passes of each text."""

    trained_tokens: int
    nodes: int
    texts: Sequence[tuple[int, int]]


class Point(NamedTuple):
    """Tokens per target pass after ``trained_tokens``, with the standard error that other points do not share."""

    trained_tokens: int
    tokens_per_pass: float
    error: float


class Forecast(NamedTuple):
    """Tokens per target pass of the law at a run's last evaluation, and the gain of each doubling of the tokens."""

    trained_tokens: int
    tokens_per_pass: float
    gains: tuple[Estimate, ...]
    """Tokens per target pass above ``tokens_per_pass`` after 2, 4, ... times ``trained_tokens``."""


def read_evaluated(path: Path) -> list[Evaluated]:
    """Read the evaluations of a run from its metrics.jsonl, by trained tokens; none where there is no such file.

    The last line of a run that finished earlier weights is left out: it repeats their evaluation. A line that a kill
    cut short, or that is being written, is left out too.
    """
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    found = [
        Evaluated(row["tokens"], row["heldout/nodes"], [(tokens, passes) for tokens, passes in row["heldout/texts"]])
        for row in rows
        if row.get("heldout/texts") and "heldout/step" not in row
    ]
    return sorted({(each.trained_tokens, each.nodes): each for each in found}.values())


def points_of(evaluations: Sequence[Evaluated]) -> list[Point]:
    """Return the points of a curve from evaluations that compare: with as many nodes, and texts, as most of them.

    Heads draft a chain on the way, and with their tree at the end.
    """
    sizes = Counter((each.nodes, len(each.texts)) for each in evaluations)
    if not sizes:
        return []
    usual = sizes.most_common(1)[0][0]
    kept = [each for each in evaluations if (each.nodes, len(each.texts)) == usual and each.trained_tokens > 0]
    counts = torch.tensor([each.texts for each in kept], dtype=torch.float64).reshape(len(kept), usual[1], 2)
    values = counts.sum(1)
    generator = torch.Generator().manual_seed(0)
    drawn = counts[:, torch.randint(usual[1], (_DRAWS, usual[1]), generator=generator)].sum(2)
    resampled = drawn[..., 0] / drawn[..., 1].clamp(min=1)
    errors = (resampled - resampled.mean(0)).std(1).tolist()
    return [
        Point(each.trained_tokens, float(tokens / passes), error)
        for each, (tokens, passes), error in zip(kept, values, errors, strict=True)
        if passes > 0
    ]


def forecast(points: Sequence[Point], doublings: int = 1) -> Forecast | None:
    """Forecast the gain of up to ``doublings`` doublings of the trained tokens; None for fewer than four points."""
    points = sorted(points)
    if len(points) < LEAST_POINTS:
        return None
    sizes = torch.tensor([float(point.trained_tokens) for point in points], dtype=torch.float64)
    sizes = sizes / sizes[-1]
    values = torch.tensor([point.tokens_per_pass for point in points], dtype=torch.float64)
    law = _fit(sizes, values[None])
    curve = law.at(sizes)[0]
    residual = float(((values - curve).square().sum() / (len(points) - 3)).sqrt())
    noise = torch.tensor([point.error for point in points], dtype=torch.float64).clamp(min=residual)
    drawn = torch.randn(_DRAWS, len(points), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    later = 2.0 ** torch.arange(1, doublings + 1, dtype=torch.float64)
    gains, simulated = law.gains(later)[0], _fit(sizes, curve + noise * drawn).gains(later)
    low, high = simulated.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return Forecast(
        points[-1].trained_tokens,
        float(curve[-1]),
        tuple(
            Estimate(*figures, len(points)) for figures in zip(gains.tolist(), low.tolist(), high.tolist(), strict=True)
        ),
    )


class _Law(NamedTuple):
    """Laws a - b * n^-c, (laws,) each; n = 1 is the last evaluation."""

    a: Float[Tensor, " laws"]
    b: Float[Tensor, " laws"]
    c: Float[Tensor, " laws"]

    def at(self, sizes: Float[Tensor, " sizes"]) -> Float[Tensor, "laws sizes"]:
        return self.a[:, None] - self.b[:, None] * sizes ** -self.c[:, None]

    def gains(self, sizes: Float[Tensor, " sizes"]) -> Float[Tensor, "laws sizes"]:
        """Return the law's values above that of n = 1."""
        return self.b[:, None] * (1 - sizes ** -self.c[:, None])


def _fit(sizes: Float[Tensor, " points"], values: Float[Tensor, "laws points"]) -> _Law:
    """Fit a law to each row of ``values``: for every c of the grid by least squares, then the c of least error."""
    powers = sizes ** -_EXPONENTS[:, None]
    columns = torch.stack([torch.ones_like(powers), -powers], dim=-1)  # (exponents, points, 2)
    found = torch.einsum("eip,lp->lei", torch.linalg.pinv(columns), values)
    errors = (torch.einsum("epi,lei->lep", columns, found) - values[:, None]).square().sum(-1)
    best = errors.argmin(-1)
    chosen = found[torch.arange(len(values)), best]
    return _Law(chosen[:, 0], chosen[:, 1], _EXPONENTS[best])


def sentence(points: Sequence[Point]) -> str:
    """Write the forecast of one doubling as a sentence, or that the points are too few."""
    found = forecast(points)
    if found is None:
        return f"{too_few(points)} to forecast more training (evaluation.every sets their distance)"
    return f"with {2 * found.trained_tokens:,} trained tokens, twice as many: {verdict(found, found.gains[0])}"


def too_few(points: Sequence[Point]) -> str:
    """Write how many points there are and how many the law needs."""
    return f"comparable evaluations: {len(points)}, fewer than the {LEAST_POINTS} needed"


def verdict(found: Forecast, gain: Estimate) -> str:
    """Write a gain with its interval, and what keeps it from being told: ``+0.08 [+0.03, +0.14] tokens per pass``."""
    figures = f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] tokens per pass on {found.tokens_per_pass:.2f}"
    if gain.high - gain.low > NOISY * found.tokens_per_pass:
        return f"{figures}: the evaluations are too noisy to tell (evaluation.prompts)"
    if gain.low <= 0 <= gain.high:
        return f"{figures}: no gain that the evaluations tell from noise"
    return figures
