"""Functions that change the folders of stored drafts, for tests that such folders are rejected."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def with_config(**changes: object) -> Callable[[Path], None]:
    """Return a function that changes keys of a folder's config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that changes a folder's tensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return write
