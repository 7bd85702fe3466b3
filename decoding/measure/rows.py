"""Rows of a report: the figures of each method, as a function of the records alone."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decoding.measure.figures import told, without_nan
from decoding.measure.methods import Method, Run
from decoding.measure.names import PLAIN, TRANSFORMERS
from decoding.measure.records import Cell, Key, Record, Records
from decoding.metrics import (
    Estimate,
    StepCount,
    acceptance,
    predicted_speedup,
    ratio_of_rates,
    ratio_of_sums,
    required_pairs,
    spread,
)
from decoding.model.cost_curve import Costs


def figures_of(
    records: Records, methods: Sequence[Method], cells: Sequence[Cell], tasks: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the report's ``rows``, ``grid``, ``tasks``, ``enough`` and counts, as JSON values.

    ``cells``: the first one's rows are the report's own. ``tasks``: the task of each question by its id.
    """
    costs = Costs(records.cost_curve) if records.cost_curve else None
    # The cost curve is that of one text at a time, behind a prompt of no length in particular.
    by_cell = {cell: _Cell(records, methods, cell, costs if cell == (1, None) else None) for cell in cells}
    first = by_cell[cells[0]]
    named = [task for task in dict.fromkeys(tasks.values()) if task is not None]
    figures = {
        "prompts": len({(record.key.turn, prompt) for record in first.records for prompt in record.prompts}),
        "later_turns_left_out": _left_out(records, cells[0]),
        "seconds": sum(sum(map(_seconds, record.runs)) for record in records.by_key.values()),
        "cost_curve_ms": {str(size): 1000 * each for size, each in (records.cost_curve or {}).items()},
        "rows": first.rows(),
        "grid": [row for cell in cells[1:] for row in by_cell[cell].rows()],
        "tasks": [{**row, "task": task} for task in named for row in first.rows(_ids(tasks, task))],
        "enough": first.enough(),
    }
    plain_values: dict[str, Any] = without_nan(figures)
    return plain_values


def _ids(tasks: Mapping[str, str | None], wanted: str) -> frozenset[str]:
    return frozenset(name for name, task in tasks.items() if task == wanted)


def _left_out(records: Records, cell: Cell) -> int:
    """Count the later turns of a cell that no setting could ask, as they were too long."""
    by_setting: dict[str, int] = {}
    for (where, _, _, setting), ids in records.left_out.items():
        if where == cell:
            by_setting[setting] = by_setting.get(setting, 0) + len(ids)
    return max(by_setting.values(), default=0)


def _seconds(run: Run) -> float:
    return run.first_seconds + run.decode_seconds


@dataclass(frozen=True)
class _Taken:
    """The records of one method, in the order of waves, turns and rounds."""

    records: Sequence[Record]

    @property
    def runs(self) -> list[Run]:
        return [run for record in self.records for run in record.runs]

    def steps_by_question(self) -> list[list[StepCount]]:
        """Return the steps of each question's texts together: its turns and rounds are not independent."""
        found: dict[str, list[StepCount]] = {}
        for record in self.records:
            for prompt, run in zip(record.prompts, record.runs, strict=True):
                found.setdefault(prompt, []).extend(run.counts)
        return list(found.values())

    def by_wave(self, with_prefill: bool) -> dict[int, tuple[float, float]]:
        """Return (tokens, seconds) of each wave, summed over its turns and rounds, which are not independent."""
        found: dict[int, tuple[float, float]] = {}
        for record in self.records:
            tokens, seconds = found.get(record.key.wave, (0.0, 0.0))
            more = _tokens_and_seconds(record, with_prefill)
            found[record.key.wave] = tokens + more[0], seconds + more[1]
        return found

    def log_speeds(self) -> list[float]:
        """Return the logarithm of the tokens per second of each wave that has any."""
        return [math.log(tokens / seconds) for tokens, seconds in self.by_wave(False).values() if tokens and seconds]


def _tokens_and_seconds(record: Record, with_prefill: bool) -> tuple[float, float]:
    tokens = sum(len(run.tokens) if with_prefill else run.decode_tokens for run in record.runs)
    seconds = sum(_seconds(run) if with_prefill else run.decode_seconds for run in record.runs)
    return float(tokens), seconds


