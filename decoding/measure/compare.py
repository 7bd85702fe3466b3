"""Two evaluations, or two methods of one, compared by pairs of runs on the same prompts: is their difference real?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decoding.measure.figures import PLAIN, load_of, told
from decoding.measure.records import GridCell, Record, Records, provenance_of, provenances, read_lines, record_files
from decoding.measure.rows import tokens_and_seconds
from decoding.metrics import FEWEST, Estimate, ratio_of_rates

_SMALL = 0.05
"""Largest difference either way that an interval may leave open and still be reported as none seen."""
_WORTH = 0.02
"""Smallest difference that further prompts are asked for."""
_WIDTH80 = (1.959964 + 0.841621) / 1.959964
"""Half a 95% interval must be this much narrower than the difference, to find it with 80% power."""
_SETTINGS = ("dtype", "max_new_tokens")
"""Settings that two evaluations may differ in, and whose difference is then part of every ratio."""
_TIMES = {"machines": "hardware", "commits": "commit", "numbers of processes": "processes"}
"""What times depend on, with its name in a provenance: times of different ones do not compare."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """The records of an evaluation's folder, with the provenances of its files."""

    folder: Path
    records: Records
    provenances: Sequence[Mapping[str, Any]]

    @property
    def identity(self) -> Mapping[str, Any]:
        identity: Mapping[str, Any] = self.provenances[0]["identity"]
        return identity

    def methods(self) -> list[tuple[str, str]]:
        """Return setting and name of the methods that have records, in the order they were asked for."""
        measured = {(key.setting, key.method) for key in self.records.by_key}
        given = [(each["setting"], each["name"]) for each in self.provenances[0]["methods"]]
        return [each for each in given if each in measured]


def read_evaluation(folder: Path) -> RecordedEvaluation:
    """Read an output folder of `headstart evaluate`; ValueError if it holds no runs."""
    lines: list[dict[str, Any]] = []
    for file in record_files(folder):
        if found := read_lines(file):
            provenance_of(found, file)  # raises for a file of other origin
            lines += found
    if not lines:
        raise ValueError(f"{folder} holds no runs-*.jsonl: give the --output of a `headstart evaluate`")
    return RecordedEvaluation(folder, Records(known=lines), provenances(folder))


class RatioVerdict(NamedTuple):
    """A judgement of a ratio. ``needed``: number of prompts that would tell, if it is open."""

    kind: Literal["real", "none", "open", "unmeasured"]
    text: str
    needed: int | None = None


def verdict(ratio: Estimate, faster: str = "faster", prompts: int | None = None) -> RatioVerdict:
    """Judge the ratio B over A by its 95% interval, in words for B. ``faster`` names a ratio above 1.

    ``real``: the interval leaves 1 out. ``none``: it holds 1 and nothing further from it than 5%. ``open``: else, and
    with fewer than eight observations. ``prompts``: number of prompts behind the observations, if they are others.
    """
    if not all(math.isfinite(each) and each > 0 for each in ratio[:3]):
        return RatioVerdict("unmeasured", "not measured")
    low, high = ratio.low - 1, ratio.high - 1
    if ratio.observations >= FEWEST:
        if low > 0 or high < 0:
            words = {"faster": ("B is faster", "B is slower"), "more": ("B keeps more", "B keeps fewer")}[faster]
            ends = sorted((abs(low), abs(high)))
            return RatioVerdict("real", f"real: {words[low <= 0]} by {ends[0]:.1%} to {ends[1]:.1%}")
        either = max(-low, high)
        if either <= _SMALL:
            return RatioVerdict("none", f"no difference seen: less than {max(either, 0.001):.1%} either way")
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    effect = max(abs(math.log(ratio.value)), math.log1p(_WORTH))
    wanted = max(FEWEST, ratio.observations * (half * _WIDTH80 / effect) ** 2)
    needed = math.ceil(wanted * (prompts or ratio.observations) / ratio.observations)
    return RatioVerdict("open", f"too few prompts to say: about {needed:,} would do", needed)


def compare(
    a: RecordedEvaluation, b: RecordedEvaluation, method: str | None = None, other: str | None = None
) -> dict[str, Any]:
    """Return ``load`` (see `load_of`), ``warnings`` and a row for each common setting, cell and method.

    ``method``: a method of A; ``other``: one of B. ValueError for evaluations of other targets or prompts,
    and for methods that one of them lacks.
    """
    timed, warnings = _check_alike(a, b)
    load = load_of({"served": "concurrency" in a.identity})
    chosen = _chosen(a, b, method, other)
    cells = sorted({key.cell for key in a.records.by_key}, key=lambda each: (each.batch_size, each.context or 0))
    rows = [
        row
        for setting, mine, theirs in chosen
        for cell in cells
        if (row := _row(a, b, (setting, mine), (setting, theirs), cell, timed))
    ]
    if not rows:
        raise ValueError(f"{a.folder} and {b.folder} share no prompts: evaluate both on the same file")
    for setting in dict.fromkeys(each[0] for each in chosen):
        for cell in cells if timed and a.folder != b.folder else []:
            row = _row(a, b, (setting, PLAIN), (setting, PLAIN), cell, True)
            if row and row["speed_verdict"] and row["speed_verdict"]["kind"] == "real":
                context = f", context {cell.context}" if cell.context else ""
                warnings.append(
                    "plain decoding, which no method changes, was not equally fast: "
                    f"{row['speed_verdict']['text'].removeprefix('real: ')} "
                    f"({setting}, {load} {cell.batch_size}{context})"
                )
    if dropped := sum(row["dropped"] for row in rows):
        warnings.append(f"{dropped} later turns are left out: plain decoding answered the turn before in other words")
    return {"a": str(a.folder), "b": str(b.folder), "load": load, "warnings": warnings, "rows": rows}


