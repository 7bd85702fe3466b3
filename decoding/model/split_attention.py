"""Masked attention that is split over the keys, for a few queries behind a long text on a GPU.

A kernel gives each block of queries of each head to one processor, which walks over all keys: for one text that leaves
most of a GPU idle. Here each head's keys are cut into parts, which run beside one another as rows of a batch, and the
parts' results are merged by their log-sum-exp (Flash-Decoding). The sums are those of whole attention in another order.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST_KEYS = 4096
_PART = 256
"""Parts are multiples of it, so that every row of a part's mask is aligned."""
_ALIGNED = 16
_QUERIES = 64
"""Queries that one block of the kernel takes."""


class SplitMask(NamedTuple):
    """An additive mask laid out for the parts: it is made once for all layers of a pass."""

    parts: Float[Tensor, "parts 1 queries part"]
    rest: Float[Tensor, "1 1 queries rest"] | None
    """Mask of the keys behind the parts; None if there are none."""

    @staticmethod
    def of(mask: Float[Tensor, "1 1 queries keys"], part: int) -> "SplitMask":
        """Cut a mask into parts of ``part`` keys."""
        queries, keys = mask.shape[-2:]
        whole = keys // part * part
        parts = mask[0, 0, :, :whole].unflatten(1, (-1, part)).transpose(0, 1)[:, None].contiguous()
        if whole == keys:
            return SplitMask(parts, None)
        aligned = mask.new_zeros(1, 1, queries, -(-(keys - whole) // _ALIGNED) * _ALIGNED)
        rest = aligned[..., : keys - whole]
        rest.copy_(mask[..., whole:])
        return SplitMask(parts, rest)


def part_of(query: Tensor, key: Tensor) -> int | None:
    """Return how many keys a part has; None for whole attention, as always on a CPU.

    ``query`` (rows, heads, queries, dim), ``key`` (rows, heads, keys, dim). On a CPU, with one
    thread, 16 queries behind 1k to 32k keys took 0.92 to 1.23 times as long with prefix and tree apart.
    """
    if not query.is_cuda or len(query) > 1 or key.shape[2] < _LEAST_KEYS or query.requires_grad:
        return None
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    blocks = key.shape[1] * -(-query.shape[2] // _QUERIES)
    parts = processors // blocks
    return None if parts < 2 else max(_PART, -(-key.shape[2] // parts // _PART) * _PART)


def split_attention(
    query: Float[Tensor, "1 heads queries dim"],
    key: Float[Tensor, "1 heads keys dim"],
    value: Float[Tensor, "1 heads keys width"],
    mask: SplitMask,
    scale: float | None,
) -> Float[Tensor, "1 heads queries width"]:
    """Attend to the keys part by part; equals `scaled_dot_product_attention` with the whole mask."""
    parts, part = len(mask.parts), mask.parts.shape[-1]
    whole = parts * part

    def beside(states: Tensor) -> Tensor:
        """View the parts of (1, heads, keys, dim) as rows, (parts, heads, part, dim): nothing is copied."""
        rows: Tensor = states[0, :, :whole].unflatten(1, (parts, part)).transpose(0, 1)
        return rows

    found, weights = _attended(query.expand(parts, -1, -1, -1), beside(key), beside(value), mask.parts, scale)
    if mask.rest is not None:
        last = _attended(query, key[:, :, whole:], value[:, :, whole:], mask.rest, scale)
        found, weights = torch.cat([found, last[0]]), torch.cat([weights, last[1]])
    # A part in which a query sees no key has no weight, and perhaps no number for a result.
    weights = weights.where(weights > -1e30, -torch.inf)
    shares = (weights - weights.logsumexp(0)).exp()[..., None]
    return found.masked_fill(shares == 0, 0).float().mul(shares).sum(0, keepdim=True).to(value.dtype)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return what attention finds, (rows, heads, queries, width), and the log-sum-exp of its scores without width."""
    mask = mask.expand(len(query), query.shape[1], -1, -1)
    aten: Any = torch.ops.aten
    if query.is_cuda:
        found, weights, _, _ = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
        return found, weights[..., : query.shape[2]]  # the kernel rounds their number up
    found, weights = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
    return found, weights
