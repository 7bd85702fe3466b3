"""Checks for NaN and infinity in weights: a single one makes every output of a draft or of heads worthless."""

from collections.abc import Mapping

import torch
from torch import Tensor


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity, in the mapping's order."""
    return [name for name, tensor in tensors.items() if not _finite(tensor).all()]


def check_finite(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raise ValueError for the first tensor that holds a NaN or an infinity, with the count of such values.

    ``what`` names the owner of the tensors in the message; ``remedy`` says what to do ("give an earlier checkpoint").
    """
    broken = non_finite(tensors)
    if not broken:
        return
    tensor = tensors[broken[0]]
    count = int((~_finite(tensor)).sum())
    others = f", and {len(broken) - 1} more of its tensors hold some" if len(broken) > 1 else ""
    raise ValueError(
        f"{what} holds weights that are no numbers: {count} of the {tensor.numel()} values of {broken[0]} are NaN or "
        f"infinite{others}; {remedy}"
    )


def _finite(tensor: Tensor) -> Tensor:
    """Mark the finite values. 8-bit floats are widened first, as torch has no `isfinite` for them."""
    tensor = tensor.detach()
    return torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)
