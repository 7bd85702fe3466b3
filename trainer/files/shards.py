"""Shards of a store on disk: their examples, and the seals that tell whole files from halves.

Beside every file lies its seal, a JSON file with the file's size, its SHA-256 and a digest of its sources. The seal is
written after the file, so a file that a kill cut short has no seal, and is written anew. Processes that write different
shards need not wait for one another.
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
    """The places of examples in shards: whole examples, in the order of the data, up to ``shard_rows`` rows a shard.

    An example of more rows has a shard of its own.
    """

    lengths: tuple[int, ...]
    """Rows of each example; an example may have none."""
    shard_rows: int

    @cached_property
    def _ends(self) -> list[int]:
        """The rows up to the end of each example."""
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
        """Count the rows of a shard."""
        examples = self.shards[shard]
        return self._before(examples.stop) - self._before(examples.start)

    def place(self, index: int) -> tuple[int, slice]:
        """Return the shard of an example, and its rows in that shard."""
        shard = bisect_right(self._firsts, index) - 1
        first = self._before(index) - self._before(self._firsts[shard])
        return shard, slice(first, first + self.lengths[index])


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def digest_of(content: object) -> str:
    """Return the SHA-256 of plain JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_each(items: Iterable[object]) -> str:
    """Return the SHA-256 of numbers, texts and tuples, item by item: the data need not be held twice."""
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
    """True for a file whose seal has its size and the digest ``made_from``; ``verify`` compares its SHA-256 too."""
    try:
        seal = json.loads(_seal_of(path).read_text())
        if seal["made_from"] != made_from or seal["bytes"] != path.stat().st_size:
            return False
        return not verify or bool(seal["sha256"] == sha256_of(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_begun(path: Path) -> bool:
    """True where the file or its seal exists, whole or not."""
    return path.exists() or _seal_of(path).exists()


def missing_files(folder: Path, names: Sequence[str], made_from: str, verify: bool) -> list[str]:
    """Return the files that are missing or not whole."""
    return [name for name in names if not is_whole(folder / name, made_from, verify)]


def _seal_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _settle(partial: Path, path: Path) -> None:
    """Flush a written file to the disk and give it its name."""
    flush_to_disk(partial)
    partial.rename(path)
    flush_to_disk(path.parent)
