"""JSON files and safetensors headers of an artefact, checked before anything is built from it.

A size in a ``config.json`` is a claim. The header of a safetensors file is the evidence, as the library checks it
against the length of the file. Both are small: a wrong claim costs milliseconds here, not the memory that it names.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

_MOST_BYTES = 256 << 20
"""Greatest size of a JSON file, in bytes; the index of the largest models has a few MiB."""
SHARD_BYTES = 5 * 10**9
"""Greatest size of a file of weights, in bytes; a larger tensor has a file of its own."""
FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes that heads may have, by their safetensors names."""


class StoredTensor(NamedTuple):
    """A tensor as its file's header describes it: the safetensors name of its dtype (``BF16``) and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file that holds an object. ValueError with ``remedy`` if it is missing or holds anything else."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} cannot be read as JSON ({error}): {remedy}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, not an object: {remedy}")
    return stored


def read_header(path: Path, remedy: str) -> dict[str, StoredTensor]:
    """Read a safetensors file's names, dtypes and shapes, not its values. ValueError if it is missing or cut off."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            return {name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in stored.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}): {remedy}") from error


def check_tensors(
    path: Path, header: Mapping[str, StoredTensor], expected: Iterable[tuple[str, tuple[int, ...]]], remedy: str
) -> None:
    """Raise ValueError unless the header of weights has exactly these names and shapes, in one floating dtype.

    ``path``: the file or the folder that the header is of, for messages. ``expected`` is read up to the first missing
    name only, however many names a wrong config makes it yield.
    """
    if not header:
        raise ValueError(f"{path} holds no tensors: {remedy}")
    known = set()
    for name, shape in expected:
        if name not in header:
            raise ValueError(f"{path} does not fit its config: {name} is missing; {remedy}")
        if header[name].shape != shape:
            raise ValueError(
                f"{path} does not fit its config: size mismatch, {name} is {header[name].shape} and would be {shape}; "
                f"{remedy}"
            )
        known.add(name)
    if unknown := sorted(header.keys() - known):
        raise ValueError(f"{path} does not fit its config: {unknown[0]} is unknown; {remedy}")
    _check_one_float(path, header)


def _check_one_float(path: Path, header: Mapping[str, StoredTensor]) -> None:
    dtypes = sorted({tensor.dtype for tensor in header.values()})
    if len(dtypes) > 1:
        raise ValueError(f"{path} mixes dtypes ({', '.join(dtypes)}): save the heads in one")
    if other := [dtype for dtype in dtypes if dtype not in FLOATS]:
        raise ValueError(f"{path} holds weights of dtype {other[0]}: save the heads in one of {', '.join(FLOATS)}")


def check_whole(key: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless the size ``key`` is an int of at least ``least``; True and 1.0 are refused as well."""
    if type(value) is not int or value < least:
        raise ValueError(f"{key} is {reprlib.repr(value)}: give a whole number, {least} or more")
