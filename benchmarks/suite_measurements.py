"""What the suite measures: speeds of every way to decode in turns, launches of a step, and training."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from suite_models import DRAFT_TOKENS, Stage
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Generation
from decoding.measure.methods import transformers_generate
from decoding.metrics import acceptance, spread
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from trainer.data.batch import Batch, Example, collate
from trainer.drafts.distill import DistillObjective, OnlineTeacher
from trainer.drafts.start import initial_draft
from trainer.heads.medusa import MedusaObjective
from trainer.learning.objective import Objective
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftSection, FromTargetSection, InitSection
from trainer.recipe.heads import HeadsSection
from trainer.run.distributed import build_optimizers
from trainer.run.feed import send
from trainer.target.hidden import OnlineTarget

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
            sum(text.decode_tokens for text in texts),
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


# --- launches ---------------------------------------------------------------------------------------------------------

_LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
_KINDS = {
    **dict.fromkeys(_LAUNCHES, "kernel launches"),
    "cudaGraphLaunch": "graph launches",
    "cudaMemcpyAsync": "copies",
    "cudaStreamSynchronize": "waits",
    "cudaDeviceSynchronize": "waits",
    "cudaEventSynchronize": "waits",
}
_TOP = 12


def profile_steps(
    stage: Stage, method: str, static: str | None, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """Calls per step of the loop by kind, and the kernels that take most time (on a CPU: the operators)."""
    on_gpu = torch.cuda.is_available()
    target, drafter, config = stage.target(static), stage.drafter(method, static), DecodingConfig(new_tokens)
    for _ in Engine(target, drafter).steps(prompts, config, batch_size=len(prompts)):  # records the graphs
        pass
    steps = Engine(target, drafter).steps(prompts, config, batch_size=len(prompts))
    for _ in prompts:  # the prefill, which is another matter
        next(steps)
    synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    passes: Counter[int] = Counter()
    with profile(activities=activities) as profiler:
        for place, _ in steps:
            passes[place] += 1
        synchronize()
    count = max(passes.values())
    events = profiler.key_averages()
    calls: Counter[str] = Counter()
    for event in events:
        kind = _KINDS.get(event.key) if on_gpu else ("operators" if event.key.startswith("aten::") else None)
        if kind:
            calls[kind] += event.count
    return {
        "method": method,
        "mode": static or EAGER,
        "batch": len(prompts),
        "steps": count,
        "per_step": {kind: total / count for kind, total in sorted(calls.items())},
        "top": _top(events, count, on_gpu),
    }


def _top(events: Sequence[Any], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    def own_time(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    # On a GPU the kernels alone: the operators that launched them claim their time a second time.
    place = DeviceType.CUDA if on_gpu else DeviceType.CPU
    timed = [event for event in events if event.device_type == place and own_time(event) > 0]
    total = sum(map(own_time, timed)) or 1.0
    return [
        {
            "name": event.key[:100],
            "calls_per_step": event.count / steps,
            "microseconds_per_step": own_time(event) / steps,
            "share": own_time(event) / total,
        }
        for event in sorted(timed, key=own_time, reverse=True)[:_TOP]
    ]


# --- training ---------------------------------------------------------------------------------------------------------


def objective_for(kind: str, stage: Stage, steps: int) -> Objective:
    """Medusa heads, or a draft made of the target's first layer."""
    target = CausalLM(stage.model)
    if kind == "medusa":
        return MedusaObjective(OnlineTarget(target), HeadsSection(num_heads=4), steps, target.dtype)
    # The tokenizer is only written beside what is saved, and nothing is.
    no_tokenizer: Any = None
    start = InitSection(from_target=FromTargetSection())  # in words: where pydantic is missing, nothing fills them in
    section = DraftSection(init=start)
    initial = initial_draft(target, no_tokenizer, section, ())
    return DistillObjective(target, OnlineTeacher(target), no_tokenizer, initial, section)


def measure_training(
    kind: str, stage: Stage, examples: Sequence[Example], batch_size: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Tokens per second of whole optimizer steps, median, and the most memory held, weights included."""
    began = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    objective = objective_for(kind, stage, steps)
    device = stage.model.device
    section = TrainingSection(steps=steps, batch_size=batch_size, micro_batch_size=batch_size)
    optimizers = build_optimizers(objective.module, section)
    samples: list[tuple[int, float]] = []
    losses = []
    for step in range(steps + 2):
        chosen = [examples[(step * batch_size + index) % len(examples)] for index in range(batch_size)]
        on_host = collate(chosen)
        ahead, tokens = objective.ahead(on_host, step), int(on_host.attention_mask.sum())
        batch, ahead = send((on_host, ahead), device)
        synchronize()
        begin = time.perf_counter()
        losses.append(_train_step(objective, batch, ahead, step, optimizers, section))
        synchronize()
        samples.append((tokens, time.perf_counter() - begin))
        if len(samples) >= 4 and time.perf_counter() - began > seconds:
            break
    trained = sum(parameter.numel() for parameter in objective.module.parameters() if parameter.requires_grad)
    return {
        "kind": kind,
        "target_parameters": stage.parameters,
        "trained_parameters": trained,
        "batch_size": batch_size,
        "tokens_per_step": samples[-1][0],
        "steps": len(samples) - 2,
        "tokens_per_second": median(tokens / seconds for tokens, seconds in samples[2:]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _train_step(
    objective: Objective,
    batch: Batch,
    ahead: Any,
    step: int,
    optimizers: Sequence[torch.optim.Optimizer],
    section: TrainingSection,
) -> float:
    """Do a step as `trainer.run.loop` does in one process, without accelerate; return the loss before the step."""
    counts: Tensor = objective.counts(batch, step)
    weights = torch.tensor(objective.weights(step), device=counts.device)
    inputs = objective.inputs(batch, step, ahead)
    with torch.autocast(counts.device.type, torch.bfloat16):
        losses, _ = objective.module(*inputs)
    loss = (losses * weights / counts.clamp(min=1)).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(objective.module.parameters(), section.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
