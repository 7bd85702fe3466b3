"""Evaluation: methods decode prompts, the runs are recorded, and figures are computed relative to plain decoding.

In each round every method decodes the same wave of prompts in one process; each round begins with a different method.
If the machine slows down, it slows down all methods alike. Speed-ups are ratios of paired runs. The `generate` of
`transformers` is one of the methods. Records are written immediately (`decoding.measure.records`); figures are computed
only from the records (`decoding.measure.summary`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import product
from statistics import fmean
from typing import NamedTuple

from decoding.drafters.base import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.measure.figures import PLAIN
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.methods import EvaluationConfig, Method, Run
from decoding.measure.proof.greedy import margin_of
from decoding.measure.questions import PromptSource, TokenPrompts, Wave, waves_of
from decoding.measure.records import GridCell, Records, RunKey, line_of
from decoding.measure.results import Report
from decoding.measure.summary import figures_of
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.text import check_prompt


def cells_of(config: EvaluationConfig) -> list[GridCell]:
    """Return the cells of the grid; the first one provides the report's main rows."""
    return [GridCell(*pair) for pair in product(config.batch_sizes, config.contexts)]


class Unit(NamedTuple):
    """The work that all methods do in all rounds for one turn of a wave in one setting."""

    cell: GridCell
    wave: Wave
    turn: int
    setting: str

    @property
    def name(self) -> tuple[GridCell, int, int, str]:
        return self.cell, self.wave.index, self.turn, self.setting


@dataclass(frozen=True)
class Measurement:
    """An evaluation in progress: its prompts and methods, and the records to which it adds runs.

    Process ``rank`` of ``world`` takes every ``world``-th wave. ``on_run`` is called after each run.
    """

    target: CausalLM
    methods: Sequence[Method]
    source: PromptSource
    config: EvaluationConfig
    records: Records = field(default_factory=Records)
    rank: int = 0
    world: int = 1
    on_run: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        names = [(method.setting, method.name) for method in self.methods]
        assert len(set(names)) == len(names), f"two methods share a name, so one would be lost: {names}"

    def run(self) -> None:
        """Decode all units of this process that lack a record; process 0 also measures the cost curve.

        The curve predicts only the rows of the first cell. Its passes are therefore measured after as many tokens as
        the texts of this cell have on average when half of their new tokens are written.
        """
        warm: GridCell | None = None
        for unit in self._missing():
            if unit.cell != warm:
                self._warm_up(unit.cell)
                warm = unit.cell
            self._decode(unit)
        if self.rank == 0 and self.records.cost_curve is None:
            lengths = map(len, self._first_turns(cells_of(self.config)[0]))
            half_written = round(fmean(lengths) + self.config.max_new_tokens / 2)
            self.records.add({"cost_curve": measure_costs(self.target, prefix=half_written)})

    def total(self) -> int:
        """Count the remaining runs of this process, including runs of later turns whose prompts may prove to be too
        long.
        """
        return sum(len(self._keys(unit)) for unit in self._missing())

    def methods_of(self, cell: GridCell, setting: str | None = None) -> list[Method]:
        """Return the methods of a setting (None: all) that support the cell's batch size."""
        fitting = [method for method in self.methods if cell.batch_size == 1 or method.batched]
        return [method for method in fitting if setting in (None, method.setting)]

    def _waves(self, cell: GridCell) -> list[Wave]:
        return waves_of(self.source.tasks, cell.batch_size)[self.rank :: self.world]

    def _missing(self) -> Iterator[Unit]:
        """Yield the units of this process for which records are missing. The turns of each setting come in order."""
        for cell in cells_of(self.config):
            for wave in self._waves(cell):
                turns = max(self.source.turns(index) for index in wave.questions)
                for setting in dict.fromkeys(method.setting for method in self.methods):
                    for unit in (Unit(cell, wave, turn, setting) for turn in range(turns)):
                        if not self._is_done(unit):
                            yield unit

    def _is_done(self, unit: Unit) -> bool:
        if all(key in self.records.by_key for key, _ in self._keys(unit)):
            return next(self._parted(unit), None) is None
        left_out = self.records.left_out.get(unit.name, ())
        return len(left_out) == sum(self.source.turns(index) > unit.turn for index in unit.wave.questions)

    def _keys(self, unit: Unit) -> list[tuple[RunKey, Method]]:
        """Return the unit's runs in the order of decoding; each round begins with a different method."""
        methods = self.methods_of(unit.cell, unit.setting)
        runs = []
        for turn in range(self.config.rounds):
            first = (turn + unit.turn + unit.wave.index) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                key = RunKey(unit.cell, unit.wave.index, unit.turn, unit.setting, method.name, turn)
                runs.append((key, method))
        return runs

    # --- one unit -----------------------------------------------------------------------------------------------------

    def _decode(self, unit: Unit) -> None:
        """Decode a unit's missing runs; then measure the margins at which greedy texts differ from plain decoding."""
        prompts = self._prompts(unit)
        if not prompts:
            return
        indices = sorted(prompts, key=lambda index: -len(prompts[index]))  # so that transformers pads least
        ordered = [prompts[index] for index in indices]
        ids = [self.source.ids[index] for index in indices]
        for key, method in self._keys(unit):
            if key not in self.records.by_key:
                seeds = [self._seed(index, key) for index in indices]
                runs = self._run(method, ordered, seeds, unit.cell.batch_size)
                # `decoding.measure.compare` checks by these fingerprints that paired runs have equal prompts.
                fingerprints = [sha256(json.dumps(list(prompt)).encode()).hexdigest()[:12] for prompt in ordered]
                self.records.add(line_of(key, prompts=ids, digests=fingerprints, runs=runs))
            self.on_run()
        for key in self._parted(unit):
            mine, plain = self.records.by_key[key], self.records.by_key[key._replace(method=PLAIN)]
            margins = [
                margin_of(self.target, prompt, a.tokens, b.tokens)
                for prompt, a, b in zip(ordered, mine.runs, plain.runs, strict=True)
            ]
            self.records.add(line_of(key, margins=margins))

    def _run(
        self, method: Method, prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int
    ) -> list[Run]:
        assert method.decode is not None, "a server decodes for this method"
        if batch_size > 1:
            return method.decode(prompts, seeds, batch_size)
        return [method.decode([prompt], [seed], 1)[0] for prompt, seed in zip(prompts, seeds, strict=True)]

    def _seed(self, index: int, key: RunKey) -> int:
        """Return a text's seed, which differs between texts but not between methods or numbers of processes."""
        turns = max(map(self.source.turns, range(len(self.source.ids))))
        return self.config.seed + (key.round * turns + key.turn) * len(self.source.ids) + index

    def _prompts(self, unit: Unit) -> dict[int, tuple[int, ...]]:
        """Return the unit's prompts by index.

        A later turn is left out if its prompt, with the answers of plain decoding, is too long.
        """
        prompts: dict[int, tuple[int, ...]] = {}
        too_long: list[str] = []
        for index in unit.wave.questions:
            if self.source.turns(index) <= unit.turn:
                continue
            answers = self._answers(unit, index)
            prompt = () if answers is None else self.source.prompt(index, unit.cell.context, answers)
            if answers is None or (unit.turn and not self._fits(prompt)):
                too_long.append(self.source.ids[index])
            else:
                prompts[index] = prompt
        if too_long and unit.name not in self.records.left_out:
            names = dict(zip(("cell", "wave", "turn", "setting"), unit.name, strict=True))
            self.records.add({**names, "left_out": too_long})
        return prompts

    def _answers(self, unit: Unit, index: int) -> list[tuple[int, ...]] | None:
        """Return the answers of plain decoding to the earlier turns; None if one of these turns was left out."""
        answers = []
        for turn in range(unit.turn):
            record = self.records.by_key.get(RunKey(unit.cell, unit.wave.index, turn, unit.setting, PLAIN, 0))
            if record is None or self.source.ids[index] not in record.prompts:
                return None
            answers.append(record.runs[record.prompts.index(self.source.ids[index])].tokens)
        return answers

    def _fits(self, prompt: Sequence[int]) -> bool:
        """Return True if the prompt and its new tokens fit the target and every drafter."""
        limits = [self.target.max_positions, *(method.max_positions for method in self.methods)]
        return all(limit is None or len(prompt) + self.config.max_new_tokens <= limit for limit in limits)

    def _warm_up(self, cell: GridCell) -> None:
        """With every method, decode those first turns that need the most memory."""
        longest = sorted(self._first_turns(cell), key=len, reverse=True)[: cell.batch_size]
        for method in self.methods_of(cell):
            self._run(method, longest, [self.config.seed] * len(longest), cell.batch_size)

    def _first_turns(self, cell: GridCell) -> list[tuple[int, ...]]:
        """Return the prompts of the first turns in this process's share of the waves."""
        return [self.source.prompt(index, cell.context) for wave in self._waves(cell) for index in wave.questions]

    def _parted(self, unit: Unit) -> Iterator[RunKey]:
        """Yield the greedy runs that still need margins because a text differs from the text of plain decoding."""
        for key, method in self._keys(unit):
            if method.temperature == 0 and key in self.records.by_key and key not in self.records.margins:
                mine, plain = (self.records.by_key.get(run_key) for run_key in (key, key._replace(method=PLAIN)))
                if mine and plain and any(a.tokens != b.tokens for a, b in zip(mine.runs, plain.runs, strict=True)):
                    yield key


