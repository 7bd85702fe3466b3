"""Tokens per second of every way to decode, in turns, and how near plain steps come to the memory's bandwidth."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from suite_models import DRAFT_TOKENS, Stage

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Generation
from decoding.measure.baselines import transformers_generate
from decoding.metrics import acceptance, spread
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

PLAIN, DRAFT, MEDUSA = METHODS = ("plain", "draft model", "medusa")
GRAPHS, EAGER, TRANSFORMERS = "graphs", "eager", "transformers"
ASSISTED = f"assisted generation, {DRAFT_TOKENS} tokens"
Prompts = Sequence[Sequence[int]]


class Timed(NamedTuple):
    """A batch decoded once. The decode figures leave out the prefill and the tokens that come with it."""

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    generations: tuple[Generation, ...] = ()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bandwidth(bytes_each: int, device: torch.device, repeats: int = 10) -> float:
    """Bytes per second, read and written, of a copy from the device's memory to itself."""
    source = torch.ones(bytes_each, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 2):
        synchronize()
        begin = time.perf_counter()
        destination.copy_(source)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * bytes_each / median(seconds[2:])


def _ours(stage: Stage, method: str, static: str | None, config: DecodingConfig) -> Callable[[Prompts], Timed]:
    target, drafter = stage.target(static), stage.drafter(method, static)

    def run(prompts: Prompts) -> Timed:
        begin = time.perf_counter()
        generations = tuple(Engine(target, drafter).decode(prompts, config, batch_size=len(prompts)))
        seconds = time.perf_counter() - begin
        steps = [step for generation in generations for step in generation.steps if not step.is_prefill]
        return Timed(
            tuple(generation.tokens for generation in generations),
            seconds,
            sum(len(step.tokens) for step in steps),
            sum(step.total_seconds for step in steps),
            generations,
        )

    return run


def _theirs(target: CausalLM, config: DecodingConfig) -> Callable[[Prompts], Timed]:
    """`transformers` generate; its prefill is timed by a run that writes one token."""
    first = DecodingConfig(1, config.sampling)

    def run(prompts: Prompts) -> Timed:
        begin = time.perf_counter()
        transformers_generate(target, prompts, first)
        synchronize()
        prefilled = time.perf_counter()
        texts = tuple(text.tokens for text in transformers_generate(target, prompts, config))
        synchronize()
        seconds, prefill = time.perf_counter() - prefilled, prefilled - begin
        return Timed(texts, seconds, sum(map(len, texts)) - len(texts), max(seconds - prefill, 1e-9))

    return run


def _assisted(target: CausalLM, draft: CausalLM, config: DecodingConfig) -> Callable[[Prompts], Timed]:
    def run(prompts: Prompts) -> Timed:
        begin = time.perf_counter()
        texts = [transformers_generate(target, [prompt], config, draft, DRAFT_TOKENS)[0] for prompt in prompts]
        return Timed(
            tuple(text.tokens for text in texts),
            time.perf_counter() - begin,
            sum(len(text.tokens) - text.first_tokens for text in texts),
            sum(text.decode_seconds for text in texts),
        )

    return run


def group_methods(
    stage: Stage, sampling: SamplingConfig, batch: int, new_tokens: int
) -> dict[tuple[str, str], Callable[[Prompts], Timed]]:
    """Everything that takes turns in one group, by (method, mode)."""
    config = DecodingConfig(new_tokens, sampling)
    methods = {(name, GRAPHS): _ours(stage, name, GRAPHS, config) for name in METHODS}
    eager = stage.target(None)
    methods["generate", TRANSFORMERS] = _theirs(eager, config)
    if batch == 1:
        methods |= {(name, EAGER): _ours(stage, name, None, config) for name in METHODS}
        if stage.draft.vocab_size == eager.vocab_size and stage.draft.output_tokens is None:
            methods[ASSISTED, TRANSFORMERS] = _assisted(eager, stage.draft, config)
    return methods


