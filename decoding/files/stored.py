"""Reads, writes and checks JSON objects and weights in a folder. The weights are in one safetensors file, or in several
shards with an index.

A size in a ``config.json`` may be wrong; the header of a safetensors file is reliable, because the library checks it
against the file's length. Comparing the two finds a wrong config within milliseconds, before memory is allocated.
Weights are written and read without a second copy in memory.
"""

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decoding.errors import UserError

Config = TypeVar("Config")
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
WEIGHT_FILES = (WEIGHTS_NAME, INDEX_NAME, "model-*.safetensors")
SHARD_BYTES = 5 * 10**9
"""Largest size of a weight file, in bytes; a tensor that is larger has a separate file."""
FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes that heads may have, by their safetensors names."""
_MOST_BYTES = 256 << 20  # largest size of a JSON file, in bytes; the largest models' index has a few MiB
_PIECE = 1 << 18  # number of values tested for NaN at a time: a test of a whole tensor takes twice its memory


class StoredTensor(NamedTuple):
    """A tensor described by its file's header: the safetensors name of its dtype (``BF16``) and its shape."""

    dtype: str
    shape: tuple[int, ...]


def cache_root() -> Path:
    """Return the folder for everything that can be rebuilt: HEADSTART_CACHE, or a folder in the user's cache."""
    if named := os.environ.get("HEADSTART_CACHE"):
        return Path(named)
    import platformdirs  # the GPU suite may run without this package

    return Path(platformdirs.user_cache_dir("headstart"))


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a file; raise UserError with ``remedy`` if the file does not contain one."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"it has {path.stat().st_size} bytes")
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{path} cannot be read as JSON ({error}): {remedy}") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} contains a {type(stored).__name__}, not an object: {remedy}")
    return stored


def read_config_of(kind: type[Config], path: Path, format: str, remedy: str) -> Config:
    """Read a JSON file that contains exactly ``format`` and the fields of the dataclass ``kind``.

    Raises UserError with ``remedy`` for any other file, or if the dataclass rejects a value.
    """
    stored = read_object(path, remedy)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    try:
        if stored.pop("format", None) != format:
            raise UserError(f"its format is not {format!r}")
        for key in (*known, *stored):
            if key not in stored or key not in known:
                raise UserError(f"{key} is {'missing' if key in known else 'unknown'}")
        return kind(**stored)
    except UserError as error:
        raise UserError(f"{path} does not contain a {kind.__name__} ({error}): {remedy}") from error


# --- headers ----------------------------------------------------------------------------------------------------------


def read_header(path: Path, remedy: str) -> dict[str, StoredTensor]:
    """Read a safetensors file's names, dtypes and shapes; raise UserError if the file is missing or truncated."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            return {name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in stored.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}): {remedy}") from error


def check_tensors(
    path: Path, header: Mapping[str, StoredTensor], expected: Iterable[tuple[str, tuple[int, ...]]], remedy: str
) -> None:
    """Raise UserError unless the header of a weight file lists exactly these names and shapes, and all tensors have the
    same floating dtype.

    ``path``: the file or folder of the header, as messages name it. ``expected`` is read only up to the first missing
    name, because a wrong config may imply very many names.
    """
    if not header:
        raise UserError(f"{path} does not contain tensors: {remedy}")
    known = set()
    for name, shape in expected:
        if name not in header:
            raise UserError(f"{path} does not fit its config: {name} is missing; {remedy}")
        if header[name].shape != shape:
            raise UserError(
                f"{path} does not fit its config: size mismatch, {name} has the shape {header[name].shape}, "
                f"not {shape}; {remedy}"
            )
        known.add(name)
    if unknown := sorted(header.keys() - known):
        raise UserError(f"{path} does not fit its config: {unknown[0]} is unknown; {remedy}")
    dtypes = sorted({tensor.dtype for tensor in header.values()})
    if len(dtypes) > 1 or dtypes[0] not in FLOATS:
        raise UserError(f"{path} contains weights in {' and '.join(dtypes)}: save them in one of {', '.join(FLOATS)}")


# --- weights ----------------------------------------------------------------------------------------------------------


def write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model.safetensors``, or shards with an index if the tensors take more than ``shard_bytes``.

    Earlier weights in the folder are replaced. Contiguous tensors on the CPU are written without a copy; other tensors
    are copied to the CPU first.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # get_storage_id is not used, because tensors that share a storage (`StackedHeads`) are still separate tensors.
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for left in (path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        left.unlink()
    for name, held in split.filename_to_tensors.items():
        save_file({tensor_name: state[tensor_name] for tensor_name in held}, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def has_weights(folder: Path) -> bool:
    """Return True if the folder contains a file of weights or an index of shards."""
    return any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def named_files(folder: Path, remedy: str) -> list[Path]:
    """Return the weight file, or all shards in the index, even missing shards. If there is neither a weight file nor an
    index, the list is empty.

    Raises UserError with ``remedy`` for a shard outside the folder.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    path = folder / INDEX_NAME
    if not path.is_file():
        return []
    index = read_object(path, remedy)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(index.get("metadata", {}), dict):
        raise UserError(f"{path} is not an index of weights (a weight_map from tensors to files): {remedy}")
    if outside := [name for name in weight_map.values() if not _is_shard(name)]:
        raise UserError(f"{path} names {reprlib.repr(outside[0])}, which is not a file inside its folder: {remedy}")
    return [folder / name for name in dict.fromkeys(weight_map.values())]


