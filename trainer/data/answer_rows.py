"""Rows of answers on disk: written as they come and sorted at the end, with 16 bytes of memory for each."""

import json
import os
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from decoding.errors import UserError
from decoding.model.loading import first_line
from trainer.data.conversations import AnswerKey
from trainer.files.shards import write_lines

_KEY = AnswerKey._fields
_MOST_SAMPLES = 2**20
"""Samples of one row that a packed key has room for."""


class RowFile:
    """A .jsonl file of rows with a ``row`` and a ``sample``, which grows by whole lines; memory holds their places."""

    def __init__(
        self, path: Path, fields: Set[str] = frozenset(), drops: Callable[[dict[str, Any]], bool] | None = None
    ) -> None:
        """Read the file, and cut off the half line that a kill may have left. UserError names a damaged line.

        ``fields``: what each row has besides its key. ``drops``: True for a row that no longer counts; `settle` leaves
        it out.
        """
        self.path, self._end, self._dropped = path, 0, False
        self.keys, self._places = array("q"), array("q")
        """Each line's packed key, and the byte at which it begins."""
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict) or not {*_KEY, *fields} <= row.keys():
                        raise ValueError(f"it is not an object with {', '.join(sorted({*_KEY, *fields}))}")
                    if not all(type(row[name]) is int for name in _KEY):
                        raise ValueError("its row and sample are not numbers")
                except ValueError as error:
                    raise UserError(
                        f"{path}, line {number} is damaged ({first_line(error)})",
                        "delete that line, and what it held is answered again",
                    ) from error
                self._note(row, line, counts=drops is None or not drops(row))
        if self._end < path.stat().st_size:
            os.truncate(path, self._end)

    def _note(self, row: dict[str, Any], line: bytes, counts: bool = True) -> None:
        if counts:
            self.keys.append(_packed(AnswerKey(row["row"], row["sample"])))
            self._places.append(self._end)
        self._dropped |= not counts
        self._end += len(line)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows and wait until the disk has them."""
        if not rows:
            return
        lines = [f"{json.dumps(row)}\n".encode() for row in rows]
        with writing(self.path), self.path.open("ab") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        for row, line in zip(rows, lines, strict=True):
            self._note(row, line)

    def settle(self) -> None:
        """Sort the file by row and sample, each once, in one step, unless it is so already."""
        keys, order = np.unique(np.array(self.keys, dtype=np.int64), return_index=True)
        if not self._dropped and np.array_equal(order, np.arange(len(self.keys))):
            return
        places, self._places, self._end = self._places, array("q"), 0
        self.keys, self._dropped = array("q", keys.tobytes()), False
        with writing(self.path), self.path.open("rb") as file:
            write_lines(self.path, self._moved(file, (places[index] for index in order)))

    def _moved(self, file: BinaryIO, places: Iterable[int]) -> Iterator[bytes]:
        for place in places:
            file.seek(place)
            line = file.readline()
            self._places.append(self._end)
            self._end += len(line)
            yield line

    def first(self) -> dict[str, Any]:
        """Return the first row of the file."""
        with self.path.open("rb") as file:
            row: dict[str, Any] = json.loads(file.readline())
        return row


class KeySet(Container[AnswerKey]):
    """The keys of the answers that a file held when it was opened."""

    def __init__(self, *packed: "array[int]") -> None:
        self.keys = np.unique(np.concatenate([np.array(each, dtype=np.int64) for each in packed]))

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, AnswerKey)
        packed = _packed(key)
        at = int(np.searchsorted(self.keys, packed))
        return at < len(self.keys) and int(self.keys[at]) == packed


def _packed(key: AnswerKey) -> int:
    """Return a key as one number of 64 bits, in the same order."""
    return key.row * _MOST_SAMPLES + key.sample


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file, and the remedy, in the error of a disk that takes no more."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): make room there, then start the same command "
            "again; what was answered before is kept"
        ) from error
