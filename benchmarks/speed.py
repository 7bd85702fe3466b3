"""Decoding speed against `transformers` in one run: a trained target, and the same function at a larger target's cost.

Everything is a ratio of runs that took turns in one process. The widened target computes exactly what the small one
does (`widen.py`), so its acceptance is the small one's: figures of it say "widened".

Two tables each: the methods that the goals compare, on many prompts, and every way to draft, on few. Batches follow.

    python benchmarks/speed.py --target FOLDER --draft FOLDER --heads medusa=FOLDER markov=FOLDER --parallel FOLDER \\
        --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # idle threads are told to sleep before torch is imported
import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedTokenizerBase
from widen import widened_heads, widened_parallel, widened_to

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.measure.evaluate import evaluate
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.methods import EvaluationConfig, standard_methods
from decoding.measure.names import PLAIN, TRANSFORMERS
from decoding.measure.questions import read_prompts
from decoding.measure.report import markdown_table
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve
from decoding.model.dtypes import parse_dtype
from decoding.model.heads import MedusaHeads
from decoding.model.loading import (
    eos_token_ids,
    load_draft,
    load_heads,
    load_model,
    load_parallel_draft,
    load_tokenizer,
)
from decoding.model.parallel import ParallelDraft
from trainer.terminal.console import standard_output

DEPTH = 4
CHAIN = f"draft model, {DEPTH} tokens"


@dataclass(frozen=True)
class Trained:
    """Everything trained for a target: a draft, heads by name, a parallel draft; or a part of these."""

    draft: CausalLM | None
    heads: Mapping[str, MedusaHeads]
    parallel: ParallelDraft | None

    def widened(self, width: int) -> "Trained":
        """Return the same for the target widened to ``width``; an ordinary draft needs no change."""
        heads = {name: widened_heads(each, width) for name, each in self.heads.items()}
        return Trained(self.draft, heads, None if self.parallel is None else widened_parallel(self.parallel, width))

    def drafters(self) -> dict[str, Drafter]:
        """Make every way to draft with these, and the two that need no weights."""
        found: dict[str, Drafter] = {}
        if self.draft is not None:
            found[CHAIN] = named_drafter("draft", self.draft, tokens=DEPTH)
            found["draft tree"] = named_drafter("draft-tree", self.draft, depth=6, width=3, nodes=16)
            found["draft and lookup"] = named_drafter("hybrid", self.draft, of="draft", lookup_tokens=8)
            found["draft over lookup (cascade)"] = named_drafter("cascade", self.draft)
        for name, heads in self.heads.items():
            found[f"{name}, tree of {len(heads.config.tree)}"] = named_drafter("heads", heads)
            found[f"{name} and lookup"] = named_drafter("hybrid", heads, of="heads", lookup_tokens=8)
        if self.parallel is not None:
            found["parallel, 6 tokens"] = named_drafter("parallel", self.parallel, tokens=6)
            found["parallel and lookup"] = named_drafter("hybrid", self.parallel, of="parallel", lookup_tokens=8)
        return {**found, "prompt lookup": named_drafter("lookup"), "lookahead": named_drafter("lookahead")}


def context_curve(target: CausalLM, lengths: Sequence[int], repeats: int) -> list[dict[str, float]]:
    """Measure a step after a text of each length, in ms: one token, a tree of 8, and `transformers`' own cache."""
    limit, config = target.max_positions, target.model.config
    # Rotary positions go on past the trained length: the text means nothing there, the time is the same.
    target.max_positions = None
    curve = []
    for length in lengths:
        ours = measure_cost_curve(target, (1, 8), prefix=length, repeats=repeats)
        curve.append(
            {
                "context": length,
                "one_token_ms": 1000 * ours[1],
                "eight_tokens_ms": 1000 * ours[8],
                "transformers_ms": 1000 * _transformers_step(target, length, repeats),
            }
        )
    target.max_positions = limit
    assert target.model.config is config
    return curve


