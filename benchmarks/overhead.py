"""Time in neither model's forward, in batches: the split of a step's time for every drafter, greedy and sampled.

The target is widened (`widen.py`), so that a forward costs what a larger model's does while the
acceptance is the small one's. Methods take turns. `overhead` is the evaluation's: a step's time without drafting and
without the target's pass. `outside` is stricter: all time in which no forward of target, draft or heads runs.

    python benchmarks/overhead.py --target FOLDER --draft FOLDER --heads FOLDER --prompts FILE.jsonl --batch 8 32
"""

# ruff: noqa: E402  # idle threads are told to sleep before torch is imported
import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from widen import widened_heads, widened_to

import decoding.clock
from decoding.drafters import Drafter, MedusaDrafter
from decoding.drafters.registry import named_drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import parse_dtype
from decoding.model.heads import MedusaHeads
from decoding.model.loading import load_draft, load_heads, load_model, load_tokenizer
from decoding.model.stacked_heads import StackedHeads
from decoding.rules.sampling import SamplingConfig
from trainer.terminal.console import standard_output

GOAL = 0.04


@dataclass
class Split:
    """Seconds of the decoding steps of one method, prefills excluded."""

    temperature: float
    batch: int
    method: str
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    """Seconds of the steps, by the evaluation's clock."""
    whole: float = 0.0
    """Seconds between the first step and the last, the time between two steps included."""
    forwards: float = 0.0
    """Seconds in forwards of target, draft and heads."""
    passes: int = 0
    tokens: int = 0

    @property
    def overhead(self) -> float:
        return 1 - (self.draft + self.verify) / self.total

    @property
    def outside(self) -> float:
        return 1 - self.forwards / self.whole


