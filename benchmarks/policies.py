"""Every policy with every drafter: the measured one beside the better of always drafting and never.

In a cell (target, greedy or T=1, batch size) plain decoding and every drafter under every policy take turns on each
group of prompts, so that a machine that slows down slows all alike. Policies learn from group to group; a first group
warms up, and the measured policy's survey falls into it. The widened target computes exactly what the small one does
(`decoding.measure.widen`), so its acceptance is the small one's: figures of it say "widened".

    python benchmarks/policies.py --target FOLDER --draft FOLDER --heads FOLDER --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from speed import WrongDrafter

from decoding.drafters import (
    Drafter,
    DraftModelDrafter,
    DraftTreeDrafter,
    HybridDrafter,
    MedusaDrafter,
    PromptLookupDrafter,
)
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import read_prompts
from decoding.measure.widen import widened_heads, widened_to
from decoding.metrics import ratio_of_rates
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import parse_dtype
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_draft, load_heads, load_model, load_tokenizer
from decoding.policies import Budget, FixedPolicy, MeasuredPolicy, Policy, named_policy
from decoding.policies.base import Rehearsal
from decoding.rules.sampling import SamplingConfig
from trainer.terminal.console import standard_output

PLAIN = "plain"
POLICIES = ("fixed", "measured", "heuristic")
GOAL, USELESS_GOAL = 0.97, 0.95


class Observed(MeasuredPolicy):
    """The measured policy, with a count of its choices and the seconds that it measured at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: Counter[Budget] = Counter()
        self.survey_seconds = 0.0

    def begin(self, budgets: Sequence[Budget], rows: int, rehearse: Rehearsal) -> None:
        began = time.perf_counter()
        super().begin(budgets, rows, rehearse)
        self.survey_seconds += time.perf_counter() - began

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        chosen = super().choose(budgets, rows)
        self.choices[chosen] += 1
        return chosen


class Run(NamedTuple):
    """A group of prompts decoded once, without their prefills; ``passes`` counts a row's steps each."""

    tokens: int
    seconds: float
    passes: int


class Cell(NamedTuple):
    """One target, temperature and batch size."""

    target: str
    temperature: float
    batch_size: int


def drafters_for(draft: CausalLM, heads: MedusaHeads) -> dict[str, Drafter]:
    """Make the drafters to compare; the last one is useless."""
    return {
        "heads, tree": MedusaDrafter(heads),
        "draft, chain": DraftModelDrafter(draft, (1,) * 4),
        "draft, tree": DraftTreeDrafter(draft, depth=6, width=3, nodes=16),
        "heads and lookup": HybridDrafter(MedusaDrafter(heads), PromptLookupDrafter()),
        "draft and lookup": HybridDrafter(DraftModelDrafter(draft, (1,) * 4), PromptLookupDrafter()),
        "lookup": PromptLookupDrafter(),
        "useless": WrongDrafter(),
    }


def run(
    target: CausalLM,
    drafter: Drafter | None,
    policy: Policy | None,
    group: Sequence[Sequence[int]],
    seed: int,
    config: DecodingConfig,
) -> Run:
    """Decode a group of prompts as one batch."""
    seeds = range(seed, seed + len(group))
    engine = Engine(target, drafter, policy or FixedPolicy())
    steps = engine.steps(group, config, batch_size=len(group), seeds=seeds)
    decoded = [step for _, step in steps if not step.is_prefill]
    return Run(sum(len(step.tokens) for step in decoded), sum(step.total_seconds for step in decoded), len(decoded))


def measure_cell(
    target: CausalLM,
    drafters: dict[str, Drafter],
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    rounds: int,
) -> list[dict[str, Any]]:
    """Decode all groups by every method in turn; return a row of figures for each drafter."""
    methods: dict[tuple[str, str], tuple[Drafter | None, Policy | None]] = {(PLAIN, PLAIN): (None, None)}
    for name, drafter in drafters.items():
        for policy in POLICIES:
            methods[name, policy] = drafter, Observed() if policy == "measured" else named_policy(policy)
    groups = [prompts[first : first + cell.batch_size] for first in range(0, len(prompts), cell.batch_size)]
    runs: dict[tuple[str, str], list[Run]] = {key: [] for key in methods}
    for drafter, policy in methods.values():
        run(target, drafter, policy, groups[0], 0, config)  # warm-up
        if isinstance(policy, Observed):
            policy.choices.clear()
    keys, turn = list(methods), 0
    for round_index in range(rounds):
        for index, group in enumerate(groups):
            turn += 1
            for key in (*keys[turn % len(keys) :], *keys[: turn % len(keys)]):
                seed = (round_index * len(groups) + index) * cell.batch_size
                runs[key].append(run(target, *methods[key], group, seed, config))
    return [_row(cell, name, runs, methods[name, "measured"][1], len(groups)) for name in drafters]


