"""Steps of the GPU suite: functions that yield (name, measurement); a measurement returns JSON values."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT
from types import SimpleNamespace
from typing import Any

import torch
from suite_models import (
    DRAFTED,
    Bench,
    cache_bytes,
    counting_model,
    drafter_of,
    dspark_draft,
    dspark_section,
    free,
    synchronize,
    timed,
    weight_bytes,
)
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import StoppingCriteriaList

from decoding.drafters import Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.machine import hardware, versions
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree
from trainer.data.batch import Example, collate
from trainer.drafts.dspark_training import DSparkObjective
from trainer.heads.medusa1 import MedusaObjective
from trainer.learning.fused import fused_loss
from trainer.learning.losses import LossMix
from trainer.learning.objective import Objective
from trainer.processes import ALONE
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import FeaturesSection, HeadsSection
from trainer.run.distributed import build_optimizers
from trainer.run.loop import send
from trainer.target.features import StoredFeatures, ensure_features
from trainer.target.loading import OnlineTarget, Target

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"
Measurements = Iterator[tuple[str, Callable[[], Any]]]
MODES = {"graphs": "graphs", "no graphs": None}
TEST_SECONDS = 100
_RUN_TESTS = """
import signal, sys
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.alarm({seconds})
sys.path[:0] = [{root!r}, {root!r} + "/tests", {root!r} + "/benchmarks"]
import pytest, torch, transformers
from suite_packages import stand_ins
with stand_ins():
    sys.exit(pytest.main(sys.argv[1:]))
"""


def gpu_tests(bench: Bench) -> Measurements:
    """Run the tests marked ``gpu``, all files at the same time, without the conftest and plugins of the other tests.

    When their time is up, an alarm acts like Ctrl-C: pytest ends with a report of the tests done so far.
    """
    code = _RUN_TESTS.format(root=str(ROOT), seconds=TEST_SECONDS)
    options = [f"--confcutdir={GPU_TESTS}", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "-v", "--tb=short"]
    options += bench.pick([], ["--collect-only"])
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}

    def of_file(path: Path) -> tuple[int | None, str]:
        command, limit = [sys.executable, "-c", code, str(path), *options], TEST_SECONDS + 5
        try:
            done = subprocess.run(command, env=environment, stdout=PIPE, stderr=STDOUT, timeout=limit)
            return done.returncode, done.stdout.decode()
        except subprocess.TimeoutExpired as error:  # if the GPU does not answer, the alarm has no effect
            return None, (error.stdout or b"").decode()

    def run() -> dict[str, Any]:
        import pytest  # noqa: F401  # may be missing

        with ThreadPoolExecutor() as pool:
            codes, outputs = zip(*pool.map(of_file, sorted(GPU_TESTS.glob("test_*.py"))), strict=True)
        output = "".join(outputs)
        counts = {each: len(re.findall(rf"::\S+ {each.upper()}\b", output)) for each in ("passed", "failed", "skipped")}
        return {**counts, "exit_codes": codes, "output": [each[-8000:] for each in outputs]}

    yield "tests/gpu", run


def machine(bench: Bench) -> Measurements:
    """Measure the machine: its copy bandwidth, and its rate of matrix products in the models' dtype."""
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    yield "machine", lambda: {**hardware(), **versions(), **cuda, "attention": str(torch._C._get_sdp_priority_order())}

    def usual(run: Callable[[], Any]) -> float:
        return median([timed(run)[0] for _ in range(12)][2:])

    def copy() -> dict[str, float]:
        source = torch.ones(bench.pick(1 << 31, 1 << 22), dtype=torch.uint8, device=bench.device)
        destination = torch.empty_like(source)
        return {"bytes_per_second": 2 * len(source) / usual(lambda: destination.copy_(source))}

    def product() -> dict[str, float]:
        size = bench.pick(8192, 256)
        matrix = torch.randn(size, size, device=bench.device, dtype=bench.dtype)
        return {"flop_per_second": 2 * size**3 / usual(lambda: matrix @ matrix)}

    yield "copy", copy
    yield "product", product


# --- decoding ---------------------------------------------------------------------------------------------------------


def _cells(bench: Bench) -> Sequence[tuple[int, int]]:
    """Return pairs of context and batch. 32 texts of 8k tokens would take a minute and fill the memory."""
    return bench.pick([(512, 1), (512, 8), (512, 32), (8192, 1), (8192, 8)], [(12, 1), (12, 2)])


