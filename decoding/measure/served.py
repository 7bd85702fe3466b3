"""Figures of servers under load, computed from streamed answers and the times at which the client received them.

Each answer is a record (`decoding.measure.records`) with two more fields in its line, ``timing`` and ``counters``. The
cell's batch size is the number of concurrent requests, and a run's seconds are its share of the wall time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from decoding.measure.figures import PLAIN
from decoding.measure.methods import Method, Run
from decoding.measure.records import GridCell, Records, RunKey
from decoding.measure.results import Latency, Percentiles, Report, ReportRow, SameTexts, figure_of
from decoding.measure.summary import figures_of
from decoding.metrics import ratio_of_sums, share

SERVED = "served"
"""Method name of the endpoint; the baseline endpoint, which does not speculate, counts as plain decoding."""
_AT_ONCE = 0.01
"""An answer counts as not streamed if all its events arrive within this share of its time."""
_WHOLE_LOAD = 0.9
"""The mean concurrency must reach this share of the requested concurrency."""


class Timing(NamedTuple):
    """The times of a streamed answer, in seconds: when the request was sent, when the last event came, and when each
    event that contains text came.

    ``tokens`` is None if the server does not count tokens. ``fingerprint`` is the fingerprint of the text.
    """

    begin: float
    end: float
    arrivals: tuple[float, ...]
    tokens: int | None
    fingerprint: str


def shares_of_time(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return each answer's share of the wall time; concurrent answers share it equally.

    ``spans`` are pairs (begin, end). The sum of the shares is the time in which any answer was in progress, so tokens
    divided by this sum are the throughput.
    """
    shares = [0.0] * len(spans)
    for begin, end in pairwise(sorted({moment for span in spans for moment in span})):
        under_way = [index for index, span in enumerate(spans) if span[0] <= begin and end <= span[1]]
        for index in under_way:
            shares[index] += (end - begin) / len(under_way)
    return shares


def latency(timings: Mapping[str, Sequence[Timing]], seconds: float) -> Latency:
    """Return latency figures of the answers. ``timings`` holds the answers of each prompt.

    ``seconds`` is the time in which any answer was in progress.
    """
    every = [timing for of_prompt in timings.values() for timing in of_prompt]
    written = [timing for timing in every if timing.arrivals]
    long = [timing for timing in written if (timing.tokens or 0) > 1]
    at_once = [timing.end - timing.arrivals[0] < _AT_ONCE * (timing.end - timing.begin) for timing in long]
    streamed = 2 * sum(at_once) <= len(at_once)
    shown = written if streamed and seconds else []
    by_prompt = [
        (float(sum(timing.tokens or 0 for timing in mine)), sum(timing.end - timing.begin for timing in mine))
        for mine in timings.values()
    ]
    counted = all(timing.tokens is not None for timing in every)
    return Latency(
        requests=len(every),
        under_way=sum(timing.end - timing.begin for timing in every) / seconds if seconds else None,
        streamed=streamed,
        counted=counted,
        tokens_per_second_of_a_request=figure_of(ratio_of_sums(by_prompt if counted else [])),
        ttft_ms=_percentiles(timing.arrivals[0] - timing.begin for timing in shown),
        tpot_ms=_percentiles(
            (timing.end - timing.arrivals[0]) / (timing.tokens - 1)
            for timing in shown
            if timing.tokens and timing.tokens > 1
        ),
        itl_ms=_percentiles(after - before for timing in shown for before, after in pairwise(timing.arrivals)),
    )


def _percentiles(seconds: Iterable[float]) -> Percentiles:
    values = torch.tensor(list(seconds), dtype=torch.float64) * 1000
    p90, p99 = (float(values.quantile(q / 100)) if len(values) * (100 - q) >= 100 else None for q in (90, 99))
    return Percentiles(float(values.median()) if len(values) else None, p90, p99, len(values))


def with_counters(row: ReportRow, counters: Sequence[Mapping[str, Any]]) -> ReportRow:
    """Add the acceptance figures of a cell: they come from a server's counters and are summed over rounds.

    The figures have no intervals: counters do not say which passes belong to the same text, and the passes of one text
    are not independent. If the counts by position do not add up to the accepted tokens, only ``counters_disagree`` is
    set.
    """
    drafts = sum(round(counter["drafts"] or 0) for counter in counters)
    if not drafts:
        lengths = [counter["length"] for counter in counters if counter["length"] is not None]
        return replace(row, acceptance_length=sum(lengths) / len(lengths)) if lengths else row
    drafted, accepted = (sum(round(counter[name]) for counter in counters) for name in ("drafted", "accepted"))
    depth = max(len(counter["reached"]) for counter in counters)
    reached = [
        sum(round(counter["reached"][position]) for counter in counters if position < len(counter["reached"]))
        for position in range(depth)
    ]
    if sum(reached) != accepted or not all(after <= before for before, after in pairwise([drafts, *reached])):
        return replace(row, counters_disagree=True)
    shares = [share([(count, drafts)]) for count in reached]
    length = 1 + sum(figure.value for figure in shares)
    assert math.isclose(length, 1 + accepted / drafts, rel_tol=1e-9), (reached, accepted, drafts)
    return replace(
        row,
        passes=drafts,
        acceptance_length=length,
        reached=tuple(map(figure_of, shares)),
        accepted_per_drafted=figure_of(share([(accepted, drafted)])),
    )


