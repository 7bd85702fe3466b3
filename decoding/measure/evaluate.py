"""Evaluation: prompts x methods -> records -> figures relative to plain decoding, measured in turns in one process.

Every method decodes each wave of prompts once per round, in rotating order, so that a machine that slows down slows all
methods alike; speed-ups are ratios of paired runs. `transformers`' own `generate` is one of the methods. The records
are kept as they come (see `decoding.measure.records`), and the figures follow from the records alone
(`decoding.measure.rows`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from decoding.drafters.base import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, check_prompt
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.methods import EvaluationConfig, Method, Run, standard_methods
from decoding.measure.names import PLAIN
from decoding.measure.records import Cell, Key, Margin, Records, line_of
from decoding.measure.rows import figures_of
from decoding.measure.waves import PromptSource, TokenPrompts, Wave, waves_of
from decoding.metrics import Acceptance, StepCount, acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve
from decoding.rules.tree import common_length

__all__ = ["EvaluationConfig", "Method", "Run", "evaluate", "measure", "measure_acceptance", "standard_methods"]


def cells_of(config: EvaluationConfig) -> list[Cell]:
    """Return the cells of the grid; the first one holds the report's rows."""
    return [Cell(*pair) for pair in product(config.batch_sizes, config.contexts)]


class Unit(NamedTuple):
    """Work of one setting on one turn of a wave, by all methods and in all rounds."""

    cell: Cell
    wave: Wave
    turn: int
    setting: str