@dataclass
class Stopwatch:
    """Time spent in forwards; those within another count once."""

    now: Callable[[], float]
    seconds: float = 0.0
    depth: int = 0
    begin: float = 0.0
    handles: list[Any] = field(default_factory=list)

    def enter(self, *_: object) -> None:
        if self.depth == 0:
            self.begin = self.now()
        self.depth += 1

    def leave(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds += self.now() - self.begin

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Count the forwards of ``model`` until the stack is left."""
        for handle in (model.register_forward_pre_hook(self.enter), model.register_forward_hook(self.leave)):
            stack.callback(handle.remove)


@contextmanager
def heads_watched(watch: Stopwatch) -> Iterator[None]:
    """Count the stacked heads' forwards too, which are no module's."""
    plain = StackedHeads.__call__

    def counted(self: StackedHeads, *arguments: Any) -> torch.Tensor:
        watch.enter()
        logits = plain(self, *arguments)
        watch.leave()
        return logits

    StackedHeads.__call__ = counted  # type: ignore[method-assign]  # undone below
    try:
        yield
    finally:
        StackedHeads.__call__ = plain  # type: ignore[method-assign]


def drafters_for(draft: CausalLM | None, heads: MedusaHeads | None) -> dict[str, Drafter | None]:
    """Make plain decoding, the lookup, and every way to draft with the weights that are given."""
    drafters: dict[str, Drafter | None] = {"plain": None, "lookup": named_drafter("lookup")}
    if draft is not None:
        drafters["draft chain"] = named_drafter("draft", draft)
        drafters["draft tree"] = named_drafter("draft-tree", draft, depth=6, width=3, nodes=16)
        drafters["draft and lookup"] = named_drafter("hybrid", draft, of="draft", lookup_tokens=8)
    if heads is not None:
        for sampled in (True, False):
            drafter = MedusaDrafter(heads, sampled=sampled)
            drafters[drafter.label] = drafter
    return drafters


def measured(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    decoding_config: DecodingConfig,
    watch: Stopwatch,
    split: Split,
) -> None:
    """Decode the prompts at once and add the seconds of every step to ``split``."""
    prefills = 0
    begin = 0.0
    for _, step in Engine(target, drafter).steps(prompts, decoding_config, batch_size=len(prompts)):
        if step.is_prefill:
            prefills += 1
            assert prefills <= len(prompts), "a text ended before the others: give no end of text"
            begin, watch.seconds = watch.now(), 0.0
            continue
        split.draft += step.draft_seconds
        split.verify += step.verify_seconds
        split.total += step.total_seconds
        split.passes += 1
        split.tokens += len(step.tokens)
    split.whole += watch.now() - begin
    split.forwards += watch.seconds


def table_of(splits: Sequence[Split], name: str) -> Table:
    """Lay out the shares."""
    table = Table(
        "T", "batch", "method", "tokens/pass", "draft", "verify", "overhead", "outside", "ms/step", title=name
    )
    for split in splits:
        table.add_row(
            f"{split.temperature:g}",
            str(split.batch),
            split.method,
            f"{split.tokens / split.passes:.2f}",
            *(f"{share:.1%}" for share in (split.draft / split.total, split.verify / split.total)),
            f"{split.overhead:.2%}{'' if split.overhead <= GOAL else ' !'}",
            f"{split.outside:.2%}",
            f"{1000 * split.batch * split.whole / split.passes:.1f}",
        )
    return table


def splits_of(
    target: CausalLM,
    drafters: dict[str, Drafter | None],
    drafts: Sequence[CausalLM],
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
    now: Callable[[], float],
) -> list[Split]:
    """Measure every method at every size and temperature, in turns; the first turn only warms up."""
    watch = Stopwatch(now)
    splits = [
        Split(temperature, batch, name)
        for temperature in options.temperature
        for batch in options.batch
        for name in drafters
    ]
    with ExitStack() as stack:
        for model in (target, *drafts):
            watch.watch(model.model, stack)
        stack.enter_context(heads_watched(watch))
        for turn in range(options.rounds + 1):
            for split in splits:
                chosen = list(islice(cycle(prompts), split.batch))
                tokens = 4 if turn == 0 else options.max_new_tokens
                config = DecodingConfig(tokens, SamplingConfig(split.temperature), seed=turn)
                into = split if turn else Split(split.temperature, split.batch, split.method)
                measured(target, drafters[split.method], chosen, config, watch, into)
    return splits


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", help="folder of a draft of it")
    parser.add_argument("--heads", help="folder of Medusa heads on it")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--prompt-field")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--methods", nargs="+", help="names of the methods to measure (default: all)")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="last tokens of each prompt to begin with")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--widen", type=float, default=150e6, help="parameters to widen to; 0 for not at all")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's CPU time: on a busy machine")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(arguments)

    now = time.process_time if options.cpu_time else time.perf_counter
    decoding.clock.time = SimpleNamespace(perf_counter=now)  # type: ignore[assignment]
    model = load_model(options.target, parse_dtype(options.dtype))
    tokenizer = load_tokenizer(options.target)
    target, name = CausalLM(model), Path(options.target).name
    draft = load_draft(options.draft, target, tokenizer) if options.draft else None
    heads = load_heads(options.heads, target) if options.heads else None
    if options.widen:
        wide, stand_in = widened_to(model, int(options.widen))
        target, name = CausalLM(wide), f"{name}, widened to {stand_in['parameters'] / 1e6:.0f}M"
        heads = widened_heads(heads, stand_in["width"]) if heads else None
    whole = read_prompts(options.prompts, tokenizer, max(options.batch), options.prompt_field)
    prompts = [prompt[-options.prompt_tokens :] for prompt in whole]
    drafters = drafters_for(draft, heads)
    if unknown := [method for method in options.methods or () if method not in drafters]:
        parser.error(f"no method is called {unknown[0]!r}: choose of {', '.join(drafters)}")
    if options.methods:
        drafters = {method: drafters[method] for method in options.methods}
    splits = splits_of(target, drafters, [draft] if draft else [], prompts, options, now)
    console: Console = standard_output(width=150)
    console.print(table_of(splits, name))
    if options.output:
        report = {"hardware": hardware(), "versions": versions(), "commit": commit(), "target": name}
        report["clock"] = "CPU time" if options.cpu_time else "wall time"
        report["splits"] = [asdict(s) | {"overhead": s.overhead, "outside": s.outside} for s in splits]
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
