"""Answer rows on disk: appended as they arrive, sorted at the end, 16 bytes of memory per row."""

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
from trainer.files.folders import write_lines

_KEY = AnswerKey._fields
_MOST_SAMPLES = 2**20
"""Number of samples per row for which a packed key has room."""


class RowFile:
    """A .jsonl file of rows with ``row`` and ``sample``. It grows by whole lines; memory holds only their offsets."""

    def __init__(
        self, path: Path, fields: Set[str] = frozenset(), drops: Callable[[dict[str, Any]], bool] | None = None
    ) -> None:
        """Read the file, and cut off an incomplete last line. Raises UserError that names a damaged line.

        Each row has ``fields`` besides its key. ``drops`` returns True for a row that no longer counts; `settle`
        removes it.
        """
        self.path, self._end, self._dropped = path, 0, False
        self.keys, self._places = array("q"), array("q")
        """Each line's packed key, and its byte offset."""
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict) or not {*_KEY, *fields} <= row.keys():
                        raise UserError(f"it is not an object with {', '.join(sorted({*_KEY, *fields}))}")
                    if not all(type(row[name]) is int for name in _KEY):
                        raise UserError("its row and sample are not numbers")
                except ValueError as error:
                    raise UserError(
                        f"{path}, line {number} is damaged ({first_line(error)})",
                        "delete that line; its conversation is then answered again",
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
        """Write the rows and wait until they are on the disk."""
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
        """Sort the file by row and sample and remove repeats, atomically. Does nothing if it is already sorted."""
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
    """The keys of the answers that were in a file when it was opened."""

    def __init__(self, *packed: "array[int]") -> None:
        self.keys = np.unique(np.concatenate([np.array(each, dtype=np.int64) for each in packed]))

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, AnswerKey)
        packed = _packed(key)
        at = int(np.searchsorted(self.keys, packed))
        return at < len(self.keys) and int(self.keys[at]) == packed


def _packed(key: AnswerKey) -> int:
    """Return a key as one 64-bit number, in the same order."""
    return key.row * _MOST_SAMPLES + key.sample


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file and the remedy to the error of a failed write."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): free some disk space, then run the same command "
            "again; finished answers are saved"
        ) from error