def _ours(target: CausalLM, drafter: Drafter | None, prompts: list[Any], config: DecodingConfig) -> dict[str, Any]:
    """Decode twice, because the first time records the graphs; return figures without prefill."""
    engine = Engine(target, drafter)
    for _ in range(2):
        texts = list(engine.decode(prompts, config, batch_size=len(prompts)))
    steps = [[step for step in text.steps if not step.is_prefill] for text in texts]
    every = [step for of_text in steps for step in of_text]
    total, draft, verify = (
        sum(getattr(step, f"{part}_seconds") for step in every) for part in ("total", "draft", "verify")
    )
    figures = acceptance([[step.counts for step in of_text] for of_text in steps])
    vocab = target.vocab_size
    counted = sum(
        (token - text.tokens[0] - index) % vocab == 0 for text in texts for index, token in enumerate(text.tokens)
    )
    return {
        "tokens_per_second": sum(len(step.tokens) for step in every) / total,
        "tokens_per_pass": figures.tokens_per_pass.value,
        "step_ms": 1000 * total / max(map(len, steps)),
        "draft_share": draft / total,
        "verify_share": verify / total,
        "right_tokens": counted / sum(len(text.tokens) for text in texts),
    }


class _Clock:
    """A stopping criterion that never stops, but records when transformers' generate has each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _theirs(model: Any, prompts: Sequence[Sequence[int]], new: int, static: bool = False) -> dict[str, Any]:
    """Time transformers' generate without its first token; on a GPU transformers compiles for a ``static`` cache."""
    ids = torch.tensor(prompts, device=model.device)
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    for _ in range(3 if static else 2):
        clock = _Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),  # type: ignore[list-item]  # it is only called
            **options,
        )
    step = (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)
    return {"tokens_per_second": len(prompts) / step, "step_ms": 1000 * step}


def _against_memory(bench: Bench, found: dict[str, Any], bytes_read: float, tokens: float) -> dict[str, Any]:
    """Add the ideal time of a step that reads ``bytes_read`` bytes for ``tokens`` tokens, and the share we reach."""
    if bench.bandwidth is None:
        return found
    ideal = bytes_read / bench.bandwidth
    return {**found, "ideal_step_ms": 1000 * ideal, "share_of_ideal": found["tokens_per_second"] * ideal / tokens}


def decoding(bench: Bench, size: str, compiled: bool = False) -> Measurements:
    """Measure plain decoding in our loop and in transformers, by context and batch.

    If ``compiled`` is True, measure only transformers with a static cache, and only in the first cell.
    """
    model, new = counting_model(bench, size), bench.pick(48, 3)
    for context, batch in _cells(bench)[: 1 if compiled else None]:
        prompts = [bench.text(context, row) for row in range(batch)]
        read = weight_bytes(model) + batch * cache_bytes(model, context + new / 2)

        def ours(static: str | None, prompts: list[Any] = prompts) -> dict[str, Any]:
            return _ours(CausalLM(model, static=static), None, prompts, DecodingConfig(new))

        def measured(run: Callable[[], dict[str, Any]], read: float = read, batch: int = batch) -> Any:
            return _against_memory(bench, run(), read, batch)

        theirs = partial(_theirs, model, prompts, new)
        plain = {**{name: partial(ours, static) for name, static in MODES.items()}, "transformers": theirs}
        for name, run in ({"compiled": partial(theirs, static=True)} if compiled else plain).items():
            yield f"context {context}, batch {batch}, {name}", partial(measured, run)
            free()


def compiled(bench: Bench, size: str) -> Measurements:
    """Measure plain decoding with graphs of norms and MLPs that torch.compile has fused, and compiled transformers."""
    yield from _compiled_layers(bench, size)
    free()
    yield from decoding(bench, size, compiled=True)


def _compiled_layers(bench: Bench, size: str) -> Measurements:
    model, new, (context, batch) = counting_model(bench, size), bench.pick(48, 3), _cells(bench)[0]
    for layer in model.model.layers:  # the whole layer would be compiled anew for each of 32 numbers of layers
        for part in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
            part.compile(dynamic=False, fullgraph=True, backend=bench.pick("inductor", "eager"))
    read = weight_bytes(model) + batch * cache_bytes(model, context + new / 2)

    def run() -> Any:
        found = _ours(CausalLM(model, static="graphs"), None, [bench.text(context, 0)], DecodingConfig(new))
        return _against_memory(bench, found, read, batch)

    yield f"context {context}, batch {batch}, graphs of compiled norms and MLPs", run


