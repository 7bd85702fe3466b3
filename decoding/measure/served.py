"""Figures of servers under load, from streamed answers timed by the client.

Each answer is a record (`decoding.measure.records`) with two more fields in its line, ``timing`` and ``counters``. The
cell's batch size is the number of concurrent requests, and a run's seconds are its share of the wall time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from decoding.measure.figures import PLAIN, Report, cells, told
from decoding.measure.methods import Method, Run
from decoding.measure.records import GridCell, Records, RunKey
from decoding.measure.rows import figures_of
from decoding.metrics import ratio_of_sums, share

SERVED = "served"
"""Method name of the endpoint; the baseline endpoint, which does not speculate, is plain decoding."""
_AT_ONCE = 0.01
"""An answer was not streamed if its events all arrive within this share of its time."""
_WHOLE_LOAD = 0.9
"""Share of the requested concurrency that the mean concurrency must reach."""
_OF_ONE_PROCESS = ("with_prefill", "over_transformers")
"""Parts of the names of figures that cannot be measured on a server."""


class Timing(NamedTuple):
    """Times of a streamed answer in seconds: the request, the last event, and each event that contains text.

    ``tokens`` is None if the server does not count tokens. ``digest`` is the digest of the text.
    """

    begin: float
    end: float
    arrivals: tuple[float, ...]
    tokens: int | None
    digest: str


def shares_of_time(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return each answer's share of the wall time; concurrent answers share it equally. ``spans`` are (begin, end).

    The shares add up to the time with any answer in progress, so tokens divided by shares are the throughput.
    """
    shares = [0.0] * len(spans)
    for begin, end in pairwise(sorted({moment for span in spans for moment in span})):
        under_way = [index for index, span in enumerate(spans) if span[0] <= begin and end <= span[1]]
        for index in under_way:
            shares[index] += (end - begin) / len(under_way)
    return shares


def latency(timings: Mapping[str, Sequence[Timing]], seconds: float) -> dict[str, Any]:
    """Return latency figures of the answers, as JSON values. ``timings`` holds the answers of each prompt.

    ``seconds`` is the time with any answer in progress. ``ttft_ms``: from the request to the first text. ``tpot_ms``:
    the time after the first text / the further tokens, per answer. ``itl_ms``: between two events of an answer; one
    event may contain several tokens.
    """
    every = [timing for each in timings.values() for timing in each]
    written = [each for each in every if each.arrivals]
    long = [each for each in written if (each.tokens or 0) > 1]
    at_once = [each.end - each.arrivals[0] < _AT_ONCE * (each.end - each.begin) for each in long]
    streamed = 2 * sum(at_once) <= len(at_once)
    shown = written if streamed and seconds else []
    by_prompt = [
        (float(sum(each.tokens or 0 for each in mine)), sum(each.end - each.begin for each in mine))
        for mine in timings.values()
    ]
    counted = all(each.tokens is not None for each in every)
    return {
        "requests": len(every),
        "under_way": sum(each.end - each.begin for each in every) / seconds if seconds else None,
        "streamed": streamed,
        "counted": counted,
        "tokens_per_second_of_a_request": told(ratio_of_sums(by_prompt if counted else [])),
        "ttft_ms": _percentiles(each.arrivals[0] - each.begin for each in shown),
        "tpot_ms": _percentiles(
            (each.end - each.arrivals[0]) / (each.tokens - 1) for each in shown if each.tokens and each.tokens > 1
        ),
        "itl_ms": _percentiles(after - before for each in shown for before, after in pairwise(each.arrivals)),
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, Any]:
    """Return percentiles in milliseconds; null if fewer than one value is expected above the percentile."""
    values = torch.tensor(list(seconds), dtype=torch.float64) * 1000
    found = {f"p{q}": float(values.quantile(q / 100)) if len(values) * (100 - q) >= 100 else None for q in (90, 99)}
    return {"p50": float(values.median()) if len(values) else None, **found, "observations": len(values)}


