"""The typed figures of an evaluation, and their JSON, which is written and read only here.

A figure that was not measured is None, which is null in JSON.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from decoding.errors import UserError
from decoding.metrics import FEWEST, Estimate


@dataclass(frozen=True)
class Figure:
    """An estimate with its 95% interval; the interval is None if there are too few observations."""

    value: float | None
    low: float | None = None
    high: float | None = None
    observations: int = 0


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of paired runs."""

    median: float | None
    low_quartile: float | None = None
    high_quartile: float | None = None
    observations: int = 0


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds; a percentile is None if less than one value is expected above it."""

    p50: float | None
    p90: float | None
    p99: float | None
    observations: int


@dataclass(frozen=True)
class Latency:
    """Latency of a server's answers.

    ``under_way`` is the mean number of concurrent requests. ``ttft_ms``: time from the request to the first text.
    ``tpot_ms``: for each answer, the time after the first text divided by the number of further tokens. ``itl_ms``:
    time between two events of an answer, each of which may contain several tokens.
    """

    requests: int
    under_way: float | None
    streamed: bool
    counted: bool
    """True if the server counted the tokens of every answer."""
    tokens_per_second_of_a_request: Figure
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles


@dataclass(frozen=True)
class SameTexts:
    """How many greedy texts equal the texts of plain decoding (``identical``), and how many were compared (``of``).

    ``margins`` contains, in sorted order, the result of `margin_of` for each text that differs. ``largest_margin`` is
    None if texts differ only in where they end, or if logits are unknown.
    """

    identical: int
    of: int
    largest_margin: float | None
    ended_early: int = 0
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class TimeSplit:
    """The shares of the decoding time that drafting, verifying and everything else take."""

    draft: float
    verify: float
    overhead: float


@dataclass(frozen=True)
class ReportRow:
    """The figures of one method in one setting and cell: over the whole cell, or over one of its tasks."""

    setting: str
    method: str
    label: str
    temperature: float | None = None
    batch_size: int | None = None
    context: int | None = None
    task: str | None = None
    drafter: str | None = None
    artefact: str | None = None
    rule: str | None = None
    shape: str | None = None
    drafts: str | None = None
    policy: str | None = None
    prompts: int | None = None
    # Speed. The speed-up "of totals" weighs prompts by their tokens; in ``speedup`` all paired runs have equal weight.
    tokens_per_second: Figure | None = None
    tokens_per_second_with_prefill: Figure | None = None
    speedup_of_totals: Figure | None = None
    speedup: Quartiles | None = None
    speedup_with_prefill_of_totals: Figure | None = None
    speedup_with_prefill: Quartiles | None = None
    speedup_over_transformers_of_totals: Figure | None = None
    speedup_over_transformers: Quartiles | None = None
    identical_to_plain: SameTexts | None = None
    # Acceptance by position (from 1). ``acceptance_length`` is 1 + the mean number of accepted tokens.
    passes: int | None = None
    tokens_per_pass: Figure | None = None
    acceptance_length: float | None = None
    reached: tuple[Figure, ...] = ()
    ended_in_draft: int | None = None
    conditional_acceptance: tuple[Figure, ...] = ()
    unconditional_acceptance: tuple[Figure, ...] = ()
    accepted_per_drafted: Figure | None = None
    accepted_length_histogram: Mapping[str, int] = field(default_factory=dict)
    time_split: TimeSplit | None = None
    predicted_speedup: float | None = None
    # Servers only.
    latency: Latency | None = None
    counters_disagree: bool = False


@dataclass(frozen=True)
class Sample:
    """A decoded text: the end of its prompt, and ``pieces``, each with a text and True if the text was drafted."""

    setting: str
    method: str
    task: str | None
    prompt: str
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Report:
    """The report of an evaluation.

    ``rows`` are the rows of the first cell, ``grid`` contains the rows of all other cells, and ``tasks`` contains the
    rows of the first cell by task.
    """

    rows: tuple[ReportRow, ...] = ()
    grid: tuple[ReportRow, ...] = ()
    tasks: tuple[ReportRow, ...] = ()
    prompts: int = 0
    prompts_left_out: int = 0
    later_turns_left_out: int = 0
    seconds: float = 0.0
    cost_curve_ms: Mapping[int, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    # What was measured.
    title: str = ""
    command: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    drafters: Mapping[str, str] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    revisions: Mapping[str, Any] = field(default_factory=dict)
    prompts_from: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    questions: int | None = None
    rounds: int | None = None
    max_new_tokens: int | None = None
    # Where it was measured. A resumed evaluation lists all ``processors`` and ``commits``.
    hardware: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    commits: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    processes: int = 1
    # Servers only.
    served: bool = False
    models: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[ReportRow, ...]:
        """The rows of all batch sizes and context lengths."""
        return *self.rows, *self.grid


def figure_of(estimate: Estimate) -> Figure:
    """Return the estimate, without an interval if there are too few observations to trust it."""
    ends = (None, None) if estimate.observations < FEWEST else (_measured(estimate.low), _measured(estimate.high))
    return Figure(_measured(estimate.value), *ends, estimate.observations)


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """Return median and quartiles; they are None if there are no observations."""
    if not values:
        return Quartiles(None)
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Quartiles(median, low, high, len(values))


def _measured(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_json(value: Any) -> Any:
    """Return a value for JSON. Dataclasses become objects; NaN and infinity become null, because JSON has neither."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): as_json(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_from_json(content: Mapping[str, Any]) -> Report:
    """Read a report of any version, in which parts may be missing or null; raise UserError for a malformed part."""
    try:
        return _REPORT.validate_python(_without_null(content))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"the report has a malformed {'.'.join(map(str, first['loc']))} ({first['msg']}): run the evaluation again"
        ) from error


def _without_null(content: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the nulls of the report and of its rows, so that missing values get their defaults."""
    kept = {name: value for name, value in content.items() if value is not None}
    for name in kept.keys() & {"rows", "grid", "tasks"}:
        kept[name] = [_without_null(row) for row in kept[name]]
    return kept


_REPORT = TypeAdapter(Report)


def write_report(report: Report, path: Path) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(report), indent=2, allow_nan=False) + "\n")