def _is_shard(name: object) -> bool:
    """Return True for the name of a safetensors file inside the folder (symbolic links may point outside)."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
        return False
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def weight_files(folder: Path, remedy: str) -> list[Path]:
    """Return the weight file, or the shards in the index. If there is neither a weight file nor an index, the list is
    empty.

    Raises UserError with ``remedy`` unless each shard exists inside the folder.
    """
    files = named_files(folder, remedy)
    if missing := [path for path in files if not path.is_file()]:
        name = reprlib.repr(str(missing[0].relative_to(folder)))
        raise UserError(f"{folder / INDEX_NAME} names {name}, which is missing: {remedy}")
    return files


def weights_header(folder: Path, remedy: str) -> dict[str, StoredTensor]:
    """Return names, dtypes and shapes of all tensors; without weights the mapping is empty.

    Raises the errors of `weight_files`.
    """
    return {name: tensor for path in weight_files(folder, remedy) for name, tensor in read_header(path, remedy).items()}


def stored_weights(folder: Path, remedy: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every tensor, with one tensor in memory at a time.

    Raises the errors of `weight_files`.
    """
    for path in weight_files(folder, remedy):
        with safe_open(path, framework="pt", backend="pread") as file:  # a private copy, because the file may change
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield name, file.get_tensor(name)


def read_weights(folder: Path, remedy: str) -> dict[str, Tensor]:
    """Read all tensors. Raises the errors of `weight_files`."""
    return dict(stored_weights(folder, remedy))


# --- NaN and infinity: a single such value makes all outputs of a draft or of heads useless ---------------------------


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that contain a NaN or an infinity, in the mapping's order."""
    return [name for name, tensor in tensors.items() if _count_non_finite(tensor)]


def check_finite(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raise UserError for the first tensor with a NaN or an infinity; the message counts such values.

    ``what`` names the owner of the tensors, ``remedy`` says what to do ("use an earlier checkpoint").
    """
    if broken := non_finite(tensors):
        tensor, others = tensors[broken[0]], len(broken) - 1
        raise UserError(
            f"{what} has weights that are not finite ({_count_non_finite(tensor)} of {tensor.numel()} values in "
            f"{broken[0]}{f' and some in {others} more tensors' * bool(others)}): {remedy}"
        )


def check_copies(folder: Path, of_target: Mapping[str, Tensor], remedy: str) -> None:
    """Raise UserError if a stored tensor with one of these names differs from the target's tensor by more than
    rounding.
    """
    if weights_header(folder, remedy).keys().isdisjoint(of_target):
        return
    for name, tensor in stored_weights(folder, remedy):
        if name not in of_target:
            continue
        own = of_target[name].detach()
        if tensor.shape != own.shape or not torch.allclose(tensor.to(own), own, rtol=2**-7, atol=1e-6):
            raise UserError(
                f"{folder} contains an {name} that differs from this tensor in the target: "
                "use a draft that uses the target's weights"
            )


def _count_non_finite(tensor: Tensor) -> int:
    narrow = tensor.is_floating_point() and tensor.itemsize == 1  # torch lacks isfinite for 8-bit floats
    pieces = tensor.detach().reshape(-1).split(_PIECE)
    return sum(int((~torch.isfinite(piece.float() if narrow else piece)).sum()) for piece in pieces)


def without_d2t(
    header: Mapping[str, StoredTensor], outputs: int | None, folder: Path, remedy: str
) -> dict[str, StoredTensor]:
    """Return a header without ``d2t``. Raise UserError unless d2t has ``outputs`` whole numbers; if ``outputs`` is
    None, raise UserError unless d2t is missing.
    """
    rest = dict(header)
    stored, wanted = rest.pop("d2t", None), None if outputs is None else StoredTensor("I64", (outputs,))
    if stored != wanted:
        size = "unknown" if outputs is None else f"not a list of {outputs} whole numbers"
        raise UserError(f"{folder} does not fit its config: d2t is {size}; {remedy}")
    return rest