def _row(
    cell: Cell, name: str, runs: dict[tuple[str, str], list[Run]], policy: Policy | None, groups: int
) -> dict[str, Any]:
    assert isinstance(policy, Observed)

    def over(policy: str, other: tuple[str, str]) -> dict[str, float]:
        """Return the tokens per second over another's, a group's rounds summed, with an interval over groups."""
        pairs = []
        for group in range(groups):
            sides = [runs[key][group::groups] for key in ((name, policy), other)]
            pairs.append(tuple(float(sum(part)) for side in sides for part in list(zip(*side, strict=True))[:2]))
        return ratio_of_rates(pairs)._asdict()  # type: ignore[arg-type]  # four numbers each

    speedups = {policy: over(policy, (PLAIN, PLAIN)) for policy in POLICIES}
    better = (name, "fixed") if speedups["fixed"]["value"] > 1 else (PLAIN, PLAIN)
    passes = {policy: runs[name, policy] for policy in POLICIES}
    return {
        **cell._asdict(),
        "drafter": name,
        "speedup": speedups,
        "better": better[1],
        "measured_over_better": over("measured", better),
        "tokens_per_pass": {
            policy: sum(each.tokens for each in of_one) / max(1, sum(each.passes for each in of_one))
            for policy, of_one in passes.items()
        },
        "choices": {f"{depth} deep, {nodes} nodes": n for (depth, nodes), n in policy.choices.most_common()},
        "survey_seconds": policy.survey_seconds,
    }


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each row with its goal."""
    found = []
    for row in rows:
        wanted = USELESS_GOAL if row["drafter"] == "useless" else GOAL
        measured = row["measured_over_better"]["value"]
        found.append({"wanted": wanted, "measured": measured, "met": measured >= wanted})
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Make a table of all rows."""
    shown = Table(
        "target", "T", "batch", "drafter", *POLICIES, "measured / better of fixed and plain", "met", "most chosen"
    )
    for row, goal in zip(rows, goals(rows), strict=True):
        ratio = row["measured_over_better"]
        interval = "" if math.isnan(ratio["low"]) else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        shown.add_row(
            row["target"],
            f"{row['temperature']:g}",
            str(row["batch_size"]),
            row["drafter"],
            *(f"{row['speedup'][policy]['value']:.2f}×" for policy in POLICIES),
            f"{ratio['value']:.3f}{interval} of {row['better']}",
            "yes" if goal["met"] else "no",
            ", ".join(f"{n} × {name}" for name, n in list(row["choices"].items())[:2]),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", required=True, help="folder of a draft of it")
    parser.add_argument("--heads", required=True, help="folder of Medusa heads on it")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=24, help="prompts to decode; the widened target takes a third")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="how often each method decodes each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="prompts decoded together")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--only", nargs="+", help="drafters to measure, by name; all if not given")
    parser.add_argument("--widen", type=float, default=150e6, help="parameters to widen to; 0 for not at all")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)

    model, tokenizer = load_model(options.target, parse_dtype(options.dtype)), load_tokenizer(options.target)
    small, name = CausalLM(model), Path(options.target).name
    draft, heads = load_draft(options.draft, small, tokenizer), load_heads(options.heads, small)
    prompts = read_prompts(options.prompts, tokenizer, options.limit, None)
    targets = [(name, small, heads, prompts, options.rounds)]
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "rows": []}
    if options.widen:
        wide, report["widened"] = widened_to(model, int(options.widen))
        wide_name = f"{name}, widened to {report['widened']['parameters'] / 1e6:.0f}M"
        few = prompts[: max(8, len(prompts) // 3)]
        targets.append((wide_name, CausalLM(wide), widened_heads(heads, report["widened"]["width"]), few, 1))
    console, began = standard_output(width=170), time.perf_counter()
    for target_name, target, own_heads, own_prompts, rounds in targets:
        drafters = {key: each for key, each in drafters_for(draft, own_heads).items() if key in (options.only or [key])}
        for batch_size in options.batches:
            for temperature in options.temperatures:
                config = DecodingConfig(
                    options.max_new_tokens, SamplingConfig(temperature), eos_token_ids=eos_token_ids(model, tokenizer)
                )
                cell = Cell(target_name, temperature, batch_size)
                rows = measure_cell(target, drafters, cell, own_prompts, config, rounds)
                report["rows"] += rows
                console.print(table(rows))
    report |= {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "rounds": options.rounds}
    report |= {"goals": goals(report["rows"]), "seconds": time.perf_counter() - began}
    console.print(table(report["rows"]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
