"""Launches and device time of decoding steps, by torch.profiler."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from suite_decoding import EAGER, METHODS, synchronize
from suite_models import Stage
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from decoding.engine import Engine
from decoding.generate import DecodingConfig

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


def profile_items(short: bool) -> list[tuple[str, str | None]]:
    """(method, static mode) of every profile, those of graphs first."""
    return [(method, static) for static in ("graphs", None) for method in (METHODS[:2] if short else METHODS)]
