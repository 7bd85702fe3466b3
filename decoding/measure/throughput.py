"""Throughput in batches: tokens per second of this loop and of `transformers`' batched generate, measured in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from decoding.drafters.base import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.baselines import transformers_generate_batch
from decoding.measure.evaluate import PLAIN, TRANSFORMERS
from decoding.metrics import acceptance, spread
from decoding.model.causal_lm import CausalLM
from decoding.policies import named_policy


class Timed(NamedTuple):
    """All prompts decoded once. ``seconds`` include the prefill, as new prompts are prefilled while others decode."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    tokens_per_pass: float | None


def _ours(
    target: CausalLM, drafter: Drafter | None, policy: str, config: DecodingConfig, batch_size: int
) -> Callable[[Sequence[Sequence[int]]], Timed]:
    chosen = named_policy(policy)  # one policy for all rounds, so that it keeps adapting

    def run(prompts: Sequence[Sequence[int]]) -> Timed:
        begin = time.perf_counter()
        generations = Engine(target, drafter, chosen).decode(prompts, config, batch_size=batch_size)
        seconds = time.perf_counter() - begin
        figures = acceptance([[step.counts for step in generation.steps[1:]] for generation in generations])
        return Timed(tuple(generation.tokens for generation in generations), seconds, figures.tokens_per_pass.value)

    return run


def _theirs(target: CausalLM, config: DecodingConfig, batch_size: int) -> Callable[[Sequence[Sequence[int]]], Timed]:
    def run(prompts: Sequence[Sequence[int]]) -> Timed:
        begin = time.perf_counter()
        texts: list[tuple[int, ...]] = []
        for first in range(0, len(prompts), batch_size):
            texts += transformers_generate_batch(target, prompts[first : first + batch_size], config)
        return Timed(tuple(texts), time.perf_counter() - begin, None)

    return run


def measure_throughput(
    target: CausalLM,
    drafters: dict[str, Drafter],
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_sizes: Sequence[int] = (1, 8),
    rounds: int = 3,
    policies: Sequence[str] = ("fixed", "measured"),
) -> list[dict[str, Any]]:
    """Measure every method at every batch size; return a row of JSON values for each.

    A row holds tokens per second, and its paired ratios to plain decoding and to transformers' generate. It carries the
    label lossless or lossy; greedy rows also count the texts identical to plain decoding's. All methods take the
    prompts longest first, which keeps transformers' padding smallest.
    """
    if not prompts:
        raise ValueError("there are no prompts to decode: give at least one")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: give at least 1")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {list(batch_sizes)}: give at least one, each of at least 1")
    prompts = sorted(prompts, key=len, reverse=True)
    rows: list[dict[str, Any]] = []
    for batch_size in batch_sizes:
        methods = {PLAIN: _ours(target, None, "fixed", replace(config, rule=None), batch_size)}
        methods[TRANSFORMERS] = _theirs(target, config, batch_size)
        for name, drafter in drafters.items():
            for policy in policies:
                methods[f"{name}, {policy}"] = _ours(target, drafter, policy, config, batch_size)
        runs: dict[str, list[Timed]] = {name: [] for name in methods}
        for turn in range(rounds + 1):  # the first is the warm-up
            names = list(methods)
            shift = turn % len(names)
            for name in (*names[shift:], *names[:shift]):
                timed = methods[name](prompts)
                if turn:
                    runs[name].append(timed)
        rows += [_row(batch_size, name, runs, config) for name in methods]
    return rows


def _row(batch_size: int, name: str, runs: dict[str, list[Timed]], config: DecodingConfig) -> dict[str, Any]:
    def speed(timed: Timed) -> float:
        return sum(map(len, timed.tokens)) / timed.seconds

    mine = runs[name]
    ratios = {
        other: spread([speed(a) / speed(b) for a, b in zip(mine, runs[other], strict=True)])._asdict()
        for other in (PLAIN, TRANSFORMERS)
    }
    row = {
        "batch_size": batch_size,
        "method": name,
        "label": "lossless" if name in ratios else config.label,
        "tokens_per_second": spread([speed(timed) for timed in mine])._asdict(),
        "tokens_per_pass": mine[-1].tokens_per_pass,
        "speedup": ratios[PLAIN],
        "speedup_over_transformers": ratios[TRANSFORMERS],
    }
    if config.sampling.greedy:  # sampled texts keep their distribution, not their tokens
        same = sum(a == b for a, b in zip(mine[0].tokens, runs[PLAIN][0].tokens, strict=True))
        row["identical_to_plain"] = {"identical": same, "of": len(mine[0].tokens)}
    return row
