"""Decoding speed against `transformers` in one run: a trained target, and the same function at a larger target's cost.

Everything is a ratio of runs that took turns in one process. The widened target computes exactly what the small one
does (`decoding.measure.widen`), so its acceptance is the small one's: figures of it say "widened".

    python benchmarks/speed.py --target FOLDER --draft FOLDER --heads FOLDER --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # idle threads are told to sleep before torch is imported
import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from decoding.drafters import Drafter
from decoding.drafters.base import DraftRequest, TextDrafter, TextSession, TextStart, chain_budgets
from decoding.drafters.registry import named_drafter
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import evaluate
from decoding.measure.figures import number
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.methods import EvaluationConfig, Method, our_method, standard_methods
from decoding.measure.questions import read_prompts
from decoding.measure.report import markdown_table
from decoding.measure.widen import widened_heads, widened_to
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_draft, load_heads, load_model, load_tokenizer, parse_dtype
from decoding.policies import Budget, MeasuredPolicy
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree
from trainer.terminal.console import standard_output

BEST = ", measured"


class WrongDrafter(TextDrafter):
    """A useless drafter: eight copies of token 7, which the target hardly ever writes."""

    name = "wrong tokens"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return chain_budgets(8)

    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> TextSession:
        return self

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        pass

    def propose(self, request: DraftRequest) -> Proposal:
        depth = min(request.max_depth, request.max_nodes - 1)
        return Proposal(TokenTree.chain([request.tokens[-1], *[7] * depth]), ProposalKind.DETERMINISTIC)


def drafters_for(draft: CausalLM | None, heads: MedusaHeads | None) -> dict[str, Drafter]:
    """Make every drafter whose weights are given, and the lookup, which needs none."""
    drafters: dict[str, Drafter] = {}
    if draft is not None:
        drafters["draft model, 4 tokens"] = named_drafter("draft", draft)
        drafters["draft tree"] = named_drafter("draft-tree", draft, depth=6, width=3, nodes=16)
        drafters["draft and lookup"] = named_drafter("hybrid", draft, of="draft", lookup_tokens=8)
    if heads is not None:
        drafters[f"medusa, tree of {len(heads.config.tree)}"] = named_drafter("heads", heads)
        drafters["medusa, dynamic tree"] = named_drafter("heads", heads, dynamic_nodes=16)
    drafters["prompt lookup"] = named_drafter("lookup")
    return drafters


def methods_for(
    target: CausalLM, draft: CausalLM | None, heads: MedusaHeads | None, config: EvaluationConfig
) -> list[Method]:
    """Make plain decoding, the peers and every drafter; larger drafts under the measured policy; a useless drafter."""
    methods = standard_methods(target, drafters_for(draft, heads), config)
    for setting, temperature in (("greedy", 0.0), *((f"T={each:g}", each) for each in config.temperatures)):
        decoding = DecodingConfig(
            config.max_new_tokens, SamplingConfig(temperature), eos_token_ids=config.eos_token_ids
        )
        if draft is not None:
            name = f"draft model, up to 8{BEST}"
            deep = named_drafter("draft", draft, tokens=8)
            methods.append(our_method(target, setting, name, deep, decoding, MeasuredPolicy()))
            name = f"draft tree{BEST}"
            tree = named_drafter("draft-tree", draft, depth=8, width=4, nodes=32)
            methods.append(our_method(target, setting, name, tree, decoding, MeasuredPolicy()))
        if heads is not None:
            name = f"medusa, dynamic tree{BEST}"
            medusa = named_drafter("heads", heads, dynamic_nodes=32)
            methods.append(our_method(target, setting, name, medusa, decoding, MeasuredPolicy()))
        methods.append(our_method(target, setting, f"wrong tokens{BEST}", WrongDrafter(), decoding, MeasuredPolicy()))
    return methods


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
    """Compare each figure with its goal."""
    found: list[dict[str, Any]] = []

    def add(goal: str, wanted: float, measured: float | None, at_most: bool = False) -> None:
        met = measured is not None and (measured <= wanted if at_most else measured >= wanted)
        found.append({"goal": goal, "wanted": wanted, "measured": measured, "at_most": at_most, "met": met})

    for name, part in report["targets"].items():
        rows = {(row["setting"], row["method"]): row for row in part["speed"]["rows"]}

        def gain(method: str, setting: str = "greedy", rows: dict[Any, Any] = rows) -> float | None:
            """The median of paired runs over plain decoding: a moment in which the machine was busy moves it little."""
            row = rows.get((setting, method))
            return row["speedup"]["median"] if row else None

        def ratio(method: str, peer: str, setting: str = "greedy") -> float | None:
            a, b = gain(method, setting), gain(peer, setting)
            return a / b if a and b else None

        def best(contains: str, setting: str, rows: dict[Any, Any] = rows) -> str:
            fitting = [key for key in rows if key[0] == setting and contains in key[1] and "transformers" not in key[1]]
            return max(fitting, key=lambda key: rows[key]["speedup"]["median"], default=("", ""))[1]

        add(f"{name}: plain over transformers generate", 1.0, ratio("plain", "transformers generate"))
        same = ratio("draft model, 4 tokens", "transformers assisted, 4 tokens")
        add(f"{name}: draft over assisted generation, same draft and depth", 1.1, same)
        defaults = ratio(best("draft", "greedy"), "transformers assisted, its defaults")
        add(f"{name}: best draft policy over assisted generation's defaults", 1.5, defaults)
        if part["widened"]:
            for setting, wanted in (("greedy", 2.0), ("T=1", 1.5)):
                chosen = max(
                    (best("draft", setting), best("medusa", setting)),
                    key=lambda method, at=setting: gain(method, at) or 0,
                )
                add(f"{name}: best of draft and Medusa over plain, {setting}", wanted, ratio(chosen, "plain", setting))
        split = [row["time_split"]["overhead"] for row in rows.values() if row.get("time_split")]
        limit = 0.04 if part["widened"] else 0.15
        add(f"{name}: time in neither model's forward, median of methods", limit, statistics.median(split), True)
        add(f"{name}: time in neither model's forward, worst method", limit, max(split), True)
        add(f"{name}: a useless drafter over plain", 0.95, ratio(f"wrong tokens{BEST}", "plain"))
        for row in part["batches"]:
            if row["batch_size"] == 8 and part["widened"] and row["method"].startswith("draft model, 4 tokens"):
                measured = row["speedup_over_transformers"]["median"]
                add(f"{name}: batch 8, {row['method']} over transformers", 1.3, measured)
    return found


def measure(
    target: CausalLM,
    draft: CausalLM | None,
    heads: MedusaHeads | None,
    prompts: Sequence[Sequence[int]],
    eos: tuple[int, ...],
    options: argparse.Namespace,
    widened: dict[str, Any] | None,
) -> dict[str, Any]:
    """Measure all figures of one target."""
    short: bool = options.short
    config = EvaluationConfig(
        max_new_tokens=16 if short else options.max_new_tokens,
        rounds=1 if short else options.rounds,
        eos_token_ids=eos,
        settings=("greedy", "sampling"),
        argmax_twins=False,
    )
    methods = methods_for(target, draft, heads, config)
    speed = evaluate(target, methods, prompts, config)
    batched = {name: drafter for name, drafter in drafters_for(draft, heads).items() if "tree" not in name}
    in_batches = replace(
        config,
        settings=("greedy",),
        policies=("fixed", "measured"),
        batch_sizes=(2,) if short else (8,),
        rounds=1 if short else 2,
    )
    batches = evaluate(target, standard_methods(target, batched, in_batches), prompts, in_batches)["rows"]
    lengths = (128, 256) if short else (128, 256, 512, 1024, 2048, 4096, 8192)
    return {
        "widened": widened,
        "speed": speed,
        "batches": batches,
        "context": context_curve(target, lengths, 5 if short else 15),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    for name, part in report["targets"].items():
        console.print(f"\n{name}\n\n{markdown_table(part['speed'])}\n", markup=False, highlight=False, soft_wrap=True)
        table = Table("batch", "method", "tokens/s", "over plain", "over transformers", "same as plain", title=name)
        for row in part["batches"]:
            same = row["identical_to_plain"]
            table.add_row(
                str(row["batch_size"]),
                row["method"],
                number(row["tokens_per_second"]["value"], 0),
                f"{number(row['speedup']['median'])}×",
                f"{number(row['speedup_over_transformers']['median'])}×",
                f"{same['identical']}/{same['of']}",
            )
        console.print(table)
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", help="folder of a draft of it")
    parser.add_argument("--heads", help="folder of Medusa heads on it")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--prompt-field")
    parser.add_argument("--limit", type=int, default=12, help="prompts to decode")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="how often each method decodes each prompt")
    parser.add_argument("--widen", type=float, default=150e6, help="parameters to widen to; 0 for not at all")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--short", action="store_true", help="a run of a minute, to see that everything works")
    options = parser.parse_args(arguments)

    model = load_model(options.target, parse_dtype(options.dtype))
    tokenizer = load_tokenizer(options.target)
    target = CausalLM(model)
    draft = load_draft(options.draft, target, tokenizer) if options.draft else None
    heads = load_heads(options.heads, target) if options.heads else None
    prompts = read_prompts(options.prompts, tokenizer, 2 if options.short else options.limit, options.prompt_field)
    eos = eos_token_ids(model, tokenizer)
    console = standard_output(width=150)
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "targets": {}}
    name = Path(options.target).name
    report["targets"][name] = measure(target, draft, heads, prompts, eos, options, None)
    if options.widen:
        wide, stand_in = widened_to(model, int(options.widen))
        wide_heads = widened_heads(heads, stand_in["width"]) if heads else None
        wide_name = f"{name}, widened to {stand_in['parameters'] / 1e6:.0f}M"
        report["targets"][wide_name] = measure(CausalLM(wide), draft, wide_heads, prompts, eos, options, stand_in)
    report["goals"] = goals(report)
    show(report, console)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
