"""The products of a fused loss: chunks of logits, sized by the device, and the sums of their gradients."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK_BYTES = 128 * 2**20
"""Logits of a chunk on a CPU: fewer slow down the products with the weight, more take memory and gain no speed."""
_GPU_CHUNK_BYTES = 2**30
_GPU_ROWS, _GPU_COMPARED_ROWS = 4096, 1024
"""Rows of a chunk that keep a GPU busy: of logits alone, and of logits beside a teacher's."""
_BLOCK_BYTES, _GPU_BLOCK_BYTES = 2 * 2**20, 256 * 2**20
"""fp32 rows that are softmaxed together: they stay in a CPU's cache, and bound the memory on a GPU."""


def chunk_rows(width: int, itemsize: int, device: torch.device, compared: bool) -> int:
    """Return the rows of ``width`` logits that a loss holds at a time; ``compared``: with as many of a teacher's."""
    if device.type != "cuda":
        return _rows_within(CHUNK_BYTES, width, itemsize)
    rows = _GPU_COMPARED_ROWS if compared else _GPU_ROWS
    return min(rows, _rows_within(_GPU_CHUNK_BYTES, width, itemsize))


def block_rows(width: int, itemsize: int, device: torch.device) -> int:
    """Return the rows of ``width`` logits that are softmaxed together, in numbers of ``itemsize`` bytes."""
    return _rows_within(_BLOCK_BYTES if device.type == "cpu" else _GPU_BLOCK_BYTES, width, itemsize)


def _rows_within(size: int, width: int, itemsize: int) -> int:
    return max(1, size // (width * itemsize))


class Product:
    """Inputs and weight of one of the products that make the logits, and their gradients as they are summed."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, learns_hidden: bool, learns: bool) -> None:
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._dtype = weight.dtype
        self._of_hidden = torch.empty_like(hidden) if learns_hidden else None
        self._of_weight = torch.empty_like(weight, dtype=wide_dtype(dtype)) if learns else None
        if self._of_weight is not None and not len(hidden):
            self._of_weight.zero_()

    def take(self, rows: slice, gradient: Float[Tensor, "rows outputs"]) -> None:
        """Add what a chunk's gradient with respect to the logits gives; the first chunk starts the sums."""
        if self._of_hidden is not None:
            self._of_hidden[rows] = gradient @ self.weight
        if self._of_weight is not None:
            add_product(self._of_weight, gradient.T, self.hidden[rows], onto=rows.start > 0)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the inputs and of the weight, each in its tensor's dtype."""
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._dtype)


def add_product(
    sums: Float[Tensor, "outputs hidden"],
    left: Float[Tensor, "outputs rows"],
    right: Float[Tensor, "rows hidden"],
    onto: bool,
) -> None:
    """Add ``left @ right`` to fp32 or fp64 sums, or overwrite them unless ``onto``.

    A product of half precision is summed in fp32; a device that adds it as it is computed never rounds it.
    """
    if left.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=int(onto), out=sums)
    elif _sums_products(sums.device):
        torch.addmm(sums, left, right, out_dtype=sums.dtype, beta=int(onto), out=sums)
    else:  # in one product: in parts of its rows it takes a sixth longer
        product = left @ right
        _ = sums.add_(product) if onto else sums.copy_(product)


def _sums_products(device: torch.device) -> bool:
    """Return True where a product of half precision can be added to fp32 sums as it is computed (sm80 and later)."""
    on_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def scale(gradient: Tensor, factor: Float[Tensor, ""]) -> Tensor:
    """Multiply a gradient in place by a factor in fp32 or fp64; returns it.

    The factor is not rounded to the gradient's dtype: in bf16 all of a term's gradient would be off by up to 0.4%.
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
    """Yield the summed products of ``chunk`` tokens at a time, always in the same memory.

    ``width`` is the number of the teacher's logits for a token, which share the memory of a chunk.
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
    """Yield the rows that are softmaxed together."""
    size = block_rows(max(logits.shape[1], width), wide_dtype(logits.dtype).itemsize, logits.device)
    return (slice(start, start + size) for start in range(0, len(logits), size))
