"""Sentences of a report: its answer, what was asked, where a curve crosses 1×, and a meaning for every figure."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from decoding.measure.figures import NONE, estimate, greedy_sentence, number
from decoding.measure.markdown import one_line
from decoding.measure.names import PLAIN
from decoding.measure.report.rows import cells, named, settings, speed_of

Report = dict[str, Any]

_NOTES = (
    "Tokens per target pass: 95% interval over prompts, prefill left out, the target's own token included. "
    "Accepted at i: share of drafts whose token i was accepted, among those at least i deep whose first i-1 tokens "
    "were accepted (number of these). "
    "Same: greedy texts identical to plain decoding's. "
    "Speed-up: all tokens over all seconds, divided by plain decoding's by the same loop on the same prompts, "
    "prefill left out, 95% interval over prompts, or over the batches that they were decoded in; then the median "
    "[quartiles] of the ratios of paired runs."
)

DEFINITIONS = (
    (
        "speed-up",
        "All tokens over all seconds, divided by plain decoding's by the same loop on the same prompts; prefill left "
        "out, 95% interval over prompts, or over the batches that they were decoded in. Beside it the median "
        "[quartiles] of the ratios of paired runs: it weighs short texts like long ones, so it may flatter.",
    ),
    (
        "tokens per target pass",
        "Tokens written per pass of the target, its own token included, prefill left out; 95% interval over prompts.",
    ),
    ("accepted per pass", "Accepted draft tokens per pass of the target, its own token left out."),
    (
        "acceptance length",
        "1 + Σ of the shares of all passes whose draft was accepted at least to position i. It is 1 + accepted per "
        "pass, and differs from tokens per target pass only by the passes whose text ended inside the draft.",
    ),
    (
        "accepted at i, conditional",
        "Share of drafts whose token i was accepted, among those at least i deep whose first i-1 tokens were accepted "
        "(number of these).",
    ),
    ("accepted at i, unconditional", "Share of drafts accepted to position i, among those at least i deep."),
    ("accepted per drafted", "Accepted tokens over all drafted tokens, those of a tree's other branches included."),
    (
        "predicted speed-up",
        "Tokens per pass over the cost of a pass: the drafting and overhead that were measured, and the target's pass "
        "from the cost curve v(n).",
    ),
    ("same", "Greedy texts identical to plain decoding's, of all texts."),
    (
        "lossless, lossy",
        "A lossless method writes the target's own greedy text, or samples from its own distribution; a lossy one "
        "(hatched) does not.",
    ),
)
"""Terms of the page with their meanings."""


def caption(report: Report) -> str:
    """Describe the target, the machine, the prompts and the commit."""
    machine = report["hardware"]
    first: Report = next(iter(report["rows"]), {})
    prompts = f"{report['prompts']} prompts"
    if first.get("context"):
        prompts += f" of {first['context']:,} tokens"
    if left_out := (report.get("prompts_left_out") or 0) + (report.get("later_turns_left_out") or 0):
        prompts += f" ({left_out} too long, left out)"
    if cut := report.get("prompts_cut"):
        prompts += f" ({cut} too long, cut)"
    place = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    others = [each for each in report.get("processors") or [] if each != machine["processor"]]
    if others:  # a killed evaluation went on elsewhere
        place += f", and before on {_and(others)}"
    if (processes := report.get("processes") or 1) > 1:
        place += f", {processes} processes side by side"
    commits = report.get("commits") or [report["commit"]]
    return one_line(
        f"{report['parameters'] / 1e6:.1f}M-parameter target in {report['dtype']} on {place}; "
        f"{prompts}, up to {report['max_new_tokens']} new tokens, batch {first.get('batch_size') or 1}; "
        f"commit{'s' * (len(commits) > 1)} {_and(commits)}"
    )


def notes(report: Report) -> str:
    """Explain the columns, and compare the greedy texts with plain decoding's."""
    return " ".join(filter(None, (_NOTES, greedy_sentence(report))))


def answers(report: Report) -> list[str]:
    """Write the fastest method of each setting in a sentence, and from where on it no longer pays."""
    return [_answer(report, setting) for setting in settings(report)]


def _answer(report: Report, setting: str) -> str:
    timed = [row for row in named(report["rows"], setting) if speed_of(row) is not None and row["method"] != PLAIN]
    if not timed:
        return one_line(f"Nothing but plain decoding was timed, {setting}.")
    best = max(timed, key=lambda row: speed_of(row) or 0.0)
    figure = best.get("speedup_of_totals") or {"value": speed_of(best), "low": None, "high": None}
    said = f"{estimate(figure, '×')} plain decoding, {setting}, batch {best.get('batch_size') or 1}"
    if figure["value"] <= 1:
        return one_line(f"Nothing is faster than plain decoding: at best {best['method']}, {said}.")
    if figure["low"] is not None and figure["low"] <= 1:
        said += "; its interval holds 1×, so these prompts do not show a gain"
    falls = below_from(curve(report, best, "batch_size"))
    falls_with_context = below_from(curve(report, best, "context"))
    said += f"; below 1× from batch {falls:,} on" if falls else ""
    said += f"; below 1× from {falls_with_context:,} tokens of context on" if falls_with_context else ""
    return one_line(f"Fastest: {best['method']}{' (lossy)' * (best['label'] == 'lossy')}, {said}.")


