"""Shards of a store on disk: their layout, and seals that mark complete files.

A seal is a file with a checksum line (`sha256sum -c`), written once its shard is on disk. A killed run leaves a shard
without a seal; it is written again. Processes writing different shards do not wait for each other.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.files.folders import checksum_line, flush_to_disk, read_checksums, sha256_of

_MADE_FROM = "made_from"
"""Key of the metadata in a safetensors file's header."""


@dataclass(frozen=True)
class ShardLayout:
    """Assignment of examples to shards: whole examples, in data order, up to ``shard_rows`` rows per shard.

    An example with more rows is alone in its shard.
    """

    lengths: tuple[int, ...]
    """Rows of each example, possibly 0."""
    shard_rows: int

    @cached_property
    def _starts(self) -> list[int]:
        """The number of rows before each example, then of all rows."""
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def shards(self) -> list[range]:
        """The examples of each shard."""
        firsts = [0]
        for index in range(len(self.lengths)):
            if self._starts[index + 1] - self._starts[firsts[-1]] > self.shard_rows and index > firsts[-1]:
                firsts.append(index)
        return [range(*bounds) for bounds in pairwise([*firsts, len(self.lengths)])]

    def num_rows(self, shard: int) -> int:
        """Count the rows of a shard."""
        examples = self.shards[shard]
        return self._starts[examples.stop] - self._starts[examples.start]

    def find(self, index: int) -> tuple[int, slice]:
        """Return the shard of an example, and its rows in that shard."""
        shard = bisect_right(self.shards, index, key=lambda examples: examples.start) - 1
        first = self._starts[index] - self._starts[self.shards[shard].start]
        return shard, slice(first, first + self.lengths[index])


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def digest_of(content: object) -> str:
    """Return the SHA-256 of plain JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_each(items: Iterable[Sequence[bytes]]) -> str:
    """Return the SHA-256 of a sequence of items, each of one or more parts.

    Includes the parts' lengths: different items with equally many parts never hash the same bytes.
    """
    digest = hashlib.sha256()
    for item in items:
        digest.update(b"".join(len(part).to_bytes(8, "little") for part in item))
        for part in item:
            digest.update(part)
    return digest.hexdigest()


def write_sealed(path: Path, tensors: dict[str, Tensor], made_from: str) -> None:
    """Write a safetensors file with its origin, then its seal; raise OSError if the disk is full."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, {_MADE_FROM: made_from})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}): make room and start again to resume") from error
    seal = checksum_line(path.name, sha256_of(partial))
    _settle(partial, path)
    write_text(_seal_of(path), seal)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    write_lines(path, [text.encode()])


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(lines)
    _settle(partial, path)


def is_whole(path: Path, made_from: str, verify: bool) -> bool:
    """Return True for a sealed file of full size with this origin; ``verify`` also checks its checksum."""
    try:
        digest = read_checksums(_seal_of(path))[path.name]
        with safe_open(path, framework="pt") as file:  # rejects a file of wrong size
            if (file.metadata() or {}).get(_MADE_FROM) != made_from:
                return False
        return not verify or digest == sha256_of(path)
    except (OSError, ValueError, KeyError, SafetensorError):
        return False


def is_begun(path: Path) -> bool:
    """Return True if the file or its seal exists, complete or not."""
    return path.exists() or _seal_of(path).exists()


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _settle(partial: Path, path: Path) -> None:
    flush_to_disk(partial)
    partial.rename(path)
    flush_to_disk(path.parent)