def measure_group(
    stage: Stage,
    prompts: Prompts,
    temperature: float,
    batch: int,
    new_tokens: int,
    rounds: int,
    bandwidth: float | None,
    seconds: float,
) -> dict[str, Any]:
    """One setting and batch size: every method in turns, one round at least, more while there is time."""
    begin = time.perf_counter()
    methods, brief = (group_methods(stage, SamplingConfig(temperature), batch, n) for n in (new_tokens, 4))
    mine = [prompts[index % len(prompts)] for index in range(batch)]
    for key in methods:  # all graphs are recorded here; the rest is warm at once, and slow
        (methods if key[1] == GRAPHS else brief)[key](mine)
    warmed_up = time.perf_counter()
    runs: dict[tuple[str, str], list[Timed]] = {key: [] for key in methods}
    for turn in range(rounds):
        shift = turn % len(methods)
        order = list(methods)
        for key in (*order[shift:], *order[:shift]):
            runs[key].append(methods[key](mine))
        now = time.perf_counter()
        if now + (now - warmed_up) / (turn + 1) > begin + seconds:
            break
    prompt_tokens = sum(map(len, mine)) / len(mine)
    rows = [_row(key, runs, greedy=temperature == 0) for key in methods]
    for row, key in zip(rows, methods, strict=True):
        if key[0] == PLAIN and bandwidth:
            row["bandwidth"] = bandwidth_share(stage, runs[key], prompt_tokens, bandwidth)
    return {"batch": batch, "temperature": temperature, "new_tokens": new_tokens, "rounds": turn + 1, "rows": rows}


def _row(key: tuple[str, str], runs: dict[tuple[str, str], list[Timed]], greedy: bool) -> dict[str, Any]:
    mine = runs[key]
    row: dict[str, Any] = {
        "method": key[0],
        "mode": key[1],
        "tokens_per_second": spread([timed.decode_tokens / timed.decode_seconds for timed in mine])._asdict(),
        "tokens_per_second_with_prefill": median(sum(map(len, timed.texts)) / timed.seconds for timed in mine),
    }
    for name, other in (("over_plain", (PLAIN, GRAPHS)), ("over_transformers", ("generate", TRANSFORMERS))):
        ratios = [_speed(a) / _speed(b) for a, b in zip(mine, runs[other], strict=True)]
        row[name] = spread(ratios)._asdict()
    plain = runs[PLAIN, GRAPHS][0].texts
    same = sum(a == b for a, b in zip(mine[0].texts, plain, strict=True))
    row["same_as_plain"] = f"{same}/{len(plain)}" if greedy else None
    if mine[0].generations:
        row |= _figures(mine)
    return row


def _speed(timed: Timed) -> float:
    return timed.decode_tokens / timed.decode_seconds


def _figures(mine: Sequence[Timed]) -> dict[str, Any]:
    """Tokens per pass, and where the time goes: drafting, the target's pass, the rest (our own loop)."""
    texts = [[step for step in text.steps if not step.is_prefill] for timed in mine for text in timed.generations]
    steps = [step for text in texts for step in text]
    total = sum(step.total_seconds for step in steps)
    draft, verify = sum(step.draft_seconds for step in steps), sum(step.verify_seconds for step in steps)
    split = {"draft": draft / total, "verify": verify / total, "overhead": (total - draft - verify) / total}
    return {
        "tokens_per_pass": acceptance([[step.counts for step in text] for text in texts]).tokens_per_pass.value,
        "time_split": split,
    }


def bandwidth_share(
    stage: Stage, mine: Sequence[Timed], prompt_tokens: float, bandwidth: float
) -> dict[str, float | int]:
    """Return (bytes a plain pass must read / copy bandwidth) / its seconds: 1 is as fast as memory allows.

    Bytes: every weight once, and the cached keys and values of all rows at the mean length. Seconds: of the target's
    pass, and of the whole step as the loop takes it.
    """
    rows, passes = len(mine[0].generations), max(len(text.steps) for text in mine[0].generations) - 1
    positions = round(rows * (prompt_tokens + passes / 2))
    needed = stage.weight_bytes() + stage.cache_bytes(positions)
    steps = [[step for text in timed.generations for step in text.steps if not step.is_prefill] for timed in mine]
    in_pass = median(sum(step.verify_seconds for step in of_run) for of_run in steps) / passes
    in_step = median(sum(step.total_seconds for step in of_run) for of_run in steps) / passes
    return {
        "bytes_per_pass": needed,
        "pass_seconds": in_pass,
        "step_seconds": in_step,
        "share_of_pass": needed / bandwidth / in_pass,
        "share_of_step": needed / bandwidth / in_step,
    }