@dataclass(frozen=True)
class _Cell:
    """The figures of one cell of the grid."""

    all_records: Records
    methods: Sequence[Method]
    cell: Cell
    costs: Costs | None

    @cached_property
    def records(self) -> list[Record]:
        mine = [record for key, record in self.all_records.by_key.items() if key.cell == self.cell]
        return sorted(mine, key=lambda record: record.key[1:])

    def taken(self, setting: str, name: str, ids: frozenset[str] | None = None) -> _Taken:
        """Return a method's records, of the waves whose questions are in ``ids`` (None: all)."""
        return _Taken(
            [
                record
                for record in self._by_method.get((setting, name), [])
                if ids is None or ids.issuperset(record.prompts)
            ]
        )

    @cached_property
    def _by_method(self) -> dict[tuple[str, str], list[Record]]:
        found: dict[tuple[str, str], list[Record]] = {}
        for record in self.records:
            found.setdefault((record.key.setting, record.key.method), []).append(record)
        return found

    def rows(self, ids: frozenset[str] | None = None) -> list[dict[str, Any]]:
        """Return a row for each method that has records here."""
        rows = []
        for method in self.methods:
            mine = self.taken(method.setting, method.name, ids)
            if mine.records:
                rows.append(self._row(method, mine, ids))
        return rows

    def _row(self, method: Method, mine: _Taken, ids: frozenset[str] | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "setting": method.setting,
            "temperature": method.temperature,
            "batch_size": self.cell.batch_size,
            "context": self.cell.context,
            "method": method.name,
            "label": method.label,
            "drafter": method.drafter,
            "artefact": method.artefact,
            "rule": method.rule,
            "shape": method.shape,
            "drafts": method.drafts,
            "prompts": len({(record.key.turn, prompt) for record in mine.records for prompt in record.prompts}),
            **self._speeds(method, mine, ids),
        }
        if method.temperature == 0:
            row["identical_to_plain"] = self._compared(mine)
        if any(run.counts for run in mine.runs):
            # Greedy rounds repeat one text: they add observations of time, but none of acceptance.
            first = [record for record in mine.records if method.temperature > 0 or record.key.round == 0]
            row |= acceptance_figures(method, _Taken(first), self.costs)
        return row

    def _speeds(self, method: Method, mine: _Taken, ids: frozenset[str] | None) -> dict[str, Any]:
        """Return tokens per second, and the ratios to plain decoding's and to transformers'."""
        plain, peer = (self.taken(method.setting, name, ids) for name in (PLAIN, TRANSFORMERS))
        return {
            "tokens_per_second": told(ratio_of_sums(list(mine.by_wave(False).values()))),
            "tokens_per_second_with_prefill": told(ratio_of_sums(list(mine.by_wave(True).values()))),
            **_speedups("speedup", mine, plain),
            **_speedups("speedup_with_prefill", mine, plain, with_prefill=True),
            **_speedups("speedup_over_transformers", mine, peer),
        }

    def _compared(self, mine: _Taken) -> dict[str, Any]:
        """Count the greedy texts equal to plain decoding's, and tell how close the logits are where texts differ.

        ``largest_margin`` is the largest of `margin_of`; if texts differ only as one ended early, it is null.
        """
        margins = [
            margin
            for record in mine.records
            for margin in self.all_records.margins.get(record.key, (None,) * len(record.runs))
        ]
        parted = [margin for margin in margins if isinstance(margin, float)]
        early = margins.count("ended")
        return {
            "identical": margins.count(None),
            "of": len(margins),
            "largest_margin": max(parted, default=None if early else 0.0),
            "ended_early": early,
        }

    # --- the two fastest ----------------------------------------------------------------------------------------------

    def enough(self) -> list[dict[str, Any]]:
        """Tell for each setting the two fastest methods apart, or say how many prompts would."""
        found = []
        for setting in dict.fromkeys(method.setting for method in self.methods):
            taken = {
                method.name: self.taken(setting, method.name) for method in self.methods if method.setting == setting
            }
            # The mean of logarithms ranks methods as their paired differences do; totals may rank them otherwise.
            speeds = {name: mean_ratio(mine.log_speeds()).value for name, mine in taken.items()}
            speeds = {name: speed for name, speed in speeds.items() if math.isfinite(speed)}
            if len(speeds) > 1:
                first, second = sorted(speeds, key=lambda name: -speeds[name])[:2]
                found.append(
                    {"setting": setting, "first": first, "second": second, **self._apart(setting, first, second)}
                )
        return found

    def _apart(self, setting: str, first: str, second: str) -> dict[str, Any]:
        a, b = (self.taken(setting, name) for name in (first, second))
        waves, others = a.by_wave(False), b.by_wave(False)
        ratios = [
            math.log(waves[wave][0] / waves[wave][1] * others[wave][1] / others[wave][0])
            for wave in waves.keys() & others.keys()
            if min(*waves[wave], *others[wave]) > 0
        ]
        prompts = len({(record.key.turn, prompt) for record in a.records for prompt in record.prompts})
        needed = required_pairs(ratios)
        if needed is not None:
            needed = math.ceil(needed * prompts / len(ratios))
        return {"difference": told(mean_ratio(ratios)), "needed_prompts": needed}


