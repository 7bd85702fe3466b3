"""Records of an evaluation: a JSON line for each wave by each method, written as it comes, read again after a kill.

A folder holds ``runs-RANK.jsonl`` of each process. The first line of a file is its provenance: ``identity``, the
settings that make the records, which all files of a folder share; and the versions, machine and commit behind them.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decoding.measure.methods import Run
from decoding.metrics import StepCount

Margin = float | Literal["ended"] | None
"""Difference of the two tokens' logits where a greedy text parts from plain decoding's; "ended" where one of them ended
and the other went on; None for equal texts."""

_ABOUT = ("hardware", "versions", "commit", "processes")
"""Facts that may differ among the files of a folder; their times then do not compare."""


class GridCell(NamedTuple):
    """A cell of the grid: texts decoded at a time, and the longest prompt in tokens (None: each of its own length)."""

    batch_size: int
    context: int | None


class RunKey(NamedTuple):
    """The name of a record: ``turn`` is that of the conversation, ``round`` that of the repetition, both from 0."""

    cell: GridCell
    wave: int
    turn: int
    setting: str
    method: str
    round: int


@dataclass(frozen=True)
class Record:
    """The texts of one wave by one method: ``prompts`` are the ids of its questions, a run and a digest for each."""

    key: RunKey
    prompts: tuple[str, ...]
    digests: tuple[str, ...]
    runs: tuple[Run, ...]


class Records:
    """Records by key, and the file that new ones go to (None: memory only)."""

    def __init__(self, path: Path | None = None, known: Iterable[Mapping[str, Any]] = ()) -> None:
        """``known`` are the lines of earlier files behind their provenance."""
        self.by_key: dict[RunKey, Record] = {}
        self.margins: dict[RunKey, tuple[Margin, ...]] = {}
        self.left_out: dict[tuple[GridCell, int, int, str], tuple[str, ...]] = {}
        """Ids of the questions whose later turn was too long, by cell, wave, turn and setting."""
        self.cost_curve: dict[int, float] | None = None
        for line in known:
            self.take(line)
        self._file = None if path is None else path.open("a", encoding="utf-8")
        self.provenance: dict[str, Any] | None = None
        """Provenance of what is added from here on; it is written with the first line added."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Add what a line holds."""
        if "cost_curve" in line:
            self.cost_curve = {int(size): float(seconds) for size, seconds in line["cost_curve"].items()}
            return
        if "provenance" in line:
            return
        cell = GridCell(*line["cell"])
        if "left_out" in line:
            self.left_out[cell, line["wave"], line["turn"], line["setting"]] = tuple(line["left_out"])
            return
        key = RunKey(cell, *(line[name] for name in RunKey._fields[1:]))
        if "margins" in line:
            self.margins[key] = tuple(line["margins"])
        else:
            runs = tuple(map(_run, line["runs"]))
            self.by_key[key] = Record(key, tuple(line["prompts"]), tuple(line["digests"]), runs)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line and write it, flushed: a kill loses nothing of it."""
        self.take(line)
        if self._file is not None:
            new = [line] if self.provenance is None else [{"provenance": self.provenance}, line]
            self.provenance = None
            self._file.writelines(json.dumps(each) + "\n" for each in new)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield everything as lines, to hand it to another process."""
        for record in self.by_key.values():
            yield line_of(record.key, prompts=record.prompts, digests=record.digests, runs=record.runs)
        for key, margins in self.margins.items():
            yield line_of(key, margins=margins)
        for (cell, wave, turn, setting), ids in self.left_out.items():
            yield {"cell": cell, "wave": wave, "turn": turn, "setting": setting, "left_out": ids}


def line_of(key: RunKey, **content: Any) -> dict[str, Any]:
    """Return a line with the fields of the key."""
    return {**key._asdict(), **content}


def _run(values: Sequence[Any]) -> Run:
    """Rebuild a run from its JSON: a list in the order of its fields."""
    run = Run(*values)
    return run._replace(tokens=tuple(run.tokens), counts=tuple(StepCount(*counts) for counts in run.counts))


# --- files ------------------------------------------------------------------------------------------------------------


def open_records(folder: Path, rank: int, provenance: Mapping[str, Any]) -> Records:
    """Open the file of process ``rank`` to resume where an earlier run of the same settings stopped.

    Call `check_identity` before, on every process, and let none begin before all have opened theirs. A half line, which
    a kill may have left, is cut off.
    """
    path = folder / f"runs-{rank}.jsonl"
    known = [line for file in record_files(folder) for line in read_lines(file)]
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        os.truncate(path, _whole(path.read_bytes()))
    records = Records(path, known)
    lines = read_lines(path)
    if not lines or any(lines[0]["provenance"].get(name) != provenance.get(name) for name in _ABOUT):
        records.provenance = dict(provenance)
    return records


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the first difference, if the folder holds records of other settings."""
    wanted = json.loads(json.dumps(identity))
    for file in record_files(folder):
        lines = read_lines(file)
        if not lines:
            continue
        found = provenance_of(lines, file).get("identity", {})
        for name in {**wanted, **found}:
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{file} holds runs with {name} {json.dumps(found.get(name)):.60}, not "
                    f"{json.dumps(wanted.get(name)):.60}: give another output, or --restart to drop them"
                )


def record_files(folder: Path) -> list[Path]:
    """Return the files of records in a folder, by rank."""
    return sorted(folder.glob("runs-*.jsonl"), key=lambda path: (len(path.name), path.name))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of records; ValueError for a damaged one."""
    content = path.read_bytes() if path.exists() else b""
    lines = []
    for number, line in enumerate(content[: _whole(content)].split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError(f"{type(value).__name__}, not an object")
            lines.append(value)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}): delete that line, and its wave is decoded again"
            ) from error
    return lines


def provenance_of(lines: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Return the provenance that a file's lines begin with; ValueError for a file that begins otherwise."""
    if not lines or "provenance" not in lines[0]:
        raise ValueError(f"{path} does not begin with its provenance: it is not a file of runs by `headstart evaluate`")
    return dict(lines[0]["provenance"])


def provenances(folder: Path) -> list[dict[str, Any]]:
    """Return every provenance in a folder's files, in their order."""
    return [line["provenance"] for file in record_files(folder) for line in read_lines(file) if "provenance" in line]


def _whole(content: bytes) -> int:
    """Return the length of the content up to the end of its last whole line."""
    return content.rfind(b"\n") + 1
