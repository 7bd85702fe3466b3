"""Checks for NaN and infinity in weights: a single one makes every output of a draft or of heads worthless."""

from collections.abc import Mapping

import torch
from torch import Tensor

_PIECE = 1 << 18
"""Values of a tensor that are tested at a time."""


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity, in the mapping's order."""
    return [name for name, tensor in tensors.items() if _broken(tensor)]


def check_finite(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raise ValueError for the first tensor that holds a NaN or an infinity, with the count of such values.

    ``what`` names the owner of the tensors in the message; ``remedy`` says what to do ("give an earlier checkpoint").
    """
    broken = non_finite(tensors)
    if not broken:
        return
    tensor = tensors[broken[0]]
    count = _broken(tensor)
    others = f", and {len(broken) - 1} more of its tensors hold some" if len(broken) > 1 else ""
    raise ValueError(
        f"{what} holds weights that are no numbers: {count} of the {tensor.numel()} values of {broken[0]} are NaN or "
        f"infinite{others}; {remedy}"
    )


def _broken(tensor: Tensor) -> int:
    """Count the values that are not finite, piece by piece: a test of a whole tensor would take twice its memory."""
    return sum(int((~_finite(piece)).sum()) for piece in tensor.detach().reshape(-1).split(_PIECE))


def _finite(tensor: Tensor) -> Tensor:
    """Mark the finite values. 8-bit floats are widened first, as torch has no `isfinite` for them."""
    return torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)
