"""Two evaluations, or two methods of one, compared by pairs of runs on the same prompts: is their difference real?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decoding.measure.figures import told
from decoding.measure.names import PLAIN
from decoding.measure.records import Cell, Record, Records, provenance_of, provenances, read_lines, record_files
from decoding.metrics import FEWEST, Estimate, ratio_of_rates

_SMALL = 0.05
"""Largest difference either way that an interval may leave open and still be reported as none seen."""
_WORTH = 0.02
"""Smallest difference that further prompts are asked for."""
_WIDTH80 = (1.959964 + 0.841621) / 1.959964
"""Half a 95% interval must be this much narrower than the difference, to find it with 80% power."""

_TOLD = ("dtype", "max_new_tokens", "seed", "plan")
"""Settings that two evaluations may differ in, and whose difference is then part of every ratio."""

Kind = Literal["real", "none", "open", "unmeasured"]


@dataclass(frozen=True)
class Evaluation:
    """The records of an evaluation's folder, with what its first provenance says."""

    folder: Path
    records: Records
    provenances: Sequence[Mapping[str, Any]]

    @property
    def identity(self) -> Mapping[str, Any]:
        identity: Mapping[str, Any] = self.provenances[0]["identity"]
        return identity

    def methods(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Return the methods that have records, by setting and name, in the order they were asked for."""
        measured = {(key.setting, key.method) for key in self.records.by_key}
        told = {(each["setting"], each["name"]): each for each in self.provenances[0]["methods"]}
        return {key: each for key, each in told.items() if key in measured}

    def about(self) -> dict[str, set[str]]:
        """Return what its records' times depend on: machines, commits and numbers of processes."""
        names = {"machines": "hardware", "commits": "commit", "numbers of processes": "processes"}
        return {name: {str(each.get(key)) for each in self.provenances} for name, key in names.items()}


def read_evaluation(folder: Path) -> Evaluation:
    """Read an output folder of `headstart evaluate`; ValueError if it holds no runs."""
    lines: list[dict[str, Any]] = []
    for file in record_files(folder):
        if found := read_lines(file):
            provenance_of(found, file)  # raises for a file of other origin
            lines += found
    if not lines:
        raise ValueError(f"{folder} holds no runs-*.jsonl: give the --output of a `headstart evaluate`")
    return Evaluation(folder, Records(known=lines), provenances(folder))


class Verdict(NamedTuple):
    """A judgement of a ratio. ``needed``: number of prompts that would tell, where it stays open."""

    kind: Kind
    text: str
    needed: int | None = None


def verdict(ratio: Estimate, faster: str = "faster", prompts: int | None = None) -> Verdict:
    """Judge the ratio B over A by its 95% interval, in words for B. ``faster`` names a ratio above 1.

    ``real``: the interval leaves 1 out. ``none``: it holds 1 and nothing further from it than 5%. ``open``: else, and
    with fewer than eight observations. ``prompts``: number of prompts behind the observations, if they are others.
    """
    if not all(math.isfinite(each) and each > 0 for each in ratio[:3]):
        return Verdict("unmeasured", "not measured")
    low, high = ratio.low - 1, ratio.high - 1
    if ratio.observations >= FEWEST:
        if low > 0 or high < 0:
            words = {"faster": ("B is faster", "B is slower"), "more": ("B keeps more", "B keeps fewer")}[faster]
            ends = sorted((abs(low), abs(high)))
            return Verdict("real", f"real: {words[low <= 0]} by {ends[0]:.1%} to {ends[1]:.1%}")
        either = max(-low, high)
        if either <= _SMALL:
            return Verdict("none", f"no difference seen: less than {max(either, 0.001):.1%} either way")
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    effect = max(abs(math.log(ratio.value)), math.log1p(_WORTH))
    wanted = max(FEWEST, ratio.observations * (half * _WIDTH80 / effect) ** 2)
    needed = math.ceil(wanted * (prompts or ratio.observations) / ratio.observations)
    return Verdict("open", f"too few prompts to say: about {needed:,} would do", needed)


@dataclass(frozen=True)
class Pairs:
    """The runs of two methods on the same prompts. ``dropped``: later turns whose prompts differ, left out."""

    both: Sequence[tuple[Record, Record]]
    dropped: int


def compare(
    a: Evaluation, b: Evaluation, method: str | None = None, other: str | None = None, setting: str | None = None
) -> dict[str, Any]:
    """Return ``warnings`` and a row for each common setting, cell and method (``method`` of A, ``other`` of B).

    ValueError for evaluations of other targets or prompts, and for methods that one of them lacks.
    """
    _check_alike(a, b)
    timed, warnings = _times_compare(a, b)
    warnings += _told_apart(a, b)
    chosen = list(_chosen(a, b, method, other, setting))
    cells = sorted({key.cell for key in a.records.by_key}, key=lambda each: (each.batch_size, each.context or 0))
    rows = []
    for at, mine, theirs in chosen:
        for cell in cells:
            if row := _row(a, b, (at, mine), (at, theirs), cell, timed):
                rows.append(row)
    if not rows:
        raise ValueError(f"{a.folder} and {b.folder} share no prompts: evaluate both on the same file")
    if timed and a.folder != b.folder:
        warnings += _drifted(a, b, dict.fromkeys(at for at, _, _ in chosen), cells)
    if dropped := sum(row["dropped"] for row in rows):
        warnings.append(f"{dropped} later turns are left out: plain decoding answered the turn before in other words")
    return {"a": str(a.folder), "b": str(b.folder), "warnings": warnings, "rows": rows}


def _check_alike(a: Evaluation, b: Evaluation) -> None:
    for name, remedy in (("target", "evaluate the same target"), ("tokenizer", "evaluate with the same tokenizer")):
        if a.identity.get(name) != b.identity.get(name):
            raise ValueError(f"the runs of {a.folder} and {b.folder} are of different {name}s: {remedy} in both")


def _times_compare(a: Evaluation, b: Evaluation) -> tuple[bool, list[str]]:
    """Return True if both were timed on one machine, in the same way, by one commit; else the reason, as a warning."""
    ours, theirs = a.about(), b.about()
    changed = [name for name in ours if len(ours[name] | theirs[name]) > 1]
    if not changed:
        return True, []
    return False, [f"times of different {' and '.join(changed)} do not compare: only acceptance is compared"]


def _told_apart(a: Evaluation, b: Evaluation) -> list[str]:
    """Name the settings that differ and change what is measured."""
    changed = [
        f"{name} ({a.identity.get(name)} and {b.identity.get(name)})"
        for name in _TOLD
        if a.identity.get(name) != b.identity.get(name)
    ]
    return [f"A and B differ in {', '.join(changed)}: this is part of every ratio"] if changed else []


def _drifted(a: Evaluation, b: Evaluation, settings: Iterable[str], cells: Sequence[Cell]) -> list[str]:
    """Tell where plain decoding itself, which no method changes, was timed otherwise in one evaluation."""
    found = []
    for setting, cell in product(settings, cells):
        row = _row(a, b, (setting, PLAIN), (setting, PLAIN), cell, True)
        judged = row and row["speed_verdict"]
        if judged and judged["kind"] == "real":
            words = judged["text"].removeprefix("real: ")
            where = f"{setting}, batch {cell.batch_size}" + (f", context {cell.context}" if cell.context else "")
            found.append(
                f"plain decoding itself is not equally fast, so speeds tell of more than the methods: {words} ({where})"
            )
    return found


def _chosen(
    a: Evaluation, b: Evaluation, method: str | None, other: str | None, setting: str | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, method of A, method of B) of all that are to be compared."""
    ours, theirs = a.methods(), b.methods()
    if a.folder == b.folder and (method is None or other is None):
        raise ValueError("one folder is compared with itself: give two methods of it, --method and --other")
    for evaluation, name in ((a, method), (b, other or method)):
        known = dict.fromkeys(each for _, each in evaluation.methods())
        if name is not None and name not in known:
            raise ValueError(f"{evaluation.folder} has no method {name!r}: choose among {', '.join(known)}")
    settings = list(dict.fromkeys(at for at, _ in ours))
    if setting is not None and setting not in settings:
        raise ValueError(f"{a.folder} has no setting {setting!r}: choose among {', '.join(settings)}")
    found = [
        (at, name, other or name)
        for at, name in ours
        if setting in (None, at) and method in (None, name) and (at, other or name) in theirs
    ]
    if not found:
        raise ValueError(
            f"{a.folder} and {b.folder} have no method under a common setting: name two by --method and --other"
        )
    yield from found


def _row(
    a: Evaluation, b: Evaluation, mine: tuple[str, str], theirs: tuple[str, str], cell: Cell, timed: bool
) -> dict[str, Any] | None:
    pairs = _pairs(a, b, mine, theirs, cell)
    if not pairs.both:
        return None
    if cell.batch_size > 1 and a.identity["prompts"] != b.identity["prompts"]:
        timed = False  # the texts beside a prompt, which its time depends on, are others
    questions = len({record.prompts[0] for record, _ in pairs.both})
    passes = ratio_of_rates(_by_question(pairs, _tokens_and_passes))
    speed = ratio_of_rates(_by_question(pairs, _tokens_and_seconds)) if timed else None
    if not passes.observations and speed is None:  # a peer tells nothing of its passes
        return None
    found: dict[str, Any] = {
        "setting": mine[0],
        "method": mine[1],
        "other": theirs[1],
        "batch_size": cell.batch_size,
        "context": cell.context,
        "pairs": sum(len(record.runs) for record, _ in pairs.both),
        "dropped": pairs.dropped,
        "tokens_per_pass": told(passes),
        "tokens_per_pass_verdict": verdict(passes, "more")._asdict(),
        "speed": None if speed is None else told(speed),
        "speed_verdict": None if speed is None else verdict(speed, prompts=questions)._asdict(),
    }
    return found


def _pairs(a: Evaluation, b: Evaluation, mine: tuple[str, str], theirs: tuple[str, str], cell: Cell) -> Pairs:
    """Pair the records of two methods prompt by prompt; ValueError where a question has other tokens."""
    ours, others = (
        {
            (prompt, record.key.turn, record.key.round): _only(record, row)
            for key, record in evaluation.records.by_key.items()
            if key.cell == cell and (key.setting, key.method) == method
            for row, prompt in enumerate(record.prompts)
        }
        for evaluation, method in ((a, mine), (b, theirs))
    )
    both, dropped = [], 0
    for name, record in ours.items():
        if (other := others.get(name)) is None:
            continue
        if record.digests == other.digests:
            both.append((record, other))
        elif name[1] > 0:
            dropped += 1
        else:
            raise ValueError(
                f"question {name[0]} has other tokens in {b.folder} than in {a.folder}: evaluate both on the same "
                "file, with the same template, thinking mode and lengths"
            )
    return Pairs(both, dropped)


def _only(record: Record, row: int) -> Record:
    """Return the record of one of its texts alone, with that text's share of the time."""
    return Record(record.key, (record.prompts[row],), (record.digests[row],), (record.runs[row],))


def _tokens_and_passes(record: Record) -> tuple[float, float]:
    (run,) = record.runs
    return float(sum(step.emitted for step in run.counts)), float(len(run.counts))


def _tokens_and_seconds(record: Record) -> tuple[float, float]:
    (run,) = record.runs
    return float(run.decode_tokens), run.decode_seconds


def _by_question(pairs: Pairs, figure: Any) -> list[tuple[float, float, float, float]]:
    """Sum both methods' figures, B's first, over the turns and rounds of each question: these are resampled.

    In a batch the texts of a wave share their time, so at batch sizes above 1 the wave takes the question's place.
    """
    sums: dict[Any, list[float]] = {}
    for mine, theirs in pairs.both:
        batched = mine.key.cell.batch_size > 1 and figure is _tokens_and_seconds
        name = mine.key.wave if batched else mine.prompts[0]
        total = sums.setdefault(name, [0.0] * 4)
        for place, value in enumerate((*figure(theirs), *figure(mine))):
            total[place] += value
    return [(entry[0], entry[1], entry[2], entry[3]) for entry in sums.values() if min(entry[1], entry[3]) > 0]
