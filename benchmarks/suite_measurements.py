"""Steps of the GPU suite: functions that yield (name, measurement); a measurement returns JSON values."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT
from typing import Any

import torch
from suite_models import (
    DRAFTED,
    Bench,
    Measurements,
    cache_bytes,
    counting_model,
    drafter_of,
    free,
    synchronize,
    timed,
    weight_bytes,
)
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import StoppingCriteriaList

from decoding.drafters import Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.machine import hardware, versions
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"
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
