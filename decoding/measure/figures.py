"""Figures and sentences of a report as text; a figure that was not measured (null in the report) becomes a dash."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from decoding.errors import UserError
from decoding.measure.markdown import one_line
from decoding.metrics import FEWEST, Estimate

PLAIN = "plain"
"""Name of plain decoding in this project's loop, the baseline of every speed-up."""
TRANSFORMERS = "transformers generate"
NONE = "–"
NEAR = {"bfloat16": 0.5, "float16": 0.1, "float32": 0.01}
"""Largest gap between two logits that rounding can reverse, by dtype, for logits of a few tens."""

Report = dict[str, Any]
"""A report of `decoding.measure.measurement`, or one of its rows."""
Figure = dict[str, Any] | None
"""A `decoding.metrics.Estimate` or `Spread` as JSON; None if it was not measured."""


# --- figures ----------------------------------------------------------------------------------------------------------


def told(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON, without its interval if it has too few observations to be trusted."""
    few = {"low": math.nan, "high": math.nan} if found.observations < FEWEST else {}
    plain: dict[str, Any] = without_nan({**found._asdict(), **few})
    return plain


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity by null, because JSON has neither."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 2) -> str:
    """Format a number: ``2.31``."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """Format a speed-up without its interval: ``2.31×``."""
    return NONE if value is None else f"{number(value)}×"


def estimate(figure: Figure, unit: str = "") -> str:
    """Format an estimate: ``2.31 [2.20, 2.43]``, or ``2.31`` if the interval is missing."""
    return _with_range(figure, "value", "low", "high", unit)


def spread(figure: Figure, unit: str = "") -> str:
    """Format a median and its quartiles: ``2.52× [2.36, 2.57]``."""
    return _with_range(figure, "median", "low_quartile", "high_quartile", unit)


def _with_range(figure: Figure, middle: str, low: str, high: str, unit: str) -> str:
    text = number(figure.get(middle)) if figure else NONE
    if text == NONE or figure is None:
        return NONE
    ends = [number(figure.get(end)) for end in (low, high)]
    if NONE not in ends and not 0 <= figure[low] <= figure[middle] <= figure[high]:
        raise UserError(f"{figure[middle]!r} is not between {figure[low]!r} and {figure[high]!r}")
    return text + unit + ("" if NONE in ends else f" [{ends[0]}, {ends[1]}]")


def shares(figures: Sequence[Figure] | None, most: int | None = None) -> str:
    """Format the shares of the first ``most`` positions (None: all), each with its observations: ``0.89 (312)``."""
    return (
        " ".join(
            f"{number(figure['value'])} ({figure['observations']:,})"
            if figure and number(figure["value"]) != NONE
            else NONE
            for figure in (figures or [])[:most]
        )
        or NONE
    )


def speedup(row: Report, name: str = "speedup") -> str:
    """Format a row's speed-up: ``2.12× [1.95, 2.30]; median 2.52× [2.36, 2.57]``.

    The first figure is the ratio of total tokens/s, the second the median ratio of paired runs.
    """
    median = spread(row.get(name), "×")
    totals = estimate(row.get(f"{name}_of_totals"), "×")
    parts = [part for part in (totals, f"median {median}" if median != NONE else NONE) if part != NONE]
    return "; ".join(parts) or NONE


def speed_of(row: Report) -> float | None:
    """Return the ratio of total tokens/s, or the median of paired runs if only that was measured."""
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    found: float | None = totals.get("value")
    return pairs.get("median") if found is None else found


# --- rows -------------------------------------------------------------------------------------------------------------


def cells(report: Report) -> list[Report]:
    """Return the rows of every batch size and context length."""
    return [*report["rows"], *(report.get("grid") or [])]


def settings(report: Report) -> list[str]:
    """Return the report's settings in its order."""
    return list(dict.fromkeys(row["setting"] for row in report["rows"]))


def named(rows: Iterable[Report], setting: str) -> list[Report]:
    """Return the rows of one setting."""
    return [row for row in rows if row["setting"] == setting]


def methods(report: Report) -> list[str]:
    """Return the measured methods except plain decoding; a method's index selects its colour in all pictures."""
    return list(dict.fromkeys(row["method"] for row in report["rows"] if row["method"] != PLAIN))


def is_peer(row: Report) -> bool:
    """Return True for plain decoding and for methods that other software runs."""
    return bool(row["method"] == PLAIN or str(row["method"]).startswith("transformers"))


def curve(report: Report, row: Report, axis: str) -> list[tuple[int, float]]:
    """Return sorted (position, speed-up) pairs of the row's method along ``axis`` ("batch_size" or "context").

    On the other axis all points have the row's value. Cells that were not timed are left out.
    """
    other = "context" if axis == "batch_size" else "batch_size"
    return sorted(
        (each[axis], speed)
        for each in cells(report)
        if each.get("setting") == row["setting"] and each["method"] == row["method"]
        if each.get(other) == row.get(other) and each.get(axis) is not None and (speed := speed_of(each)) is not None
    )


def below_from(points: Sequence[tuple[int, float]]) -> int | None:
    """Return the first position from which every speed-up is below 1; None if the last is not, or for one point."""
    found = None
    for position, speed in reversed(points):
        if speed >= 1:
            break
        found = position
    return found if len(points) > 1 else None


# --- sentences --------------------------------------------------------------------------------------------------------


def answers(report: Report) -> list[str]:
    """Return a sentence per setting: the fastest method, and the load or context from which it no longer pays."""
    return [_answer(report, setting) for setting in settings(report)]


def load_of(report: Report) -> str:
    """Return the word for the batch-size axis; for a server it is the number of concurrent requests."""
    return "concurrency" if report.get("served") else "batch"


def _answer(report: Report, setting: str) -> str:
    timed = [row for row in named(report["rows"], setting) if speed_of(row) is not None and row["method"] != PLAIN]
    if not timed:
        alone = "The speed-up is unknown" if report.get("served") else "Only plain decoding was timed"
        return one_line(f"{alone}, {setting}.")
    best = max(timed, key=lambda row: speed_of(row) or 0.0)
    figure = best.get("speedup_of_totals") or {"value": speed_of(best), "low": None, "high": None}
    said = f"{estimate(figure, '×')} plain decoding, {setting}, {load_of(report)} {best.get('batch_size') or 1}"
    falls, falls_with_context = (below_from(curve(report, best, axis)) for axis in ("batch_size", "context"))
    slower = "slower" if report.get("served") else "below 1×"
    crossover = f"; {slower} from {load_of(report)} {falls:,} on" if falls else ""
    if figure["value"] <= 1:
        if report.get("served"):
            faster = [each for each in cells(report) if each["setting"] == setting and _gains(each)]
            loads = " and ".join(f"{each['batch_size']:,}" for each in faster)
            crossover += f"; faster at concurrency {loads}" if faster else ""
            return one_line(f"The server is not faster than plain decoding: {said}{crossover}.")
        return one_line(f"Nothing is faster than plain decoding: at best {best['method']}, {said}.")
    if figure["low"] is not None and figure["low"] <= 1:
        said += "; the interval contains 1×, so these prompts do not show a gain"
    said += crossover
    said += f"; below 1× from {falls_with_context:,} tokens of context on" if falls_with_context else ""
    return one_line(f"Fastest: {best['method']}{' (lossy)' * (best['label'] == 'lossy')}, {said}.")


def _gains(row: Report) -> bool:
    """Return True if the whole interval of the row's speed-up is above 1."""
    return bool(row["method"] != PLAIN and ((row.get("speedup_of_totals") or {}).get("low") or 0.0) > 1)


def caption(report: Report) -> str:
    """Describe the target, the machine, the prompts and the commit."""
    machine = report["hardware"]
    first: Report = next(iter(report["rows"]), {})
    prompts = f"{report['prompts']} prompts"
    if first.get("context"):
        prompts += f" of {first['context']:,} tokens"
    if left_out := (report.get("prompts_left_out") or 0) + (report.get("later_turns_left_out") or 0):
        prompts += f" ({left_out} too long, left out)"
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    others = [each for each in report.get("processors") or [] if each != machine["processor"]]
    if others:  # a killed evaluation was resumed elsewhere
        where += f", earlier on {_and(others)}"
    if (processes := report.get("processes") or 1) > 1:
        where += f", {processes} processes in parallel"
    commits = report.get("commits") or [report["commit"]]
    what = (
        f"Measured by a client on {where}"
        if report.get("served")
        else f"{report['parameters'] / 1e6:.1f}M-parameter target in {report['dtype']} on {where}"
    )
    loads = {row["batch_size"]: 0 for row in cells(report)} if report.get("served") else [first.get("batch_size") or 1]
    return one_line(
        f"{what}; {prompts}, up to {report['max_new_tokens']} new tokens, {load_of(report)} "
        f"{', '.join(map(str, loads))}; "
        f"commit{'s' * (len(commits) > 1)} {_and(commits)}"
    )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def greedy_sentence(report: Report) -> str:
    """Return a sentence that compares the report's greedy texts with plain decoding's, or "" without such texts."""
    compared = [
        row["identical_to_plain"] for row in report["rows"] if row.get("identical_to_plain") and row["method"] != PLAIN
    ]
    texts = sum(each["of"] for each in compared)
    differing = texts - sum(each["identical"] for each in compared)
    if not texts:
        return ""
    if not differing:
        return f"All {texts} greedy texts are identical to plain decoding's."
    share = 100 * (texts - differing) // texts
    sentence = f"{differing} of {texts} greedy texts differ from plain decoding's ({share}% are equal)"
    early = sum(each.get("ended_early", 0) for each in compared)
    margins = [each["largest_margin"] for each in compared if each["largest_margin"] is not None]
    dtype, largest = str(report.get("dtype")), max(margins, default=None)
    if differing > early and largest is not None:
        sentence += f"; at the first difference the two tokens' logits are at most {largest:.3g} apart"
    if dtype == "float32" and not (report.get("hardware") or {}).get("gpu"):
        return f"{sentence}. In fp32 on a CPU all must be equal: please report this fault."
    if differing > early:
        sentence += f", {_near_tie(largest, dtype)}"
    if early:
        sentence += f"; {early} differ only in length, which rounding cannot cause: please report this fault"
    return f"{sentence}."


def _near_tie(largest: float | None, dtype: str) -> str:
    if largest is None:
        return "by a margin that was not measured"
    if largest <= NEAR.get(dtype, 0.0):
        return f"near-ties that {dtype} may round differently in a pass over several tokens"
    return f"more than rounding in {dtype} can cause: look at these texts, and report a fault"
