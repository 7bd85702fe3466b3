"""The proof that an export holds the trained weights: read them back, compare every bit."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def check_bit_equal(written: Mapping[str, Tensor], read: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `ValueError` unless both hold the same names, dtypes, shapes and bits. Equal NaNs count as equal."""
    if written.keys() != read.keys():
        differing = sorted(written.keys() ^ read.keys())
        raise ValueError(f"{folder} reads back with other tensors than were written ({differing[0]}): export again")
    for name, tensor in written.items():
        other = read[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape or not torch.equal(_bits(tensor), _bits(other)):
            raise ValueError(
                f"{folder} reads back with another {name} than was written: export again, and check the disk if it "
                "happens twice"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
