"""Drawing tokens from probabilities, with uniform random numbers that depend only on the seed."""

import hashlib
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from decoding.errors import UserError

_PART = 512


def inverse_cdf(weights: Float[Tensor, "rows vocab"], uniforms: Float64[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw one token per row in proportion to its weights (any positive sum), from uniform numbers in [0, 1).

    The draws are made on the weights' device without waiting for it; the uniforms may be on the host. A token of weight
    0 is never drawn. For a row with NaN or without any weight the result is ``vocab``, an invalid id.
    """
    if weights.is_cuda and weights.shape[1] > _PART:
        return in_parts(weights, uniforms)
    cumulative = _cumulative(weights)
    thresholds = cumulative[:, -1:] * uniforms.to(cumulative.device, non_blocking=True)[:, None]
    # right=True finds the first entry strictly above the threshold, which cannot have weight 0.
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).to(weights.device)


def in_parts(
    weights: Float[Tensor, "rows vocab"], uniforms: Float64[Tensor, " rows"], size: int = _PART
) -> Int[Tensor, " rows"]:
    """Draw with the probabilities of `inverse_cdf`, up to rounding: first a part of ``size`` tokens, then one token of
    this part.

    According to torch's source, one block of a GPU's threads computes the running sum or maximum of a whole row, 1,024
    numbers at a time. With a vocabulary of 128k tokens, this takes longer than the rest of a draw.
    """
    parts = F.pad(weights, (0, -weights.shape[1] % size)).unflatten(1, (-1, size))
    ends = F.pad(_cumulative(parts.sum(2, dtype=torch.float64)), (1, 0))
    thresholds = ends[:, -1:] * uniforms.to(weights.device, non_blocking=True)[:, None]
    part = torch.searchsorted(ends, thresholds, right=True) - 1  # the number of parts if there is no weight
    known = part.clamp(max=parts.shape[1] - 1)
    begin, end = ends.gather(1, known), ends.gather(1, known + 1)
    share = ((thresholds - begin) / (end - begin)).clamp(max=1 - 2**-53)[:, 0]
    token = inverse_cdf(parts.gather(1, known[..., None].expand(-1, -1, size))[:, 0], share)
    return torch.where(part == known, known * size + token[:, None], weights.shape[1])[:, 0]


def _cumulative(weights: Float[Tensor, "*rows vocab"]) -> Float64[Tensor, "*rows vocab"]:
    """Return cumulative sums that never decrease and rise only at positive weights."""
    if weights.is_mps:  # MPS has no float64
        weights = weights.cpu()
    sums = weights.to(torch.float64, copy=True).cumsum_(-1)
    # The CPU adds the weights one by one, so its sums have this property already.
    return sums if weights.is_cpu else _monotone(sums, weights)


def _monotone(
    sums: Float64[Tensor, "*rows vocab"], weights: Float[Tensor, "*rows vocab"]
) -> Float64[Tensor, "*rows vocab"]:
    """Undo the rounding of parallel cumulative sums: two neighbouring sums may differ in their last bits even if the
    weight between them is 0.
    """
    return torch.where(weights > 0, sums, 0).cummax(-1).values


@runtime_checkable
class RandomSource(Protocol):
    """A source of random decisions: a generator in decoding, an enumerator of all outcomes in the exactness tests."""

    def accept(self, probability: float) -> bool:
        """Return True with probability ``min(1, probability)``; never return True if ``probability`` is 0."""

    def draw(self, weights: Float[Tensor, " vocab"]) -> int:
        """Draw an index in proportion to ``weights`` (any positive sum); never draw an index of weight 0."""


NO_WEIGHT = "no token has any weight: loosen the sampling controls; a processor may forbid every token"
_BLOCK = 32  # a source draws at least this many numbers from its generator in one call


class GeneratorSource:
    """Random source from a `torch.Generator` on the host, so a seed leads to the same numbers on every device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._ahead: list[float] = []  # numbers already drawn from the generator but not yet used

    @staticmethod
    def from_seed(seed: int, stream: int | str = "") -> "GeneratorSource":
        """Make the source of random numbers for one of the streams that belong to a seed.

        The stream is the same in every run and independent of the seed's other streams; drafting and verifying use
        different streams.
        """
        hashed = hashlib.sha256(f"{seed} {stream}".encode()).digest()
        return GeneratorSource(torch.Generator().manual_seed(int.from_bytes(hashed[:8], "little", signed=True)))

    def uniform(self) -> float:
        """Take the next number in [0, 1), a multiple of 2^-53."""
        if not self._ahead:
            self.peek(1)
        return self._ahead.pop(0)

    def uniforms(self, count: int) -> Float64[Tensor, " count"]:
        """Take the next ``count`` numbers, on the host."""
        taken = torch.tensor(self.peek(count), dtype=torch.float64)
        self.skip(count)
        return taken

    def peek(self, count: int) -> list[float]:
        """Return the next ``count`` numbers without taking them."""
        if (missing := count - len(self._ahead)) > 0:
            fresh = torch.rand(max(missing, _BLOCK), generator=self._generator, dtype=torch.float64)
            self._ahead += fresh.tolist()
        return self._ahead[:count]

    def skip(self, count: int) -> None:
        """Take ``count`` numbers that `peek` returned."""
        assert count <= len(self._ahead), f"{count} numbers taken, {len(self._ahead)} peeked"
        del self._ahead[:count]

    def accept(self, probability: float) -> bool:
        return self.uniform() < probability

    def draw(self, weights: Float[Tensor, " vocab"]) -> int:
        # `inverse_cdf` for a single row without the row axis. This is faster, and it runs for every drafted token.
        cumulative = _cumulative(weights)
        token = int(torch.searchsorted(cumulative, cumulative[-1] * self.uniform(), right=True))
        if token == len(weights):
            raise UserError(NO_WEIGHT)
        return token


def draw_rows_without_replacement(
    weights: Float[Tensor, "rows vocab"], uniforms: Float64[Tensor, "rows count"]
) -> Int[Tensor, "rows count"]:
    """Draw up to ``count`` distinct indices per row, from uniform numbers in [0, 1).

    Each draw is in proportion to the weights of the remaining indices. The draws are made on the weights' device
    without waiting for it; the uniforms may be on the host. Once no index of a row has weight left, or if the weights
    are NaN, the result is ``vocab``, which is not an index.
    """
    if not weights.is_mps:  # MPS has no float64
        uniforms = uniforms.to(weights.device, non_blocking=True)
    columns: list[Tensor] = []
    for column in uniforms.T:
        if columns:  # a copy, because the caller keeps the weights and the first draw reads them all
            weights = weights.scatter(1, columns[-1].clamp(max=weights.shape[1] - 1)[:, None], 0)
        columns.append(inverse_cdf(weights, column))
    return columns[0][:, None] if len(columns) == 1 else torch.stack(columns, dim=1)