def mean_ratio(logs: Sequence[float]) -> Estimate:
    """Estimate the geometric mean of paired ratios, given as logarithms, with a bootstrap interval over pairs."""
    found = ratio_of_sums([(each, 1.0) for each in logs])
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), found.observations)


def _speedups(name: str, mine: _Taken, other: _Taken, with_prefill: bool = False) -> dict[str, Any]:
    """Return two ratios of tokens per second to the other's: the spread of paired runs, and the ratio of totals.

    Their keys are ``name`` and ``name``_of_totals. Totals weigh a prompt by its tokens, the spread weighs runs alike.
    """
    if not mine.records or not other.records:
        return {f"{name}_of_totals": None, name: None}
    ours, theirs = mine.by_wave(with_prefill), other.by_wave(with_prefill)
    both = [(*ours[wave], *theirs[wave]) for wave in ours if wave in theirs]
    speeds = {_pair(record.key): _speed(record, with_prefill) for record in other.records}
    pairs = [(_speed(record, with_prefill), speeds.get(_pair(record.key), 0.0)) for record in mine.records]
    return {
        f"{name}_of_totals": told(ratio_of_rates(both)),
        name: spread([a / b for a, b in pairs if a and b])._asdict(),
    }


def _pair(key: Key) -> tuple[int, int, int]:
    """Return what two methods' runs of the same wave have in common."""
    return key.wave, key.turn, key.round


def _speed(record: Record, with_prefill: bool) -> float:
    tokens, seconds = _tokens_and_seconds(record, with_prefill)
    return tokens / seconds if tokens and seconds else 0.0


def acceptance_figures(method: Method, taken: _Taken, costs: Costs | None) -> dict[str, Any]:
    """Return the acceptance figures of a method's runs, its split of the time, and the speed-up that costs predict."""
    runs = taken.runs
    figures = acceptance(taken.steps_by_question())
    found = {
        "passes": figures.passes,
        "tokens_per_pass": told(figures.tokens_per_pass),
        "accepted_per_pass": told(figures.accepted_per_pass),
        "acceptance_length": figures.acceptance_length,
        "reached": [share._asdict() for share in figures.reached],
        "ended_in_draft": figures.ended_in_draft,
        "conditional_acceptance": [share._asdict() for share in figures.conditional],
        "unconditional_acceptance": [share._asdict() for share in figures.unconditional],
        "accepted_per_drafted": figures.accepted_per_drafted._asdict(),
        "accepted_length_histogram": {str(length): count for length, count in figures.length_histogram.items()},
        "time_split": None,
        "predicted_speedup": None,
    }
    total = sum(run.decode_seconds for run in runs)
    if not total:
        return found
    draft, verify = sum(run.draft_seconds for run in runs), sum(run.verify_seconds for run in runs)
    found["time_split"] = {
        "draft": draft / total,
        "verify": verify / total,
        "overhead": (total - draft - verify) / total,
    }
    if costs is not None:
        passes, plain_step = max(figures.passes, 1), costs.pass_over(1)
        sizes = Counter(count.drafted + 1 for run in runs for count in run.counts)  # policies and lookups vary them
        verified = sum(costs.pass_over(size) * times for size, times in sizes.items()) / max(1, sizes.total())
        found["predicted_speedup"] = predicted_speedup(
            figures.tokens_per_pass.value,
            draft_cost=draft / passes / plain_step,
            verify_cost=verified / plain_step,
            overhead=(total - draft - verify) / passes / plain_step,
        )
    return found
