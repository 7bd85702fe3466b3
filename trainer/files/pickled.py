"""Pickled weights of other programs, as ``torch.save`` writes them: tensors are read, and no code in the file runs."""

import pickletools
import struct
from pathlib import Path
from pickle import UnpicklingError
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from decoding.model.loading import UNREADABLE, first_line

_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16")),
}
"""Names that a dict of tensors needs. A pickle that names more is refused before PyTorch sees it."""
_NAMING = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
_MOST_SHARED = 64
"""Times that tensors together may exceed the file: layers that were trained as one share their bytes."""
_REMEDY = "give weights in safetensors, or have them saved again with torch.save(heads.state_dict(), …)"


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.pt`` file by name, mapped from the disk: unused values take no memory.

    ValueError, before anything is built, for a pickle that holds more than named tensors, is compressed or damaged.
    """
    try:
        _check_archive(path)
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*UNREADABLE, BadZipFile, UnpicklingError, EOFError, struct.error) as error:
        raise ValueError(f"{path} cannot be read as pickled weights ({first_line(error)}): {_REMEDY}") from error
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise ValueError(f"{path} holds a {type(held).__name__}, not tensors by their names: {_REMEDY}")
    for name, tensor in held.items():
        if not isinstance(tensor, Tensor) or not tensor.is_contiguous():
            raise ValueError(f"{path} holds {name[:80]!r}, which is no whole tensor: {_REMEDY}")
    claimed, size = sum(tensor.nbytes for tensor in held.values()), path.stat().st_size
    if claimed > _MOST_SHARED * size:
        raise ValueError(f"{path} claims {claimed:,} bytes of tensors, but the file has {size:,}: {_REMEDY}")
    return {name: tensor.detach() for name, tensor in held.items()}


def _check_archive(path: Path) -> None:
    """Refuse an archive that would grow when it is read, and one whose pickle names anything but tensors."""
    with ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len(set(names)) < len(names):
            raise BadZipFile("it has two files of one name")
        if any(member.compress_type != ZIP_STORED for member in members):
            raise BadZipFile("it is compressed, which torch.save never does")
        pickles = [name for name in names if name.endswith(".pkl")]
        if not pickles:
            raise BadZipFile("it holds no pickle")
        for name in pickles:
            _check_names(archive.read(name))


def _check_names(content: bytes) -> None:
    """Raise UnpicklingError for a pickle that names a class or function besides those of tensors."""
    try:
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in _NAMING and argument not in _ALLOWED:
                raise UnpicklingError(f"it names {str(argument or operation.name)[:80]!r}, and code is never run")
    except ValueError as error:  # genops refuses what is no pickle
        raise UnpicklingError(first_line(error)) from error