def curve(report: Report, row: Report, axis: str) -> list[tuple[int, float]]:
    """Return (place on the axis, speed-up) of the row's method along ``axis`` ("batch_size" or "context"), in order.

    The other axis stays where the row has it. Cells that were not timed have no point.
    """
    other = "context" if axis == "batch_size" else "batch_size"
    return sorted(
        (each[axis], speed)
        for each in cells(report)
        if each.get("setting") == row["setting"] and each["method"] == row["method"]
        if each.get(other) == row.get(other) and each.get(axis) is not None and (speed := speed_of(each)) is not None
    )


def below_from(points: Sequence[tuple[int, float]]) -> int | None:
    """Return the first place from which every speed-up is below 1; None if the last is not, or the only one."""
    found = None
    for place, speed in reversed(points):
        if speed >= 1:
            break
        found = place
    return found if len(points) > 1 else None


def crossing(points: Sequence[tuple[int, float]], unit: str) -> str:
    """Say where the curve crosses 1×, with the crossing's place between two measured ones; ``unit`` as in "batch"."""
    if all(speed >= 1 for _, speed in points):
        return f"at or above 1× up to {unit} {points[-1][0]:,}"
    if all(speed < 1 for _, speed in points):
        return f"below 1× everywhere, also at {unit} {points[0][0]:,}"
    changes = []
    for (left, before), (right, after) in pairwise(points):
        if (before >= 1) != (after >= 1):
            # The axis is drawn in powers of two, so the line between two points is straight in the logarithm.
            place = left * (right / left) ** ((before - 1) / (before - after))
            verb = "falls below" if after < 1 else "rises above"
            changes.append(f"{verb} 1× between {unit} {left:,} and {right:,} (about {_rounded(place)})")
    return ", then ".join(changes)


def _rounded(place: float) -> str:
    return f"{place:.1f}" if place < 100 else f"{round(place, 1 - math.floor(math.log10(place))):,.0f}"


def asked(report: Report) -> str:
    """Say in one line what was asked of every method: template, thinking, turns, rules, shapes, drafts.

    Empty for reports that do not say.
    """
    told = report.get("asked") or {}
    parts = []
    if "template" in told:
        parts.append("no chat template" if told["template"] in (None, "none") else f"{told['template']} template")
    if told.get("thinking") is not None:
        parts.append(f"thinking {'on' if told['thinking'] else 'off'}")
    if told.get("turns"):
        parts.append({"first": "first turns", "all": "all turns"}.get(told["turns"], f"turns: {told['turns']}"))
    rows = [row for row in report["rows"] if row.get("conditional_acceptance")]
    for heading, key in (("rule", "rule"), ("drafted as", "shape"), ("drafts", "drafts")):
        found = list(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))
        if found:
            parts.append(f"{heading} {_and(found)}")
    return one_line(f"Asked: {'; '.join(parts)}.") if parts else ""


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def enough(report: Report) -> list[str]:
    """Write for each setting how far its two fastest methods are apart, and the prompts that would tell them apart."""
    lines = []
    for found in report.get("enough") or []:
        apart, needed = found.get("difference"), found.get("needed_prompts")
        line = f"{found['setting']}: {found['first']} is {estimate(apart, '×')} the speed of {found['second']}"
        if needed is None:
            line += "; no number of prompts was found that would tell them apart"
        else:
            line += f"; {needed:,} prompts tell them apart at 95% with 80% power ({report['prompts']:,} were measured)"
        lines.append(one_line(f"{line}."))
    return lines


def agreement(row: Report) -> str:
    """Say how far the predicted speed-up is from the measured one: ``+4%``; a dash without either."""
    measured_speed, predicted = speed_of(row), row.get("predicted_speedup")
    return NONE if not measured_speed or predicted is None else f"{100 * (predicted / measured_speed - 1):+.0f}%"


def within(row: Report, share: float = 0.1) -> bool:
    """Return True if the predicted speed-up is within ``share`` of the measured one."""
    measured_speed, predicted = speed_of(row), row.get("predicted_speedup")
    return bool(measured_speed) and predicted is not None and abs(predicted / measured_speed - 1) <= share


def times(value: float | None) -> str:
    """Format a speed-up without its interval: ``2.31×``."""
    text = number(value)
    return text if text == NONE else f"{text}×"