def kernels(bench: Bench, size: str) -> Measurements:
    """List the kernels of a plain step and of a pass over `DRAFTED` + 1 tokens, the longest first."""
    context, passes = _cells(bench)[0][0], 4
    target = CausalLM(counting_model(bench, size), static="graphs")
    cache = target.new_cache(2 * context)
    target.prefill([bench.text(context, 0)], cache)

    def run(nodes: int) -> dict[str, Any]:
        tree = TokenTree.chain(range(nodes))

        def steps() -> None:
            for _ in range(passes):
                target.verify([tree], cache)
                cache.truncate(0, context)

        timed(steps)  # records the graph
        seconds, _ = timed(steps)
        with profile(activities=[ProfilerActivity.CPU, *bench.pick([ProfilerActivity.CUDA], [])]) as profiled:
            timed(steps)
        spent = bench.pick("self_device_time_total", "self_cpu_time_total")  # in microseconds
        # Outside the graph the host's operators have times of their own for the same kernels.
        kind = bench.pick(DeviceType.CUDA, DeviceType.CPU)
        events = [event for event in profiled.key_averages() if event.device_type == kind]
        rows = [(getattr(event, spent) / passes, event.count / passes, event.key) for event in events]
        rows = sorted((row for row in rows if row[0]), reverse=True)
        busy, count = sum(row[0] for row in rows) / 1000, sum(row[1] for row in rows)
        longest = [f"{micros:.1f} us, {calls:g} x {name[:100]}" for micros, calls, name in rows[:30]]
        return {"ms": 1000 * seconds / passes, "busy_ms": busy, "kernels": count, "output": longest}

    for nodes in (1, 1 + DRAFTED):
        yield f"{nodes} tokens, context {context}", partial(run, nodes)


def verification(bench: Bench, size: str) -> Measurements:
    """Measure a pass over 1 to 64 nodes, by context and batch."""
    model, sizes = counting_model(bench, size), bench.pick((1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 4))
    for context, batch in [cell for cell in _cells(bench) if cell[1] <= 8]:

        def run(context: int = context, batch: int = batch) -> Any:
            target = CausalLM(model, static="graphs")
            costs = measure_costs(target, sizes, prefix=context, rows=batch, repeats=bench.pick(15, 3))
            read = weight_bytes(model) + batch * cache_bytes(model, context)
            free()
            return {
                f"{nodes} nodes": _against_memory(bench, {"tokens_per_second": 1 / each, "ms": 1000 * each}, read, 1)
                for nodes, each in costs.items()
            }

        yield f"context {context}, batch {batch}", run


def speculation(bench: Bench, size: str) -> Measurements:
    """Measure the loop's share of the ideal speed (tokens per pass × memory's speed), at forced acceptance, batch 1."""
    model, new, context = counting_model(bench, size), bench.pick(192, 8), _cells(bench)[0][0]
    warm = bench.pick(1.0, 0.01)  # the model still counts: the next token's logit is far above all others
    settings = ((0.8, "graphs", 0.0), (0.8, "no graphs", 0.0), (0.6, "graphs", 0.0))
    cells = [(kind, *each) for kind in ("chain", "medusa", "dspark") for each in settings]
    for kind, share, name, temperature in [*cells, ("chain", 0.8, "graphs", warm)]:

        def run(
            kind: str = kind, share: float = share, static: str | None = MODES[name], t: float = temperature
        ) -> Any:
            target = CausalLM(model, static=static)
            drafter: Any = drafter_of(bench, kind, target, size, share, static)
            found = _ours(target, drafter, [bench.text(context, 7)], DecodingConfig(new, SamplingConfig(t)))
            read = weight_bytes(model) + cache_bytes(model, context + new / 2)
            head = model.get_output_embeddings().weight.nbytes
            if kind == "chain":
                read += DRAFTED * weight_bytes(drafter.draft.model)
            else:  # a DSpark draft also reads the target's lm_head
                read += weight_bytes(drafter.heads) if kind == "medusa" else weight_bytes(drafter.draft) + head
            return _against_memory(bench, found, read, found["tokens_per_pass"])

        yield f"{kind} of {DRAFTED}, acceptance {share} forced, {name}{', sampled' if temperature else ''}", run
        free()


# --- training ---------------------------------------------------------------------------------------------------------

_DRY_RUN_STEPS = 4
"""Steps after which `headstart train --dry-run` reads the memory."""


def training(bench: Bench, size: str, kind: str) -> Measurements:
    """Measure training steps of 32 sequences of 1,024 tokens, 4 at a time; measure heads with stored states, too."""
    target = CausalLM(counting_model(bench, size))
    batch, micro, length = bench.pick((32, 4, 1024), (4, 2, 32))
    examples = [Example(bench.text(length, row), (True,) * length, 0) for row in range(2 * batch)]
    no_tokenizer: Any = SimpleNamespace(eos_token_id=None, get_vocab=lambda: {"mask": target.vocab_size - 1})

    def of_heads(states: Any) -> Objective:
        with bench.device:  # a CPU makes 2 billion random weights slowly
            return MedusaObjective(states, HeadsSection(num_heads=4), 100, target.dtype)

    def online() -> dict[str, Any]:
        if kind == "heads":
            return _train(bench, of_heads(OnlineTarget(target)), examples, batch, micro)
        section = dspark_section(target)
        objective = DSparkObjective(target, no_tokenizer, dspark_draft(target), section, 0)
        return _train(bench, objective, examples, batch, micro)

    def stored() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            whole = Target("", target.dtype, "made up", no_tokenizer, target)
            begin = time.perf_counter()
            section = FeaturesSection(folder=folder, states="target", shard_tokens=1 << 18)
            store = ensure_features(whole, examples, section, ALONE)
            writing = time.perf_counter() - begin
            states = StoredFeatures(store, target.model.config, bench.device)
            return {**_train(bench, of_heads(states), examples, batch, micro), "writing_seconds": writing}

    yield f"{kind}, the target runs at every step", online
    free()
    if kind == "heads":
        yield "heads, states from the disk", stored


