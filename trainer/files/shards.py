"""Files of a store on disk: which examples a shard holds, and whether a file is there and whole.

Beside every file lies its seal, a JSON file with its size, its SHA-256 and what it was made from. The file is on the
disk under its name before its seal is, so whatever a kill leaves behind has no seal, and is written anew. Processes
that write different shards need not wait for one another.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.files.folders import flush_to_disk, sha256_of


@dataclass(frozen=True)
class Layout:
    """Which shard holds which examples: whole ones, in the order of the data, up to ``shard_rows`` rows a shard.

    An example longer than that has a shard of its own.
    """

    lengths: tuple[int, ...]
    """Rows of each example; one without any has a place of no rows."""
    shard_rows: int

    @cached_property
    def _ends(self) -> list[int]:
        """Rows up to the end of each example."""
        return list(accumulate(self.lengths))

    @cached_property
    def shards(self) -> list[range]:
        """The examples of each shard."""
        firsts, held = [0], 0
        for index, length in enumerate(self.lengths):
            if held and held + length > self.shard_rows:
                firsts.append(index)
                held = 0
            held += length
        return [range(*bounds) for bounds in zip(firsts, [*firsts[1:], len(self.lengths)], strict=True)]

    @cached_property
    def _firsts(self) -> list[int]:
        return [shard.start for shard in self.shards]

    def _before(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def num_rows(self, shard: int) -> int:
        """How many rows a shard holds."""
        examples = self.shards[shard]
        return self._before(examples.stop) - self._before(examples.start)

    def place(self, index: int) -> tuple[int, slice]:
        """The shard of an example, and the rows in it that are its own."""
        shard = bisect_right(self._firsts, index) - 1
        first = self._before(index) - self._before(self._firsts[shard])
        return shard, slice(first, first + self.lengths[index])


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def digest_of(content: object) -> str:
    """SHA-256 of plain JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_each(items: Iterable[object]) -> str:
    """SHA-256 of numbers, texts and tuples of them, one item after the other: the data need not be held twice."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()


def write_sealed(path: Path, tensors: dict[str, Tensor], made_from: str) -> None:
    """Write a safetensors file and then its seal; OSError if the disk will not take it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}): make room and start again to go on") from error
    seal = {"made_from": made_from, "bytes": partial.stat().st_size, "sha256": sha256_of(partial)}
    _settle(partial, path)
    write_text(_seal_of(path), json.dumps(seal))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _settle(partial, path)


def is_whole(path: Path, made_from: str, verify: bool) -> bool:
    """Whether a file is there with a seal that says it was made from this; ``verify`` also reads all of it."""
    try:
        seal = json.loads(_seal_of(path).read_text())
        if seal["made_from"] != made_from or seal["bytes"] != path.stat().st_size:
            return False
        return not verify or bool(seal["sha256"] == sha256_of(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_begun(path: Path) -> bool:
    """Whether anything of a file is there, whole or not: itself or its seal."""
    return path.exists() or _seal_of(path).exists()


def missing_files(folder: Path, names: Sequence[str], made_from: str, verify: bool) -> list[str]:
    """Those of the files that are not there, or not whole."""
    return [name for name in names if not is_whole(folder / name, made_from, verify)]


def _seal_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _settle(partial: Path, path: Path) -> None:
    """Give a file that is written its name, on the disk."""
    flush_to_disk(partial)
    partial.rename(path)
    flush_to_disk(path.parent)
