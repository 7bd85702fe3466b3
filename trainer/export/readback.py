"""The proof that an export holds the trained weights: read them back, compare every bit."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from decoding.model.stored import stored_weights


def check_stored(written: Mapping[str, Tensor], folder: Path) -> None:
    """Compare the folder's weights with what was written, one tensor in memory at a time; errors: `check_bit_equal`."""
    check_each(written, stored_weights(folder, "export again"), folder)


def check_bit_equal(written: Mapping[str, Tensor], read: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `ValueError` unless both hold the same names, dtypes, shapes and bits. Equal NaNs count as equal."""
    check_each(written, read.items(), folder)


def check_each(written: Mapping[str, Tensor], read: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Compare tensors one by one as they are read; errors: `check_bit_equal`."""
    missing = set(written)
    for name, other in read:
        if name not in missing:
            raise _other_tensors(folder, name)
        missing.remove(name)
        tensor = written[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape or not torch.equal(_bits(tensor), _bits(other)):
            raise ValueError(
                f"{folder} reads back with another {name} than was written: export again, and check the disk if it "
                "happens twice"
            )
        del other  # before the next one is read
    if missing:
        raise _other_tensors(folder, min(missing))


def _other_tensors(folder: Path, name: str) -> ValueError:
    return ValueError(f"{folder} reads back with other tensors than were written ({name}): export again")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