def evaluate(
    target: CausalLM, methods: Sequence[Method], prompts: Sequence[Sequence[int]], config: EvaluationConfig
) -> Report:
    """Measure every method on every prompt; return the report, which `decoding.measure.report` shows.

    Raises UserError before the first run if a prompt is too long.
    """
    if not prompts:
        raise UserError("the list of prompts is empty: use at least one")
    for prompt in prompts:  # fail before the first run, not after an hour
        check_prompt(target, prompt, config.max_new_tokens)
    measurement = Measurement(target, methods, TokenPrompts(prompts), config)
    measurement.run()
    return report_of(measurement)


def report_of(measurement: Measurement) -> Report:
    """Return the report of a finished measurement, with the machine and versions of this process."""
    target, config, records = measurement.target, measurement.config, measurement.records
    tasks = dict(zip(measurement.source.ids, measurement.source.tasks, strict=True))
    cells = cells_of(config)
    figures = figures_of(records, measurement.methods, cells, tasks)
    assert len(figures.rows) == len(measurement.methods_of(cells[0])), "every method has a row"
    return replace(
        figures,
        hardware=hardware(),
        versions=versions(),
        commit=commit(),
        dtype=str(target.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        questions=len(tasks),
        rounds=config.rounds,
        max_new_tokens=config.max_new_tokens,
    )


def count_steps(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int = 1,
    seeds: Sequence[int] | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> list[list[StepCount]]:
    """Decode the prompts in the decoding loop; for each text, return the counts of every step except the prefill.

    Prompt i uses the seed ``seeds[i]``, by default ``config.seed + i``. ``on_text`` is called when a text begins.
    """
    texts: list[list[StepCount]] = [[] for _ in prompts]
    for index, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size, seeds=seeds):
        if step.is_prefill:
            on_text()
        else:
            texts[index].append(step.counts)
    return texts