def _check_alike(a: RecordedEvaluation, b: RecordedEvaluation) -> tuple[bool, list[str]]:
    """Return True if the times compare, and warnings; ValueError for other targets or tokenizers."""
    for name in ("target", "tokenizer"):
        if a.identity.get(name) != b.identity.get(name):
            raise ValueError(
                f"the runs of {a.folder} and {b.folder} are of different {name}s: evaluate with the same {name} in both"
            )
    warnings = []
    changed = [
        name
        for name, key in _TIMES.items()
        if len({str(each.get(key)) for evaluation in (a, b) for each in evaluation.provenances}) > 1
    ]
    if changed:
        warnings.append(f"times of different {' and '.join(changed)} do not compare: only acceptance is compared")
    differing = [
        f"{name} ({a.identity.get(name)} and {b.identity.get(name)})"
        for name in _SETTINGS
        if a.identity.get(name) != b.identity.get(name)
    ]
    if differing:
        warnings.append(f"A and B differ in {', '.join(differing)}: this is part of every ratio")
    return not changed, warnings


def _chosen(
    a: RecordedEvaluation, b: RecordedEvaluation, method: str | None, other: str | None
) -> list[tuple[str, str, str]]:
    """Return (setting, method of A, method of B) of all that are to be compared."""
    if a.folder == b.folder and (method is None or other is None):
        raise ValueError("one folder is compared with itself: give two methods of it, --method and --other")
    for evaluation, name in ((a, method), (b, other or method)):
        known = dict.fromkeys(each for _, each in evaluation.methods())
        if name is not None and name not in known:
            raise ValueError(f"{evaluation.folder} has no method {name!r}: choose among {', '.join(known)}")
    theirs = b.methods()
    found = [
        (setting, name, other or name)
        for setting, name in a.methods()
        if method in (None, name) and (setting, other or name) in theirs
    ]
    if not found:
        raise ValueError(
            f"{a.folder} and {b.folder} have no method under a common setting: name two by --method and --other"
        )
    return found


def _row(
    a: RecordedEvaluation,
    b: RecordedEvaluation,
    mine: tuple[str, str],
    theirs: tuple[str, str],
    cell: GridCell,
    timed: bool,
) -> dict[str, Any] | None:
    pairs, dropped = _pairs(a, b, mine, theirs, cell)
    if not pairs:
        return None
    if cell.batch_size > 1 and a.identity["prompts"] != b.identity["prompts"]:
        timed = False  # the other texts of a batch, which a prompt's time depends on, differ
    questions = len({record.prompts[0] for record, _ in pairs})
    passes = ratio_of_rates(_by_question(pairs, _tokens_and_passes))
    # In a batch the texts of a wave share their time.
    speed = ratio_of_rates(_by_question(pairs, tokens_and_seconds, by_wave=cell.batch_size > 1)) if timed else None
    if not passes.observations and speed is None:  # a peer reports no passes
        return None
    return {
        "setting": mine[0],
        "method": mine[1],
        "other": theirs[1],
        "batch_size": cell.batch_size,
        "context": cell.context,
        "pairs": len(pairs),
        "dropped": dropped,
        "tokens_per_pass": told(passes),
        "tokens_per_pass_verdict": verdict(passes, "more")._asdict(),
        "speed": None if speed is None else told(speed),
        "speed_verdict": None if speed is None else verdict(speed, prompts=questions)._asdict(),
    }


def _pairs(
    a: RecordedEvaluation, b: RecordedEvaluation, mine: tuple[str, str], theirs: tuple[str, str], cell: GridCell
) -> tuple[list[tuple[Record, Record]], int]:
    """Pair the texts of two methods; return also the number of later turns left out, as their prompts differ.

    ValueError if a question's first turn has other tokens.
    """
    ours, others = (
        {
            (prompt, key.turn, key.round): Record(key, (prompt,), (record.digests[row],), (record.runs[row],))
            for key, record in evaluation.records.by_key.items()
            if key.cell == cell and (key.setting, key.method) == method
            for row, prompt in enumerate(record.prompts)
        }
        for evaluation, method in ((a, mine), (b, theirs))
    )
    both = {name: (record, others[name]) for name, record in ours.items() if name in others}
    differing = [name for name, (record, other) in both.items() if record.digests != other.digests]
    if first := next((question for question, turn, _ in differing if turn == 0), None):
        raise ValueError(
            f"question {first} has other tokens in {b.folder} than in {a.folder}: evaluate both on the same "
            "file, with the same template, thinking mode and lengths"
        )
    return [pair for name, pair in both.items() if name not in differing], len(differing)


def _tokens_and_passes(record: Record) -> tuple[float, float]:
    steps = [step for run in record.runs for step in run.counts]
    return float(sum(step.emitted for step in steps)), float(len(steps))


def _by_question(
    pairs: Sequence[tuple[Record, Record]], figure: Callable[[Record], tuple[float, float]], by_wave: bool = False
) -> list[tuple[float, float, float, float]]:
    """Sum both methods' figures, B's first, over the turns and rounds of each question or wave, to be resampled."""
    sums: dict[int | str, list[float]] = {}
    for mine, theirs in pairs:
        total = sums.setdefault(mine.key.wave if by_wave else mine.prompts[0], [0.0] * 4)
        for index, value in enumerate((*figure(theirs), *figure(mine))):
            total[index] += value
    return [(entry[0], entry[1], entry[2], entry[3]) for entry in sums.values() if min(entry[1], entry[3]) > 0]