@dataclass(frozen=True)
class Measurement:
    """An evaluation at work: what it decodes, by which methods, and the records that it adds to.

    ``rank`` and ``world``: of all waves it takes those of its own process. ``on_run`` is called after each run.
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
        assert len(set(names)) == len(names), f"methods share a name, so that one would be lost: {names}"

    def run(self) -> None:
        """Decode everything of this process's share that the records lack."""
        for cell in cells_of(self.config):
            mine = waves_of(self.source.tasks, cell.batch_size)[self.rank :: self.world]
            warm = False
            for wave in mine:
                for unit in self._units(cell, wave):
                    if self._is_done(unit):
                        continue
                    if not warm:
                        self._warm_up(cell, mine)
                        warm = True
                    self._decode(unit)

    def methods_of(self, cell: Cell, setting: str | None = None) -> list[Method]:
        """Return the methods of a setting (None: all) that decode as many texts at a time as the cell asks for."""
        fitting = [each for each in self.methods if cell.batch_size == 1 or each.decode_batch is not None]
        return [each for each in fitting if setting in (None, each.setting)]

    def total(self) -> int:
        """Count the runs of this process's share that are left, later turns that may prove too long included."""
        return sum(
            len(self.methods_of(unit.cell, unit.setting)) * self.config.rounds
            for cell in cells_of(self.config)
            for wave in waves_of(self.source.tasks, cell.batch_size)[self.rank :: self.world]
            for unit in self._units(cell, wave)
            if not self._is_done(unit)
        )

    def _units(self, cell: Cell, wave: Wave) -> Iterator[Unit]:
        """Yield the wave's units, each setting's turns in their order."""
        turns = max(self.source.turns(place) for place in wave.places)
        for setting in dict.fromkeys(method.setting for method in self.methods):
            for turn in range(turns):
                yield Unit(cell, wave, turn, setting)

    def _keys(self, unit: Unit) -> list[tuple[Key, Method]]:
        """Return the unit's runs in the order that they take turns in."""
        methods = self.methods_of(unit.cell, unit.setting)
        found = []
        for turn in range(self.config.rounds):
            first = (turn + unit.turn + unit.wave.index) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                key = Key(unit.cell, unit.wave.index, unit.turn, unit.setting, method.name, turn)
                found.append((key, method))
        return found

    def _is_done(self, unit: Unit) -> bool:
        if all(key in self.records.by_key for key, _ in self._keys(unit)):
            return next(self._parted(unit), None) is None
        left_out = self.records.left_out.get((unit.cell, unit.wave.index, unit.turn, unit.setting), ())
        return len(left_out) == sum(self.source.turns(place) > unit.turn for place in unit.wave.places)

    # --- one unit -----------------------------------------------------------------------------------------------------

    def _decode(self, unit: Unit) -> None:
        """Decode a unit's runs that the records lack, then measure where greedy texts part from plain decoding's."""
        prompts = self._prompts(unit)
        if not prompts:
            return
        places = sorted(prompts, key=lambda place: -len(prompts[place]))  # transformers' padding is smallest so
        ordered = [prompts[place] for place in places]
        ids = [self.source.ids[place] for place in places]
        for key, method in self._keys(unit):
            if key not in self.records.by_key:
                seeds = [self._seed(place, key) for place in places]
                runs = self._run(method, ordered, seeds, unit.cell.batch_size)
                self.records.add(line_of(key, prompts=ids, digests=[digest_of(each) for each in ordered], runs=runs))
            self.on_run()
        for key in self._parted(unit):
            self.records.add(line_of(key, margins=self._margins(key, ordered)))

    def _run(
        self, method: Method, prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int
    ) -> list[Run]:
        if batch_size == 1:
            return [method.decode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        assert method.decode_batch is not None, f"{method.name} decodes one text at a time"
        return method.decode_batch(prompts, seeds, batch_size)

    def _seed(self, place: int, key: Key) -> int:
        """Return the seed of a text: its own, and the same for every method and every number of processes."""
        return self.config.seed + (key.round * self._turns + key.turn) * len(self.source.ids) + place

    @cached_property
    def _turns(self) -> int:
        return max(self.source.turns(place) for place in range(len(self.source.ids)))

    def _prompts(self, unit: Unit) -> dict[int, tuple[int, ...]]:
        """Return the unit's prompts by place; of a later turn those that fit behind plain decoding's own answers."""
        found: dict[int, tuple[int, ...]] = {}
        too_long: list[str] = []
        for place in unit.wave.places:
            answers = self._answers(unit, place)
            if self.source.turns(place) <= unit.turn:
                continue
            prompt = () if answers is None else self.source.prompt(place, unit.cell.context, answers)
            if answers is None or (unit.turn and not self.fits(prompt)):
                too_long.append(self.source.ids[place])
            else:
                found[place] = prompt
        where = unit.cell, unit.wave.index, unit.turn, unit.setting
        if too_long and where not in self.records.left_out:
            names = dict(zip(("cell", "wave", "turn", "setting"), where, strict=True))
            self.records.add({**names, "left_out": too_long})
        return found

    def _answers(self, unit: Unit, place: int) -> list[tuple[int, ...]] | None:
        """Return plain decoding's answers to the turns before; None if one of these was left out."""
        found = []
        for turn in range(unit.turn):
            record = self.records.by_key.get(Key(unit.cell, unit.wave.index, turn, unit.setting, PLAIN, 0))
            if record is None or self.source.ids[place] not in record.prompts:
                return None
            found.append(record.runs[record.prompts.index(self.source.ids[place])].tokens)
        return found

    def fits(self, prompt: Sequence[int]) -> bool:
        """Return True if the target, and every drafter, holds the prompt with its new tokens."""
        holds = [each.max_positions for each in self.methods if each.max_positions is not None]
        holds += [] if self.target.max_positions is None else [self.target.max_positions]
        return all(len(prompt) + self.config.max_new_tokens <= limit for limit in holds)

    def _warm_up(self, cell: Cell, waves: Sequence[Wave]) -> None:
        """Decode by every method, first turns only, the prompts that need the most memory."""
        prompts = [self.source.prompt(place, cell.context) for wave in waves for place in wave.places]
        longest = sorted(prompts, key=len, reverse=True)[: cell.batch_size]
        for method in self.methods_of(cell):
            self._run(method, longest, [self.config.seed] * len(longest), cell.batch_size)

    # --- greedy texts -------------------------------------------------------------------------------------------------

    def _parted(self, unit: Unit) -> Iterator[Key]:
        """Yield the greedy runs that hold a text other than plain decoding's, and have no margins yet."""
        for key, method in self._keys(unit):
            if method.temperature == 0 and key in self.records.by_key and key not in self.records.margins:
                mine, plain = (self.records.by_key.get(each) for each in (key, key._replace(method=PLAIN)))
                if mine and plain and any(a.tokens != b.tokens for a, b in zip(mine.runs, plain.runs, strict=True)):
                    yield key

    def _margins(self, key: Key, prompts: Sequence[Sequence[int]]) -> list[Margin]:
        mine, plain = self.records.by_key[key], self.records.by_key[key._replace(method=PLAIN)]
        return [
            margin_of(self.target, prompt, a.tokens, b.tokens)
            for prompt, a, b in zip(prompts, mine.runs, plain.runs, strict=True)
        ]


def margin_of(target: CausalLM, prompt: Sequence[int], mine: Sequence[int], plain: Sequence[int]) -> Margin:
    """Measure how far apart the target's logits of the two tokens are at which two greedy texts first differ.

    In fp32 on a CPU all texts must be equal. In bf16 a pass over n tokens rounds differently from n passes over one, so
    near-ties may fall either way: a small margin shows one. "ended": one text ended where the other went on, which no
    near-tie explains. None: the texts are equal.
    """
    if tuple(mine) == tuple(plain):
        return None
    at = common_length(mine, plain)
    if at == min(len(mine), len(plain)):
        return "ended"
    text = [*prompt, *plain[:at]]
    logits = target.prefill([text], target.new_cache(len(text))).logits[0].float()
    return abs(float(logits[mine[at]] - logits[plain[at]]))


def digest_of(prompt: Sequence[int]) -> str:
    """Return a short digest of a prompt's token ids, by which runs of two evaluations are paired."""
    return sha256(json.dumps(list(prompt)).encode()).hexdigest()[:12]


def measure(measurement: Measurement) -> None:
    """Run a measurement's share; on the first process also measure the cost of a target pass, once."""
    measurement.run()
    if measurement.rank == 0 and measurement.records.cost_curve is None:
        measurement.records.add({"cost_curve": measure_cost_curve(measurement.target)})


def evaluate(
    target: CausalLM,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    config: EvaluationConfig,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure every method on every prompt; return the report (see `write_report` and `decoding.measure.report`).

    ``on_run`` is called after each run, for a progress bar. ValueError, before any run, for a prompt that is too long.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on: give at least one")
    for prompt in prompts:  # before the first run, not after an hour
        check_prompt(target, prompt, DecodingConfig(config.max_new_tokens))
    measurement = Measurement(target, methods, TokenPrompts(prompts), config, on_run=on_run)
    measure(measurement)
    return report_of(measurement)


def report_of(measurement: Measurement) -> dict[str, Any]:
    """Return the report of a finished measurement, its machine and versions those of this process."""
    target, config, records = measurement.target, measurement.config, measurement.records
    tasks = dict(zip(measurement.source.ids, measurement.source.tasks, strict=True))
    cells = cells_of(config)
    figures = figures_of(records, measurement.methods, cells, tasks)
    assert len(figures["rows"]) == len(measurement.methods_of(cells[0])), "every method has a row"
    return {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "questions": len(tasks),
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        **figures,
    }


def measure_acceptance(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int = 1,
    on_text: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Decode the prompts by the decoding loop, without peers or timing, and return the acceptance figures.

    Prompt i is decoded with the seed ``config.seed + i``. ``on_text`` is called after each text, for a progress bar.
    """
    return acceptance(count_steps(target, drafter, prompts, config, batch_size, on_text=on_text))


def count_steps(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int = 1,
    seeds: Sequence[int] | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> list[list[StepCount]]:
    """Decode the prompts as `measure_acceptance` does; return the counts of each text's steps without its prefill.

    ``seeds``: one for each prompt, in place of those that follow from the config.
    """
    texts: list[list[StepCount]] = [[] for _ in prompts]
    room = [config.max_new_tokens for _ in prompts]
    for place, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size, seeds=seeds):
        if not step.is_prefill:
            texts[place].append(step.counts)
        room[place] -= len(step.tokens)
        if not room[place] or (step.tokens and step.tokens[-1] in config.eos_token_ids):
            on_text()
    return texts


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
