"""Figures and sentences of a report as text. A figure that was not measured (null in the report) becomes a dash."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from decoding.errors import UserError
from decoding.measure.markdown import one_line
from decoding.measure.results import Figure, Quartiles, Report, ReportRow

PLAIN = "plain"
"""Name of plain decoding in this project's loop, the baseline of every speed-up."""
TRANSFORMERS = "transformers generate"
NONE = "–"
Axis = Literal["batch_size", "context"]
OTHER: dict[Axis, Axis] = {"batch_size": "context", "context": "batch_size"}
NEAR = {"bfloat16": 0.5, "float16": 0.1, "float32": 0.01}
"""For each dtype, the largest gap at which rounding can still change which of two logits is larger. The values are
valid for logits of up to a few tens."""


# --- figures ----------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    """Format a number: ``2.31``."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """Format a speed-up without its interval: ``2.31×``."""
    return NONE if value is None else f"{number(value)}×"


def estimate(figure: Figure | None, unit: str = "") -> str:
    """Format an estimate: ``2.31 [2.20, 2.43]``, or ``2.31`` if the interval is missing."""
    return NONE if figure is None else _with_range(figure.value, figure.low, figure.high, unit)


def value_of(figure: Figure | None) -> float | None:
    """Return a figure without its interval."""
    return None if figure is None else figure.value


def spread(figure: Quartiles | None, unit: str = "") -> str:
    """Format a median and its quartiles: ``2.52× [2.36, 2.57]``."""
    return NONE if figure is None else _with_range(figure.median, figure.low_quartile, figure.high_quartile, unit)


def _with_range(middle: float | None, low: float | None, high: float | None, unit: str) -> str:
    if middle is None or low is None or high is None:
        return NONE if middle is None else number(middle) + unit
    if not 0 <= low <= middle <= high:
        raise UserError(f"{middle!r} is not between {low!r} and {high!r}")
    return f"{number(middle)}{unit} [{number(low)}, {number(high)}]"


def shares(figures: Sequence[Figure], most: int | None = None) -> str:
    """Format the shares of the first ``most`` positions (None: all), with numbers of observations: ``0.89 (312)``."""
    shown = (
        NONE if share.value is None else f"{number(share.value)} ({share.observations:,})" for share in figures[:most]
    )
    return " ".join(shown) or NONE


def speedup(totals: Figure | None, pairs: Quartiles | None) -> str:
    """Format a speed-up: ``2.12× [1.95, 2.30]; median 2.52× [2.36, 2.57]``.

    The first figure is the ratio of total tokens/s, and the second is the median ratio of paired runs.
    """
    total, median = estimate(totals, "×"), spread(pairs, "×")
    parts = [part for part in (total, f"median {median}" if median != NONE else NONE) if part != NONE]
    return "; ".join(parts) or NONE


def speed_of(row: ReportRow) -> float | None:
    """Return the ratio of total tokens/s, or the median of paired runs if only that was measured."""
    totals = value_of(row.speedup_of_totals)
    return row.speedup.median if totals is None and row.speedup else totals


# --- rows -------------------------------------------------------------------------------------------------------------


def settings(report: Report) -> list[str]:
    """Return the settings of a report, in the order in which the report lists them."""
    return list(dict.fromkeys(row.setting for row in report.rows))


def named(rows: Iterable[ReportRow], setting: str) -> list[ReportRow]:
    """Return the rows with this setting."""
    return [row for row in rows if row.setting == setting]


def methods(report: Report) -> list[str]:
    """Return the measured methods except plain decoding.

    The index of a method determines its colour in all pictures.
    """
    return list(dict.fromkeys(row.method for row in report.rows if row.method != PLAIN))


def is_peer(row: ReportRow) -> bool:
    """Return True for plain decoding and for methods that other software runs."""
    return row.method == PLAIN or row.method.startswith("transformers")


def curve(report: Report, row: ReportRow, axis: Axis) -> list[tuple[int, float]]:
    """Return sorted (position, speed-up) pairs of the row's method along ``axis``.

    On the other axis all points have the value of the row. Cells that were not timed are left out.
    """
    other = OTHER[axis]
    return sorted(
        (position, speed)
        for cell in named(report.cells, row.setting)
        if cell.method == row.method and at(cell, other) == at(row, other)
        if (position := at(cell, axis)) is not None and (speed := speed_of(cell)) is not None
    )


def at(row: ReportRow, axis: Axis) -> int | None:
    """Return the row's position on an axis."""
    return row.batch_size if axis == "batch_size" else row.context


def below_from(points: Sequence[tuple[int, float]]) -> int | None:
    """Return the first position at which the speed-up is below 1 and after which it stays below 1.

    Returns None if the last speed-up is not below 1, or if there is only one point.
    """
    first = None
    for position, speed in reversed(points):
        if speed >= 1:
            break
        first = position
    return first if len(points) > 1 else None


# --- sentences --------------------------------------------------------------------------------------------------------


def answers(report: Report) -> list[str]:
    """Return one sentence for each setting.

    The sentence names the fastest method, and the load or context at which this method becomes slower than plain
    decoding and stays slower.
    """
    return [_answer(report, setting) for setting in settings(report)]