def served_figures(
    lines: Iterable[Mapping[str, Any]],
    methods: Sequence[Method],
    loads: Sequence[GridCell],
    tasks: Mapping[str, str | None],
) -> Report:
    """Return the report of `figures_of` with ``latency`` and acceptance added, and ``notes`` as sentences."""
    by_key = {RunKey(GridCell(*line["cell"]), *(line[name] for name in RunKey._fields[1:])): line for line in lines}
    report = figures_of(Records(known=by_key.values()), methods, loads, tasks)
    rows, grid = (tuple(_of_server(row, by_key) for row in part) for part in (report.rows, report.grid))
    counted = all(row.latency.counted for row in (*rows, *grid) if row.latency)
    of_tasks = tuple(replace(row, identical_to_plain=None) for row in report.tasks)
    rows, grid, of_tasks = (tuple(_measurable(row, counted) for row in part) for part in (rows, grid, of_tasks))
    return replace(report, rows=rows, grid=grid, tasks=of_tasks, served=True, notes=_notes((*rows, *grid)))


def _measurable(row: ReportRow, counted: bool) -> ReportRow:
    """Drop the figures that only our own process can measure, and all rates if tokens were not counted."""
    row = replace(
        row,
        tokens_per_second_with_prefill=None,
        speedup_with_prefill=None,
        speedup_with_prefill_of_totals=None,
        speedup_over_transformers=None,
        speedup_over_transformers_of_totals=None,
    )
    return row if counted else replace(row, tokens_per_second=None, speedup_of_totals=None, speedup=None)


def _of_server(row: ReportRow, by_key: Mapping[RunKey, Mapping[str, Any]]) -> ReportRow:
    """Add what the client and the server's counters measured, and compare greedy texts with the texts of the plain
    endpoint.
    """
    own = row.setting, row.method, row.batch_size
    mine = {key: line for key, line in by_key.items() if (key.setting, key.method, key.cell.batch_size) == own}
    timings: dict[str, list[Timing]] = {}
    for line in mine.values():
        timings.setdefault(line["prompts"][0], []).append(Timing(*line["timing"]))
    seconds = sum(Run(*line["runs"][0]).decode_seconds for line in mine.values())
    row = replace(row, latency=latency(timings, seconds))
    if row.passes is None:  # the requests were not counted one by one
        row = with_counters(row, [line["counters"] for line in mine.values() if line.get("counters")])
    if row.temperature == 0 and row.method != PLAIN:
        return replace(row, identical_to_plain=_same_texts(mine, by_key))
    return replace(row, identical_to_plain=None)


def _same_texts(
    mine: Mapping[RunKey, Mapping[str, Any]], by_key: Mapping[RunKey, Mapping[str, Any]]
) -> SameTexts | None:
    """Count the greedy texts that equal the texts of the plain endpoint; servers do not report logits, so margins are
    unknown.
    """
    pairs = [(line, by_key.get(key._replace(method=PLAIN))) for key, line in mine.items()]
    same = [line["timing"][4] == plain["timing"][4] for line, plain in pairs if plain is not None]
    return SameTexts(sum(same), len(same), 0.0 if all(same) else None) if same else None


def _notes(rows: Sequence[ReportRow]) -> tuple[str, ...]:
    notes = []
    if all(row.method != PLAIN for row in rows):
        notes.append("Only one endpoint was measured, so the speed-up is unknown: add --baseline-endpoint.")
    if any(row.passes for row in rows if row.method == PLAIN):
        notes.append("The baseline server counted drafts: it speculates itself, or it served other clients.")
    for row in rows:
        if row.method != SERVED or (figures := row.latency) is None:
            continue
        load = f"{row.setting}, concurrency {row.batch_size}"
        if row.counters_disagree:
            notes.append(f"The server's counters contradict each other ({load}): acceptance is unknown.")
        elif row.acceptance_length is None:
            notes.append(f"The server counted no drafts ({load}): it has no metrics page, or it does not speculate.")
        if not figures.streamed:
            notes.append(f"Answers were not streamed ({load}): times between the request and the end are unknown.")
        if figures.under_way is None:
            notes.append(f"Answers were faster than the clock can measure ({load}): times and rates are unknown.")
        elif figures.under_way < _WHOLE_LOAD * (row.batch_size or 1):
            notes.append(f"Only {figures.under_way:.1f} requests were in progress on average ({load}): raise --limit.")
    if not all(row.latency.counted for row in rows if row.latency):
        notes.append("A server did not report how many tokens its answers have: rates and speed-ups are unknown.")
    return tuple(notes)
