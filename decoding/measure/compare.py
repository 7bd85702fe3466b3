"""Comparison of two evaluations, or of two methods in one evaluation, by paired runs on the same prompts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from decoding.errors import UserError
from decoding.measure.figures import PLAIN, load_of
from decoding.measure.records import GridCell, Record, Records, provenance_of, provenances, read_lines, record_files
from decoding.measure.results import Figure, Report, figure_of
from decoding.measure.summary import tokens_and_seconds
from decoding.metrics import FEWEST, Estimate, expanded_quantile, ratio_of_rates

_SMALL = 0.05
"""The conclusion is "no difference seen" only if the interval contains no difference larger than this share."""
_WORTH = 0.02
"""Smallest difference for which we suggest more prompts."""
_POWER80 = 1.959964 + 0.841621
"""A difference of this many standard errors is found with 80% power."""
_SETTINGS = ("dtype", "max_new_tokens", "batch_invariant")
"""Settings in which two evaluations may differ; every ratio then includes the effect of the difference."""
_TIMES = {"machines": "hardware", "commits": "commit", "numbers of processes": "processes"}
"""Facts on which times depend, with their keys in a provenance. If one of them differs, times are not compared."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """The records in the folder of an evaluation, and the provenance of each file of records."""

    folder: Path
    records: Records
    provenances: Sequence[Mapping[str, Any]]

    @property
    def origin(self) -> Mapping[str, Any]:
        origin: Mapping[str, Any] = self.provenances[0]["identity"]
        return origin

    def methods(self) -> list[tuple[str, str]]:
        """Return (setting, name) of each method that has records, in the order in which the methods were requested."""
        measured = {(key.setting, key.method) for key in self.records.by_key}
        given = [(method["setting"], method["name"]) for method in self.provenances[0]["methods"]]
        return [method for method in given if method in measured]


def read_evaluation(folder: Path) -> RecordedEvaluation:
    """Read an output folder of `headstart evaluate`; raise UserError if it contains no runs."""
    lines: list[dict[str, Any]] = []
    for file in record_files(folder):
        if records := read_lines(file):
            provenance_of(records, file)  # raises UserError for a file that no evaluation wrote
            lines += records
    if not lines:
        raise UserError(f"{folder} contains no runs-*.jsonl: use the --output folder of `headstart evaluate`")
    return RecordedEvaluation(folder, Records(known=lines), provenances(folder))


@dataclass(frozen=True)
class RatioConclusion:
    """Conclusion from a ratio. ``needed``: if there were too few prompts to conclude anything, the number of prompts
    that would be enough.
    """

    kind: Literal["real", "none", "open", "unmeasured"]
    text: str
    needed: int | None = None


@dataclass(frozen=True)
class ComparedRow:
    """One method of evaluation B compared with one method of evaluation A, in one setting and cell: ratios B/A over
    ``pairs`` of texts.

    ``dropped``: number of later turns that are left out because their prompts differ. ``speed`` is None if times cannot
    be compared.
    """

    setting: str
    method: str
    other: str
    batch_size: int
    context: int | None
    pairs: int
    dropped: int
    tokens_per_pass: Figure
    tokens_per_pass_conclusion: RatioConclusion
    speed: Figure | None
    speed_conclusion: RatioConclusion | None


@dataclass(frozen=True)
class Comparison:
    """Folders of two evaluations, and a row for each setting, cell and method that both evaluations contain. For
    ``load`` see `load_of`.
    """

    a: str
    b: str
    load: str
    warnings: tuple[str, ...]
    rows: tuple[ComparedRow, ...]


def conclusion(ratio: Estimate, faster: str = "faster", prompts: int | None = None) -> RatioConclusion:
    """Judge the ratio B/A by its 95% interval, and say in words what the ratio means for B. ``faster`` is the word for
    a ratio above 1.

    ``real``: the interval excludes 1. ``none``: the interval contains 1 and stays within 5% of it. ``open``: any other
    interval, or fewer than eight observations. ``prompts``: the number of prompts, if an observation is a wave of
    prompts and not a single prompt.
    """
    if not all(math.isfinite(value) and value > 0 for value in ratio[:3]):
        return RatioConclusion("unmeasured", "not measured")
    low, high = ratio.low - 1, ratio.high - 1
    if ratio.observations >= FEWEST:
        if low > 0 or high < 0:
            words = {"faster": ("B is faster", "B is slower"), "more": ("B keeps more", "B keeps fewer")}[faster]
            ends = sorted((abs(low), abs(high)))
            return RatioConclusion("real", f"real: {words[low <= 0]} by {ends[0]:.1%} to {ends[1]:.1%}")
        either = max(-low, high)
        if either <= _SMALL:
            return RatioConclusion("none", f"no difference seen: at most {max(either, 0.001):.1%} in either direction")
    error = (math.log(ratio.high) - math.log(ratio.low)) / (2 * expanded_quantile(ratio.observations))
    effect = max(abs(math.log(ratio.value)), math.log1p(_WORTH))
    wanted = max(FEWEST, ratio.observations * (error * _POWER80 / effect) ** 2)
    needed = math.ceil(wanted * (prompts or ratio.observations) / ratio.observations)
    return RatioConclusion("open", f"too few prompts to say: about {needed:,} would be enough", needed)


def compare(
    a: RecordedEvaluation, b: RecordedEvaluation, method: str | None = None, other: str | None = None
) -> Comparison:
    """Compare every setting, cell and method that both evaluations contain.

    ``method`` is a method of A, and ``other`` is a method of B. Raises UserError if the targets or prompts differ, or
    if a method is missing from its evaluation.
    """
    timed, warnings = _check_alike(a, b)
    load = load_of(Report(served="concurrency" in a.origin))
    chosen = _chosen(a, b, method, other)
    cells = sorted({key.cell for key in a.records.by_key}, key=lambda cell: (cell.batch_size, cell.context or 0))
    rows = [
        row
        for setting, mine, theirs in chosen
        for cell in cells
        if (row := _row(a, b, (setting, mine), (setting, theirs), cell, timed))
    ]
    if not rows:
        raise UserError(f"{a.folder} and {b.folder} share no prompts: evaluate both on the same file")
    for setting in dict.fromkeys(comparison[0] for comparison in chosen):
        for cell in cells if timed and a.folder != b.folder else []:
            row = _row(a, b, (setting, PLAIN), (setting, PLAIN), cell, True)
            if row and row.speed_conclusion and row.speed_conclusion.kind == "real":
                context = f", context {cell.context}" if cell.context else ""
                warnings.append(
                    "plain decoding was not equally fast in A and B, although it does not depend on the method: "
                    f"{row.speed_conclusion.text.removeprefix('real: ')} "
                    f"({setting}, {load} {cell.batch_size}{context})"
                )
    if dropped := sum(row.dropped for row in rows):
        warnings.append(f"{dropped} later turns are left out: the answers of plain decoding before them differ")
    return Comparison(str(a.folder), str(b.folder), load, tuple(warnings), tuple(rows))


def _check_alike(a: RecordedEvaluation, b: RecordedEvaluation) -> tuple[bool, list[str]]:
    """Return (True if times are comparable, the warnings); raise UserError if targets or tokenizers differ."""
    for name in ("target", "tokenizer"):
        if a.origin.get(name) != b.origin.get(name):
            raise UserError(
                f"{a.folder} and {b.folder} were evaluated with different {name}s: use the same {name} for both"
            )
    warnings = []
    changed = [
        name
        for name, key in _TIMES.items()
        if len({str(provenance.get(key)) for evaluation in (a, b) for provenance in evaluation.provenances}) > 1
    ]
    if changed:
        warnings.append(f"the {' and '.join(changed)} differ: times are not compared, only tokens per target pass")
    # Older records do not list options that are off.
    settings = [(name, *(evaluation.origin.get(name) or False for evaluation in (a, b))) for name in _SETTINGS]
    differing = [f"{name} ({mine} and {theirs})" for name, mine, theirs in settings if mine != theirs]
    if differing:
        warnings.append(f"A and B differ in {', '.join(differing)}: every ratio includes this difference")
    return not changed, warnings


def _chosen(
    a: RecordedEvaluation, b: RecordedEvaluation, method: str | None, other: str | None
) -> list[tuple[str, str, str]]:
    """Return (setting, method of A, method of B) for each comparison."""
    if a.folder == b.folder and (method is None or other is None):
        raise UserError("both folders are the same: name two methods with --method and --other")
    for evaluation, name in ((a, method), (b, other or method)):
        known = dict.fromkeys(method_name for _, method_name in evaluation.methods())
        if name is not None and name not in known:
            raise UserError(f"{evaluation.folder} lacks the method {name!r}: choose among {', '.join(known)}")
    theirs = b.methods()
    comparisons = [
        (setting, name, other or name)
        for setting, name in a.methods()
        if method in (None, name) and (setting, other or name) in theirs
    ]
    if not comparisons:
        raise UserError(
            f"{a.folder} and {b.folder} share no method and setting: name two methods with --method and --other"
        )
    return comparisons


def _row(
    a: RecordedEvaluation,
    b: RecordedEvaluation,
    mine: tuple[str, str],
    theirs: tuple[str, str],
    cell: GridCell,
    timed: bool,
) -> ComparedRow | None:
    pairs, dropped = _pairs(a, b, mine, theirs, cell)
    if not pairs:
        return None
    if cell.batch_size > 1 and a.origin["prompts"] != b.origin["prompts"]:
        timed = False  # a prompt's time depends on the other texts in its batch, which differ
    questions = len({record.prompts[0] for record, _ in pairs})
    passes = ratio_of_rates(_by_question(pairs, _tokens_and_passes))
    # The texts of a batch are decoded together, so their times are not independent: an observation is a whole wave.
    speed = ratio_of_rates(_by_question(pairs, tokens_and_seconds, by_wave=cell.batch_size > 1)) if timed else None
    if not passes.observations and speed is None:  # peers do not report passes
        return None
    return ComparedRow(
        *(mine[0], mine[1], theirs[1], cell.batch_size, cell.context),
        pairs=len(pairs),
        dropped=dropped,
        tokens_per_pass=figure_of(passes),
        tokens_per_pass_conclusion=conclusion(passes, "more"),
        speed=None if speed is None else figure_of(speed),
        speed_conclusion=None if speed is None else conclusion(speed, prompts=questions),
    )


def _pairs(
    a: RecordedEvaluation, b: RecordedEvaluation, mine: tuple[str, str], theirs: tuple[str, str], cell: GridCell
) -> tuple[list[tuple[Record, Record]], int]:
    """Pair the texts of two methods; return the pairs, and the number of later turns left out because their prompts
    differ.

    Raises UserError if the tokens of a question's first turn differ.
    """
    ours, others = (
        {
            (prompt, key.turn, key.round): Record(key, (prompt,), (record.fingerprints[row],), (record.runs[row],))
            for key, record in evaluation.records.by_key.items()
            if key.cell == cell and (key.setting, key.method) == method
            for row, prompt in enumerate(record.prompts)
        }
        for evaluation, method in ((a, mine), (b, theirs))
    )
    both = {name: (record, others[name]) for name, record in ours.items() if name in others}
    differing = [name for name, (record, other) in both.items() if record.fingerprints != other.fingerprints]
    if first := next((question for question, turn, _ in differing if turn == 0), None):
        raise UserError(
            f"question {first} has different tokens in {a.folder} and {b.folder}: evaluate both on the same "
            "file, with the same template, thinking mode and lengths"
        )
    return [pair for name, pair in both.items() if name not in differing], len(differing)


def _tokens_and_passes(record: Record) -> tuple[float, float]:
    steps = [step for run in record.runs for step in run.counts]
    return float(sum(step.emitted for step in steps)), float(len(steps))


def _by_question(
    pairs: Sequence[tuple[Record, Record]], figure: Callable[[Record], tuple[float, float]], by_wave: bool = False
) -> list[tuple[float, float, float, float]]:
    """Sum each method's figures over all turns and rounds of a question (or wave), for resampling. The two sums of
    method B come before the two sums of method A.
    """
    sums: dict[int | str, list[float]] = {}
    for mine, theirs in pairs:
        total = sums.setdefault(mine.key.wave if by_wave else mine.prompts[0], [0.0] * 4)
        for index, value in enumerate((*figure(theirs), *figure(mine))):
            total[index] += value
    return [(entry[0], entry[1], entry[2], entry[3]) for entry in sums.values() if min(entry[1], entry[3]) > 0]
