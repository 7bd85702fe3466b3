"""Weights in a folder: one safetensors file, or shards of it with an index; no second copy of them takes memory.

Files are written from where the tensors lie, and are read into the memory that the tensors keep: weights of any size
need room for themselves and little else.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from decoding.model.header import SHARD_BYTES, StoredTensor, read_header, read_object

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
WEIGHT_FILES = (WEIGHTS_NAME, INDEX_NAME, "model-*.safetensors")
"""Patterns of all names of such files, for a download."""
_PATTERN = "model{suffix}.safetensors"
_PATHS = (PurePosixPath, PureWindowsPath)


def write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model.safetensors``, or shards with an index where the tensors take more than ``shard_bytes``.

    Earlier weights of the folder are replaced. Contiguous tensors on the CPU are written from where they lie; others
    are copied there first.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Tensors that lie side by side in one storage (`StackedHeads`) are several all the same: hence no get_storage_id.
    split = split_state_dict_into_shards_factory(
        state, get_storage_size=lambda tensor: tensor.nbytes, filename_pattern=_PATTERN, max_shard_size=shard_bytes
    )
    for left in (path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        left.unlink()
    for name, held in split.filename_to_tensors.items():
        save_file({each: state[each] for each in held}, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def has_weights(folder: Path) -> bool:
    """Return True if the folder holds a file of weights, or an index of shards."""
    return any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def named_files(folder: Path, remedy: str) -> list[Path]:
    """Return the file of the weights, or the shards that the index names, which may be missing; none without either.

    ValueError with ``remedy`` for a shard that would be outside the folder.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    if not (folder / INDEX_NAME).is_file():
        return []
    path = folder / INDEX_NAME
    index = read_object(path, remedy)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(index.get("metadata", {}), dict):
        raise ValueError(f"{path} is no index of weights (weight_map: names of tensors and of their files): {remedy}")
    if outside := [name for name in weight_map.values() if not _is_shard(name)]:
        raise ValueError(f"{path} names {reprlib.repr(outside[0])}, which is no file inside its folder: {remedy}")
    return [folder / name for name in dict.fromkeys(weight_map.values())]


def weight_files(folder: Path, remedy: str) -> list[Path]:
    """Return the file of the weights, or the shards that the index names; none where the folder has neither.

    ValueError with ``remedy`` unless each shard exists inside the folder.
    """
    files = named_files(folder, remedy)
    if missing := [path for path in files if not path.is_file()]:
        name = reprlib.repr(str(missing[0].relative_to(folder)))
        raise ValueError(f"{folder / INDEX_NAME} names {name}, which is missing: {remedy}")
    return files


def weights_header(folder: Path, remedy: str) -> dict[str, StoredTensor]:
    """Return names, dtypes and shapes of all tensors; none where the folder has no weights. Errors: `weight_files`."""
    return {name: tensor for path in weight_files(folder, remedy) for name, tensor in read_header(path, remedy).items()}


def stored_weights(folder: Path, remedy: str) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor, one in memory at a time. Errors: `weight_files`."""
    for path in weight_files(folder, remedy):
        with safe_open(path, framework="pt", backend="pread") as file:  # into memory of its own: the file may change
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield name, file.get_tensor(name)


def read_weights(folder: Path, remedy: str) -> dict[str, Tensor]:
    """Read all tensors. Errors: `weight_files`."""
    return dict(stored_weights(folder, remedy))


def _is_shard(name: object) -> bool:
    """Return True for the name of a safetensors file inside the folder (symbolic links may leave it)."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
        return False
    return not any(kind(name).is_absolute() or kind(name).drive or ".." in kind(name).parts for kind in _PATHS)
