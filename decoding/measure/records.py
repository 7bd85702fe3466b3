"""Records of an evaluation: one JSON line per wave and method, written immediately, so that a killed run can resume.

Each process writes ``runs-RANK.jsonl`` in the output folder. The first line of a file is its provenance. The field
``identity`` of a provenance lists the settings that determine the records, and is the same in all files of a folder.
The other fields contain the versions, machine and commit.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decoding.errors import UserError
from decoding.measure.methods import Run
from decoding.metrics import StepCount

Margin = float | Literal["ended"] | None
"""Gap between the logits of the two tokens at which a greedy text first differs from plain decoding's text; "ended" if
one of the texts stops there; None if the texts are equal."""

_ABOUT = ("hardware", "versions", "commit", "processes")
"""Provenance fields that may differ between the files of a folder; times of such files are not comparable."""


class GridCell(NamedTuple):
    """A cell of the grid: the number of texts decoded together, and the prompt length in tokens.

    A ``context`` of None means that prompts are used as they are.
    """

    batch_size: int
    context: int | None


class RunKey(NamedTuple):
    """The key of a record, which says which method decoded which wave, turn and round in which cell and setting.

    ``turn`` counts the turns of the conversation, and ``round`` counts the repetitions; both begin at 0.
    """

    cell: GridCell
    wave: int
    turn: int
    setting: str
    method: str
    round: int


@dataclass(frozen=True)
class Record:
    """The texts that one method wrote for one wave.

    ``prompts`` are question ids; each of them has a fingerprint and a run.
    """

    key: RunKey
    prompts: tuple[str, ...]
    fingerprints: tuple[str, ...]
    runs: tuple[Run, ...]


class Records:
    """The records by their keys, and the file to which new records are appended (None: they stay in memory only)."""

    def __init__(self, path: Path | None = None, known: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start with ``known``, the lines of earlier files."""
        self.by_key: dict[RunKey, Record] = {}
        self.margins: dict[RunKey, tuple[Margin, ...]] = {}
        self.left_out: dict[tuple[GridCell, int, int, str], tuple[str, ...]] = {}
        """Ids of the questions with a later turn that was too long, by cell, wave, turn and setting."""
        self.cost_curve: dict[int, float] | None = None
        for line in known:
            self.take(line)
        self._file = None if path is None else path.open("a", encoding="utf-8")
        self.provenance: dict[str, Any] | None = None
        """Provenance of all lines that will be added; it is written together with the first of these lines."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Add the content of a line that was read."""
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
        """Add a line and write it to the file immediately, so that it survives a kill."""
        self.take(line)
        if self._file is not None:
            new = [line] if self.provenance is None else [{"provenance": self.provenance}, line]
            self.provenance = None
            self._file.writelines(json.dumps(entry) + "\n" for entry in new)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all content as lines, for sending to another process."""
        for record in self.by_key.values():
            yield line_of(record.key, prompts=record.prompts, digests=record.fingerprints, runs=record.runs)
        for key, margins in self.margins.items():
            yield line_of(key, margins=margins)
        for (cell, wave, turn, setting), ids in self.left_out.items():
            yield {"cell": cell, "wave": wave, "turn": turn, "setting": setting, "left_out": ids}


def line_of(key: RunKey, **content: Any) -> dict[str, Any]:
    """Return a line of a record file: the fields of the key, and ``content``."""
    return {**key._asdict(), **content}


def _run(values: Sequence[Any]) -> Run:
    """Rebuild a run from its JSON, which lists the fields in order."""
    run = Run(*values)
    return run._replace(tokens=tuple(run.tokens), counts=tuple(StepCount(*counts) for counts in run.counts))


# --- files ------------------------------------------------------------------------------------------------------------


def open_records(folder: Path, rank: int, provenance: Mapping[str, Any]) -> Records:
    """Open the file of process ``rank`` and resume where an earlier run with the same settings stopped.

    First call `check_origin` on every process. No process may add a record before all processes have opened their
    files. A partial last line, left by a kill, is cut off.
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


def check_origin(folder: Path, origin: Mapping[str, Any], partly: bool = False) -> None:
    """Raise UserError if the folder holds records with other settings; the message names the first difference.

    ``partly``: compare only the settings that ``origin`` has.
    """
    wanted = json.loads(json.dumps(origin))
    for file in record_files(folder):
        lines = read_lines(file)
        if not lines:
            continue
        recorded = provenance_of(lines, file).get("identity", {})
        for name in wanted if partly else {**wanted, **recorded}:
            if (recorded.get(name) or None) != (wanted.get(name) or None):  # older records omit options that are off
                raise UserError(
                    f"{file} contains runs with {name} {json.dumps(recorded.get(name)):.60}, not "
                    f"{json.dumps(wanted.get(name)):.60}: use another --output, or --restart to delete them"
                )


def record_files(folder: Path) -> list[Path]:
    """Return the record files in a folder, sorted by rank."""
    return sorted(folder.glob("runs-*.jsonl"), key=lambda path: (len(path.name), path.name))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a record file; raise UserError for a damaged line."""
    content = path.read_bytes() if path.exists() else b""
    lines = []
    for number, line in enumerate(content[: _whole(content)].split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise UserError(f"{type(value).__name__}, not an object")
            lines.append(value)
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}): delete the line, and its prompts will be decoded again"
            ) from error
    return lines


def provenance_of(lines: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Return the provenance in the first of a file's lines; raise UserError if it is missing."""
    if not lines or "provenance" not in lines[0]:
        raise UserError(f"{path} does not begin with a provenance: use a file that `headstart evaluate` wrote")
    return dict(lines[0]["provenance"])


def provenances(folder: Path) -> list[dict[str, Any]]:
    """Return every provenance in the folder's files, in order."""
    return [line["provenance"] for file in record_files(folder) for line in read_lines(file) if "provenance" in line]


def _whole(content: bytes) -> int:
    """Return the length of the content up to the end of its last complete line."""
    return content.rfind(b"\n") + 1