def counted_acceptance(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the acceptance figures of a cell from a server's counters, summed over rounds.

    They have no intervals: counters do not say which passes belong to one text, and passes of a text are alike.
    Returns only ``counters_disagree`` if the counts by position do not add up to the accepted tokens.
    """
    drafts = sum(round(each["drafts"] or 0) for each in counters)
    if not drafts:
        lengths = [each["length"] for each in counters if each["length"] is not None]
        return {"acceptance_length": sum(lengths) / len(lengths)} if lengths else {}
    drafted, accepted = (sum(round(each[name]) for each in counters) for name in ("drafted", "accepted"))
    depth = max(len(each["reached"]) for each in counters)
    reached = [
        sum(round(each["reached"][place]) for each in counters if place < len(each["reached"]))
        for place in range(depth)
    ]
    if sum(reached) != accepted or not all(after <= before for before, after in pairwise([drafts, *reached])):
        return {"counters_disagree": True}
    shares = [share([(count, drafts)]) for count in reached]
    length = 1 + sum(each.value for each in shares)
    assert math.isclose(length, 1 + accepted / drafts, rel_tol=1e-9), (reached, accepted, drafts)
    return {
        "passes": drafts,
        "acceptance_length": length,
        "reached": [told(each) for each in shares],
        "accepted_per_drafted": told(share([(accepted, drafted)])),
    }


def served_figures(
    lines: Iterable[Mapping[str, Any]],
    methods: Sequence[Method],
    loads: Sequence[GridCell],
    tasks: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the rows of `figures_of` with ``latency`` and acceptance added, and ``notes`` as sentences."""
    by_key = {RunKey(GridCell(*line["cell"]), *(line[name] for name in RunKey._fields[1:])): line for line in lines}
    report: Report = figures_of(Records(known=by_key.values()), methods, loads, tasks)
    for row in (*cells(report), *report["tasks"]):
        for name in [name for name in row if any(part in name for part in _OF_ONE_PROCESS)]:
            del row[name]
        row.pop("identical_to_plain", None)
    for row in cells(report):
        mine = [line for key, line in by_key.items() if _is_of(key, row)]
        timings: dict[str, list[Timing]] = {}
        for line in mine:
            timings.setdefault(line["prompts"][0], []).append(Timing(*line["timing"]))
        row["latency"] = latency(timings, sum(Run(*line["runs"][0]).decode_seconds for line in mine))
        if "reached" not in row:  # else each request was counted
            row |= counted_acceptance([line["counters"] for line in mine if line.get("counters")])
        if row["temperature"] == 0 and row["method"] != PLAIN:
            row |= _identity(by_key, row)
    for row in (*cells(report), *report["tasks"]):
        if not all(each["latency"]["counted"] for each in cells(report)):
            row["tokens_per_second"] = row["speedup_of_totals"] = row["speedup"] = None
    return {**report, "served": True, "notes": _notes(report)}


def _is_of(key: RunKey, row: Report) -> bool:
    return (key.setting, key.method, key.cell.batch_size) == (row["setting"], row["method"], row["batch_size"])


def _identity(by_key: Mapping[RunKey, Mapping[str, Any]], row: Report) -> dict[str, Any]:
    """Count the greedy texts that equal the plain endpoint's; servers give no logits, so margins are unknown."""
    pairs = [(line, by_key.get(key._replace(method=PLAIN))) for key, line in by_key.items() if _is_of(key, row)]
    same = [mine["timing"][4] == plain["timing"][4] for mine, plain in pairs if plain is not None]
    if not same:
        return {}
    margin = 0.0 if all(same) else None
    return {"identical_to_plain": {"identical": sum(same), "of": len(same), "largest_margin": margin, "ended_early": 0}}


def _notes(report: Report) -> list[str]:
    every, notes = cells(report), []
    if all(row["method"] != PLAIN for row in every):
        notes.append("Only one endpoint was measured, so the speed-up is unknown: give --baseline-endpoint.")
    if any(row.get("passes") for row in every if row["method"] == PLAIN):
        notes.append("The baseline server counted drafts: it speculates too, or it served other clients.")
    for row in (row for row in every if row["method"] == SERVED):
        load, figures = f"{row['setting']}, concurrency {row['batch_size']}", row["latency"]
        if row.get("counters_disagree"):
            notes.append(f"The server's counters contradict each other ({load}): acceptance is unknown.")
        elif "acceptance_length" not in row:
            notes.append(f"The server counted no drafts ({load}): it serves no metrics, or does not speculate.")
        if not figures["streamed"]:
            notes.append(f"Answers were not streamed ({load}): times between the request and the end are unknown.")
        if (mean := figures["under_way"]) is None:
            notes.append(f"Answers were faster than the clock can measure ({load}): times and rates are unknown.")
        elif mean < _WHOLE_LOAD * row["batch_size"]:
            notes.append(f"Only {mean:.1f} requests were in progress on average ({load}): raise --limit.")
    if not all(row["latency"]["counted"] for row in every):
        notes.append("A server does not count the tokens of its answers: rates and speed-ups are unknown.")
    return notes