def load_of(report: Report) -> str:
    """Return the word for the batch-size axis, on which a server's report has the number of concurrent requests."""
    return "concurrency" if report.served else "batch"


def _answer(report: Report, setting: str) -> str:
    timed = [row for row in named(report.rows, setting) if speed_of(row) is not None and row.method != PLAIN]
    if not timed:
        alone = "The speed-up is unknown" if report.served else "Only plain decoding was timed"
        return one_line(f"{alone} ({setting}).")
    best = max(timed, key=lambda row: speed_of(row) or 0.0)
    figure = best.speedup_of_totals or Figure(speed_of(best))
    said = f"{estimate(figure, '×')} plain decoding, {setting}, {load_of(report)} {best.batch_size or 1}"
    falls, falls_with_context = (below_from(curve(report, best, axis)) for axis in OTHER)
    slower = "slower" if report.served else "below 1×"
    crossover = f"; {slower} at {load_of(report)} {falls:,} and above" if falls else ""
    if (speed_of(best) or 0.0) <= 1:
        if report.served:
            faster = [cell for cell in report.cells if cell.setting == setting and _gains(cell)]
            loads = " and ".join(f"{cell.batch_size:,}" for cell in faster)
            crossover += f"; faster at concurrency {loads}" if faster else ""
            return one_line(f"The server is not faster than plain decoding: {said}{crossover}.")
        return one_line(f"Nothing is faster than plain decoding; the best method is {best.method}, {said}.")
    if figure.low is not None and figure.low <= 1:
        said += "; its interval contains 1×, so these prompts do not show a gain"
    said += crossover
    said += f"; below 1× at {falls_with_context:,} tokens of context and above" if falls_with_context else ""
    return one_line(f"Fastest: {best.method}{' (lossy)' * (best.label == 'lossy')}, {said}.")


def _gains(row: ReportRow) -> bool:
    """Return True if the whole interval of the row's speed-up is above 1."""
    return row.method != PLAIN and row.speedup_of_totals is not None and (row.speedup_of_totals.low or 0.0) > 1


def caption(report: Report) -> str:
    """Describe the target, the machine, the prompts and the commit."""
    machine = report.hardware
    first = next(iter(report.rows), ReportRow("", "", ""))
    prompts = f"{report.prompts} prompts"
    if first.context:
        prompts += f" of {first.context:,} tokens"
    if left_out := report.prompts_left_out + report.later_turns_left_out:
        prompts += f" ({left_out} were left out because they are too long)"
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    others = [processor for processor in report.processors if processor != machine["processor"]]
    if others:  # a killed evaluation was resumed elsewhere
        where += f", and in earlier runs on {_and(others)}"
    if report.processes > 1:
        where += f", {report.processes} processes in parallel"
    commits = report.commits or (report.commit or "",)
    what = (
        f"Measured by a client on {where}"
        if report.served
        else f"{(report.parameters or 0) / 1e6:.1f}M-parameter target in {report.dtype} on {where}"
    )
    loads = dict.fromkeys(row.batch_size for row in report.cells) if report.served else (first.batch_size or 1,)
    return one_line(
        f"{what}; {prompts}, up to {report.max_new_tokens} new tokens, {load_of(report)} "
        f"{', '.join(map(str, loads))}; "
        f"commit{'s' * (len(commits) > 1)} {_and(commits)}"
    )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def greedy_sentence(report: Report) -> str:
    """Return a sentence that compares the greedy texts with the texts of plain decoding, or "" if there are no greedy
    texts.
    """
    compared = [row.identical_to_plain for row in report.rows if row.identical_to_plain and row.method != PLAIN]
    texts = sum(same.of for same in compared)
    differing = texts - sum(same.identical for same in compared)
    if not texts:
        return ""
    if not differing:
        return f"All {texts} greedy texts are identical to plain decoding."
    share = 100 * (texts - differing) // texts
    sentence = f"{differing} of {texts} greedy texts differ from plain decoding ({share}% are equal)"
    early = sum(same.ended_early for same in compared)
    margins = [same.largest_margin for same in compared if same.largest_margin is not None]
    dtype, largest = str(report.dtype), max(margins, default=None)
    if differing > early and largest is not None:
        sentence += f"; at the first difference the logits of the two tokens are at most {largest:.3g} apart"
    if dtype == "float32" and not report.hardware.get("gpu"):
        return f"{sentence}. In fp32 on a CPU all texts must be equal: please report this fault."
    if differing > early:
        sentence += f", {_near_tie(largest, dtype)}"
    if early:
        sentence += f"; {early} differ only in length, and rounding cannot cause that: please report this fault"
    return f"{sentence}."


def _near_tie(largest: float | None, dtype: str) -> str:
    if largest is None:
        return "by a margin that was not measured"
    if largest <= NEAR.get(dtype, 0.0):
        return f"near-ties that {dtype} may round differently in a pass over several tokens"
    return f"more than rounding in {dtype} can cause: look at these texts, and report the fault"