def _train(
    bench: Bench, objective: Objective, examples: Sequence[Example], batch_size: int, micro: int
) -> dict[str, Any]:
    """Time whole optimizer steps like `trainer.run.loop` in one process, without accelerate."""
    section = TrainingSection(steps=100, batch_size=batch_size, micro_batch_size=micro)
    optimizers = build_optimizers(objective.module, section)
    seconds, losses, memory, tokens = list[float](), list[float](), list[int](), 0
    if not bench.pretend:
        torch.cuda.reset_peak_memory_stats()

    def step(index: int) -> float:
        parts = []
        for begin in range(0, batch_size, micro):
            indices = [(index * batch_size + begin + i) % len(examples) for i in range(micro)]
            host = collate([examples[i] for i in indices], indices)
            counts = objective.counts(host, index) * (batch_size // micro)
            batch, prefetched, counts = send((host, objective.prefetch(host, index), counts), bench.device)
            inputs = objective.inputs(batch, index, prefetched)
            with torch.autocast(bench.device.type, torch.bfloat16):
                weights = torch.tensor(objective.weights(index)).to(counts.device, non_blocking=True)
                loss = objective.module(*inputs, weights / counts.clamp(min=1)).total
            loss.backward()
            parts.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(objective.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(torch.stack(parts).sum())

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: _flop_of_sum}) as counter:
        losses.append(step(0))
    began = time.perf_counter()
    for index in range(1, bench.pick(8, 4)):
        took, loss = timed(partial(step, index))
        losses.append(loss)
        seconds.append(took)
        memory.append(0 if bench.pretend else torch.cuda.max_memory_allocated())
        if index >= _DRY_RUN_STEPS and time.perf_counter() - began > 15:
            break
    tokens, usual = sum(len(examples[i].tokens) for i in range(batch_size)), median(seconds[1:])
    flop = counter.get_total_flops()
    return {
        "tokens_per_second": tokens / usual,
        "flop_per_step": flop,
        "share_of_peak": None if bench.peak is None else flop / usual / bench.peak,
        "trained_parameters": sum(each.numel() for each in objective.module.parameters() if each.requires_grad),
        "memory_of_a_dry_run": memory[min(_DRY_RUN_STEPS, len(memory)) - 1],
        "memory_at_the_end": memory[-1],
        "steps": len(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _flop_of_sum(onto: Any, left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a product that is added to a sum; torch's own count rejects a dtype for the sum."""
    return 2 * left[0] * left[1] * right[1]


def losses(bench: Bench) -> Measurements:
    """Compare the fused and the plain loss: forward and backward of 4,096 tokens over the whole vocabulary."""
    for hidden_size in bench.pick((2048, 4096), (32,)):
        for fused in (True, False):

            def run(hidden_size: int = hidden_size, fused: bool = fused) -> dict[str, float]:
                options: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype, "requires_grad": True}
                torch.manual_seed(0)
                hidden = torch.randn(bench.pick(4096, 16), hidden_size, **options)
                weight = torch.randn(bench.vocab, hidden_size, **options)
                labels = torch.randint(bench.vocab, (len(hidden),), device=bench.device)
                times, mix = [], LossMix({"cross_entropy": 1.0})
                if not bench.pretend:
                    torch.cuda.reset_peak_memory_stats()
                held = 0 if bench.pretend else torch.cuda.memory_allocated()
                for _ in range(bench.pick(8, 3)):
                    hidden.grad = weight.grad = None
                    synchronize()
                    begin = time.perf_counter()
                    if fused:
                        loss = fused_loss(hidden, weight, labels, mix).loss
                    else:
                        logits = (hidden @ weight.T).float()
                        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                    loss.backward()
                    synchronize()
                    times.append(time.perf_counter() - begin)
                peak = 0 if bench.pretend else torch.cuda.max_memory_allocated() - held
                return {"ms": 1000 * median(times[2:]), "memory": peak, "loss": float(loss.detach()) / len(hidden)}

            yield f"hidden size {hidden_size}, {'fused' if fused else 'plain'}", run
            free()