@torch.inference_mode()
def _transformers_step(target: CausalLM, length: int, repeats: int) -> float:
    cache = DynamicCache()
    target.model(input_ids=torch.full((1, length), 10, device=target.device), past_key_values=cache, logits_to_keep=1)
    token = torch.tensor([[10]], device=target.device)
    samples = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        target.model(input_ids=token, past_key_values=cache)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[2:])


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each figure with its goal; speed-ups are medians of paired runs, which a busy moment moves little."""
    found: list[dict[str, Any]] = []

    def add(goal: str, wanted: float, measured: float | None, at_most: bool = False) -> None:
        met = measured is not None and (measured <= wanted if at_most else measured >= wanted)
        found.append({"goal": goal, "wanted": wanted, "measured": measured, "at_most": at_most, "met": met})

    for name, part in report["targets"].items():
        compared = _gains(part["compared"], "greedy")
        assisted = f"transformers assisted, {DEPTH} tokens"
        add(f"{name}: plain over transformers generate", 1.03, _ratio(compared, PLAIN, TRANSFORMERS))
        add(f"{name}: draft over assisted generation, same draft and depth", 1.15, _ratio(compared, CHAIN, assisted))
        for setting, wanted in (("greedy", 2.0), ("T=1", 1.5)) if part["widened"] else ():
            ours = {
                row: gain
                for row, gain in _gains(part["drafters"], setting).items()
                if not row.startswith("transformers")
            }
            add(f"{name}: the fastest way to draft over plain, {setting}", wanted, max(ours.values(), default=None))
        best = max((gain for row, gain in _gains(part["drafters"], "greedy").items() if "draft" in row), default=None)
        defaults = _gains(part["drafters"], "greedy").get("transformers assisted, its defaults")
        add(f"{name}: best draft over assisted generation's defaults", 1.5, best and defaults and best / defaults)
        split = [row["time_split"]["overhead"] for row in part["drafters"]["rows"] if row.get("time_split")]
        limit = 0.04 if part["widened"] else 0.15
        add(f"{name}: time in neither model's forward, worst method", limit, max(split), at_most=True)
        for row in part["batches"]["rows"]:
            if part["widened"] and row["drafter"] == CHAIN:
                measured = row["speedup_over_transformers"]["median"]
                add(f"{name}: batch {row['batch_size']}, {row['method']} over transformers", 1.4, measured)
    return found


def _gains(report: dict[str, Any], setting: str) -> dict[str, float]:
    """Return method -> median of paired speed-ups over plain decoding."""
    return {row["method"]: row["speedup"]["median"] for row in report["rows"] if row["setting"] == setting}


def _ratio(gains: Mapping[str, float], method: str, peer: str) -> float | None:
    return gains[method] / gains[peer] if method in gains and peer in gains else None


def measure(
    target: CausalLM,
    trained: Trained,
    prompts: Sequence[Sequence[int]],
    config: EvaluationConfig,
    options: argparse.Namespace,
    widened: dict[str, Any] | None,
) -> dict[str, Any]:
    """Measure all figures of one target."""
    short: bool = options.short
    some = prompts[: options.drafter_limit]
    greedy = replace(config, settings=("greedy",))
    in_batches = replace(greedy, batch_sizes=(2,) if short else (8,))
    batched = {name: drafter for name, drafter in trained.drafters().items() if name in (CHAIN, "prompt lookup")}
    chain = {name: drafter for name, drafter in batched.items() if name == CHAIN}
    lengths = (128, 256) if short else (128, 512, 2048, 8192)
    return {
        "widened": widened,
        "compared": evaluate(target, standard_methods(target, chain, greedy), prompts, greedy),
        "drafters": evaluate(target, standard_methods(target, trained.drafters(), config), some, config),
        "batches": evaluate(target, standard_methods(target, batched, in_batches), prompts, in_batches),
        "context": context_curve(target, lengths, 5 if short else 15),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    for name, part in report["targets"].items():
        for title in ("compared", "drafters", "batches"):
            lines = f"\n{name}: {title}\n\n{markdown_table(part[title])}\n"
            console.print(lines, markup=False, highlight=False, soft_wrap=True)
        table = Table("context", "one token, ms", "eight tokens, ms", "transformers, ms", title=name)
        for row in part["context"]:
            table.add_row(*(f"{row[key]:.4g}" for key in row))
        console.print(table)
    table = Table("goal", "wanted", "measured", "met")
    for goal in report["goals"]:
        bound = f"{'≤' if goal['at_most'] else '≥'} {goal['wanted']:g}"
        measured = "–" if goal["measured"] is None else f"{goal['measured']:.3f}"
        table.add_row(goal["goal"], bound, measured, "yes" if goal["met"] else "no")
    console.print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", help="folder of a draft of it")
    parser.add_argument("--heads", nargs="+", default=[], metavar="NAME=FOLDER", help="heads on it")
    parser.add_argument("--parallel", help="folder of a parallel draft of it")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--prompt-field")
    parser.add_argument("--limit", type=int, default=20, help="prompts of the compared methods and of batches")
    parser.add_argument("--drafter-limit", type=int, default=6, help="prompts of all ways to draft")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="how often each method decodes each prompt")
    parser.add_argument("--widen", type=float, default=150e6, help="parameters to widen to; 0 for not at all")
    parser.add_argument("--only-widened", action="store_true", help="leave the target itself out")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON to write; what it holds of other targets stays"
    )
    parser.add_argument("--short", action="store_true", help="a run of a minute, to see that everything works")
    return parser.parse_args(arguments)


def _trained(options: argparse.Namespace, target: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Trained:
    named = dict(each.split("=", 1) for each in options.heads)
    return Trained(
        load_draft(options.draft, target, tokenizer) if options.draft else None,
        {name: load_heads(folder, target) for name, folder in named.items()},
        load_parallel_draft(options.parallel, target, tokenizer) if options.parallel else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    short: bool = options.short
    model = load_model(options.target, parse_dtype(options.dtype))
    tokenizer = load_tokenizer(options.target)
    target = CausalLM(model)
    trained = _trained(options, target, tokenizer)
    prompts = read_prompts(options.prompts, tokenizer, 2 if short else options.limit, options.prompt_field)
    config = EvaluationConfig(
        max_new_tokens=8 if short else options.max_new_tokens,
        rounds=1 if short else options.rounds,
        eos_token_ids=eos_token_ids(model, tokenizer),
    )
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "targets": {}}
    if options.output.exists():
        report["targets"] = json.loads(options.output.read_text())["targets"]
    name = Path(options.target).name
    if not options.only_widened:
        report["targets"][name] = measure(target, trained, prompts, config, options, None)
    if options.widen:
        wide, stand_in = widened_to(model, int(options.widen))
        wide_name = f"{name}, widened to {stand_in['parameters'] / 1e6:.0f}M"
        wide_trained = trained.widened(stand_in["width"])
        report["targets"][wide_name] = measure(CausalLM(wide), wide_trained, prompts, config, options, stand_in)
    report["goals"] = goals(report)
    console = standard_output(width=150)
    show(report, console)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
