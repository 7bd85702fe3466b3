"""The default policy with every drafter: its speed relative to plain decoding and to always drafting.

In a cell (target, temperature, batch size) plain decoding and each drafter with each policy decode the same group of
prompts at the same time and take turns after every step. The seconds of a step are divided by the median of the nearest
three steps of plain decoding, so a machine that slows down for a while changes no ratio. Each kind of step (drafter,
texts, drafted tokens) counts with its median cost in the cell, because single steps are sometimes much slower. So the
figures do not include the work that a draft model does only after plain steps; heads and lookups have no such work.
Prefills do not count, and texts do not end early. The default policy learns from turn to turn, and the first turn does
not count.

    python benchmarks/policies.py --target FOLDER --drafters heads:FOLDER lookup --prompts FILE.jsonl \\
        --output FILE.json
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from rich.table import Table

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.dtypes import parse_dtype
from decoding.generate import DecodingConfig, Engine
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model, load_tokenizer
from decoding.policies import AdaptivePolicy, Budget, FixedPolicy
from decoding.rules.sampling import SamplingConfig
from trainer.terminal.console import standard_output

PLAIN, FIXED, DEFAULT = "plain", "fixed", "default"
GOAL = 0.97


class Cell(NamedTuple):
    """One target, temperature and batch size."""

    target: str
    temperature: float
    batch_size: int


class Counted(AdaptivePolicy):
    """The default policy, extended to count its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: Counter[Budget] = Counter()

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        chosen = super().choose(budgets, rows)
        self.choices[chosen] += 1
        return chosen


def measure(
    target: CausalLM,
    drafters: Mapping[str, Drafter],
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    turns: int,
) -> list[dict[str, Any]]:
    """Decode groups of prompts by every method in turns; return a row of figures per drafter."""
    engines = {(PLAIN, PLAIN): Engine(target)}
    for name, drafter in drafters.items():
        engines[name, FIXED] = Engine(target, drafter, FixedPolicy())
        engines[name, DEFAULT] = Engine(target, drafter, Counted())
    tokens = Counter[tuple[str, str]]()
    kinds = {key: Counter[tuple[int, int]]() for key in engines}  # of (texts, most tokens drafted in a text)
    keys, costs = list(engines), defaultdict[tuple[str, int, int], list[float]](list)
    for turn in range(turns + 1):
        first = turn * cell.batch_size
        group = [prompts[(first + index) % len(prompts)] for index in range(cell.batch_size)]
        seeds = range(first, first + len(group))
        order = [*keys[turn % len(keys) :], *keys[: turn % len(keys)]]
        rounds = list(
            zip_longest(*(engines[key].steps(group, config, batch_size=len(group), seeds=seeds) for key in order))
        )
        columns = dict(zip(order, zip(*rounds, strict=True), strict=True))
        plain = [step[1].total_seconds * len(group) for step in columns[PLAIN, PLAIN]]
        for key, decoded in columns.items():
            own = [(number, step[1]) for number, step in enumerate(decoded) if step is not None]
            for share, of_rows in groupby(own, lambda row: row[1].total_seconds):
                (number, *_), rows = zip(*of_rows, strict=True)  # the texts of one step
                if turn and not rows[0].is_prefill:
                    # A round yields one text, so plain decoding takes a step in as many rounds as there are texts.
                    beside = plain[max(number - len(group), len(group)) : number + len(group) + 1 : len(group)]
                    kind = len(rows), max(step.drafted for step in rows)
                    costs[key[0], *kind].append(share * len(rows) / median(beside))
                    kinds[key][kind] += 1
                    tokens[key] += sum(len(step.tokens) for step in rows)
    typical = {kind: median(measured) for kind, measured in costs.items()}
    speeds = {
        key: tokens[key] / sum(typical[key[0], *kind] * steps for kind, steps in of.items())
        for key, of in kinds.items()
    }
    return [cell._asdict() | figures(name, engines[name, DEFAULT], speeds, kinds, typical) for name in drafters]


def figures(
    name: str,
    engine: Engine,
    speeds: Mapping[tuple[str, str], float],
    kinds: Mapping[tuple[str, str], Mapping[tuple[int, int], int]],
    typical: Mapping[tuple[str, int, int], float],
) -> dict[str, Any]:
    """Return a drafter's ratios of speeds in a cell, the commonest choices of the policy of ``engine``, and the kinds
    of steps under the default policy. For each kind: texts, drafted tokens, number of steps, and median cost in plain
    steps.
    """
    assert isinstance(engine.policy, Counted)
    plain, fixed, default = speeds[PLAIN, PLAIN], speeds[name, FIXED], speeds[name, DEFAULT]
    commonest = engine.policy.choices.most_common(4)
    return {
        "drafter": name,
        "fixed_over_plain": fixed / plain,
        "default_over_plain": default / plain,
        "default_over_better": default / max(fixed, plain),
        "choices": {f"{budget.depth} deep, {budget.nodes - 1}": count for budget, count in commonest},
        "steps": [(*kind, count, typical[name, *kind]) for kind, count in sorted(kinds[name, DEFAULT].items())],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--drafters", nargs="+", default=["lookup"], metavar="SPEC", help="as in `headstart evaluate`")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=7, help="turns at batch sizes above 4; twice as many below")
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    model, tokenizer = load_model(options.target, parse_dtype(options.dtype)), load_tokenizer(options.target)
    target = CausalLM(model)
    loader, specs = DrafterLoader(target, tokenizer), [parse_drafter(text) for text in options.drafters]
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    rows: list[dict[str, Any]] = []
    console = standard_output(width=150)
    table = Table("target", "T", "batch", "drafter", "fixed / plain", "default / plain", "default / better", "choices")
    for temperature in (0.0, 1.0):
        for batch_size in options.batch_sizes:
            config = DecodingConfig(options.max_new_tokens, SamplingConfig(temperature))
            turns = options.turns * (1 if batch_size > 4 else 2)
            cell = Cell(Path(options.target).name, temperature, batch_size)
            drafters = {str(spec): loader.load(spec) for spec in specs}  # anew, because hybrids learn
            rows += measure(target, drafters, cell, prompts, config, turns)
            console.print(f"T={temperature:g}, batch {batch_size}: done")
    for row in rows:
        ratios = [f"{row[key]:.2f}" for key in ("fixed_over_plain", "default_over_plain", "default_over_better")]
        chosen = ", ".join(f"{choice}: {count}" for choice, count in row["choices"].items())
        table.add_row(row["target"], f"{row['temperature']:g}", str(row["batch_size"]), row["drafter"], *ratios, chosen)
    console.print(table)
    worst = {key: min(row[key] for row in rows) for key in ("default_over_plain", "default_over_better")}
    console.print(f"lowest ratios of any cell: {worst}; the goal for each ratio is {GOAL}")
    dtype = str(target.dtype).removeprefix("torch.")
    measured = {"dtype": dtype, "set": Path(options.prompts).stem, "max_new_tokens": options.max_new_tokens}
    report = {"hardware": hardware(), "versions": versions(), "commit": commit(), **measured}
    report |= {"prompts": len(prompts), "worst": worst, "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
