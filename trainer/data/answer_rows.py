"""The rows of answers on disk. Rows are appended as they arrive, and sorted at the end.

Only the keys and offsets of the rows are in memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from decoding.errors import UserError, first_line
from trainer.data.conversations import AnswerKey
from trainer.files.folders import write_lines

_KEY = AnswerKey._fields


class RowFile:
    """A .jsonl file of rows that have the fields ``row`` and ``sample``. The file grows by whole lines; only the keys
    are in memory.
    """

    def __init__(
        self, path: Path, fields: Set[str] = frozenset(), drops: Callable[[dict[str, Any]], bool] | None = None
    ) -> None:
        """Read the file, and cut off an incomplete last line.

        Each row must have a key and ``fields``. ``drops`` returns True for a row that no longer counts and that
        `settle` will remove. Raises a UserError that names the line if a line is damaged.
        """
        self.path, self._end = path, 0
        self.offsets: dict[AnswerKey, int] = {}
        """The byte offset of each key's first line."""
        self._dropped = False  # True if the file has lines that `settle` removes
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
                        "delete the line, and its conversation will be answered again",
                    ) from error
                self._note(row, line, counts=drops is None or not drops(row))
        if self._end < path.stat().st_size:
            os.truncate(path, self._end)

    def _note(self, row: dict[str, Any], line: bytes, counts: bool = True) -> None:
        key = AnswerKey(row["row"], row["sample"])
        if counts and key not in self.offsets:
            self.offsets[key] = self._end
        else:
            self._dropped = True
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
        """Sort the file by row and sample, and remove repeated rows, in one atomic step.

        Does nothing if the file is sorted already.
        """
        offsets = sorted(self.offsets.items())
        if not self._dropped and offsets == [*self.offsets.items()]:
            return
        self.offsets, self._dropped, self._end = {}, False, 0
        with writing(self.path), self.path.open("rb") as file:
            write_lines(self.path, (self._moved(file, *offset) for offset in offsets))

    def _moved(self, file: BinaryIO, key: AnswerKey, offset: int) -> bytes:
        file.seek(offset)
        line = file.readline()
        self.offsets[key] = self._end
        self._end += len(line)
        return line

    def first(self) -> dict[str, Any]:
        """Return the first row of the file."""
        with self.path.open("rb") as file:
            row: dict[str, Any] = json.loads(file.readline())
        return row


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name and a remedy to the error of a failed write."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): free some disk space, then run the same command "
            "again; finished answers are saved"
        ) from error
