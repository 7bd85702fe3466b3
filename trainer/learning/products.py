"""Matrix products of the fused loss: chunks of logits sized for the device, and their gradients."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK_BYTES = 128 * 2**20
"""Size of a chunk's logits on a CPU: smaller ones slow down products, larger ones only take memory."""
_GPU_CHUNK_BYTES = 2**30
_GPU_ROWS, _GPU_COMPARED_ROWS = 4096, 1024
"""Rows per chunk that keep a GPU busy: without and with a teacher's logits."""
_BLOCK_BYTES, _GPU_BLOCK_BYTES = 2 * 2**20, 256 * 2**20
"""Size of rows softmaxed together: small enough for a CPU's cache, and for a GPU's memory."""


def chunk_rows(width: int, itemsize: int, device: torch.device, compared: bool) -> int:
    """Return how many rows of ``width`` logits fit in a chunk; ``compared`` if a teacher has as many."""
    if device.type != "cuda":
        return _rows_within(CHUNK_BYTES, width, itemsize)
    rows = _GPU_COMPARED_ROWS if compared else _GPU_ROWS
    return min(rows, _rows_within(_GPU_CHUNK_BYTES, width, itemsize))


def block_rows(width: int, itemsize: int, device: torch.device) -> int:
    """Return how many rows of ``width`` logits of ``itemsize`` bytes to softmax together."""
    return _rows_within(_BLOCK_BYTES if device.type == "cpu" else _GPU_BLOCK_BYTES, width, itemsize)


def _rows_within(size: int, width: int, itemsize: int) -> int:
    return max(1, size // (width * itemsize))


class Product:
    """One product of the logits: its input and weight, and their accumulated gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, learns_hidden: bool, learns: bool) -> None:
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._dtype = weight.dtype
        self._of_hidden = torch.empty_like(hidden) if learns_hidden else None
        self._of_weight = torch.empty_like(weight, dtype=wide_dtype(dtype)) if learns else None
        if self._of_weight is not None and not len(hidden):
            self._of_weight.zero_()

    def take(self, rows: slice, gradient: Float[Tensor, "rows outputs"]) -> None:
        """Accumulate from a chunk's gradient in the logits; the first chunk starts the sums."""
        if self._of_hidden is not None:
            self._of_hidden[rows] = gradient @ self.weight
        if self._of_weight is not None:
            add_product(self._of_weight, gradient.T, self.hidden[rows], onto=rows.start > 0)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of input and weight, each in its tensor's dtype."""
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._dtype)


def add_product(
    sums: Float[Tensor, "outputs hidden"],
    left: Float[Tensor, "outputs rows"],
    right: Float[Tensor, "rows hidden"],
    onto: bool,
) -> None:
    """Add ``left @ right`` to fp32 or fp64 sums, or overwrite them unless ``onto``.

    Half-precision products are summed in fp32, without rounding them first if the device supports it.
    """
    if left.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=int(onto), out=sums)
    elif _sums_products(sums.device):
        torch.addmm(sums, left, right, out_dtype=sums.dtype, beta=int(onto), out=sums)
    else:  # split by rows, this product takes a sixth longer
        product = left @ right
        _ = sums.add_(product) if onto else sums.copy_(product)


def _sums_products(device: torch.device) -> bool:
    """Return True if the device adds half-precision products directly to fp32 sums (sm80 and later)."""
    on_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def scale(gradient: Tensor, factor: Float[Tensor, ""]) -> Tensor:
    """Multiply a gradient in place by a factor in fp32 or fp64 and return it.

    The factor keeps its dtype: rounding it to bf16 would put a whole term's gradient off by up to 0.4%.
    """
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    for rows in gradient.split(block_rows(gradient[:1].numel() or 1, factor.itemsize, gradient.device)):
        rows.copy_(rows.to(factor.dtype).mul_(factor))
    return gradient


def product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(
    pairs: Sequence[Product], width: int, chunk: int | None
) -> Iterator[tuple[slice, Float[Tensor, "rows outputs"]]]:
    """Yield the logits of ``chunk`` tokens at a time, always in the same memory.

    ``width`` is the teacher's number of logits per token; they count towards a chunk's memory.
    """
    hidden, weight = pairs[0].hidden, pairs[0].weight
    chunk = chunk or chunk_rows(max(len(weight), width), weight.itemsize, hidden.device, compared=width > 0)
    held = torch.empty(min(chunk, len(hidden)), len(weight), dtype=weight.dtype, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, min(start + chunk, len(hidden)))
        logits = torch.mm(hidden[rows], weight.T, out=held[: rows.stop - start])
        for pair in pairs[1:]:
            logits.addmm_(pair.hidden[rows], pair.weight.T)
        yield rows, logits


def blocks(logits: Float[Tensor, "rows outputs"], width: int) -> Iterator[slice]:
    """Yield the rows to softmax together."""
    size = block_rows(max(logits.shape[1], width), wide_dtype(logits.dtype).itemsize, logits.device)
    return (slice(start, start + size) for start in range(0, len(logits), size))
