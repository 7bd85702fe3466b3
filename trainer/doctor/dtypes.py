"""The dtype that pays here, measured: products of a few rows with weights, as a target's pass over a draft has them.

Decoding is bound by reading the weights: a pass over one token and a pass over eight then cost about the same, which is
all that speculation lives on. Where a dtype computes slowly, eight tokens cost several times one.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.model.dtypes import DTYPES, default_device
from trainer.doctor.finding import Finding, note, ok
from trainer.doctor.machine import size

ROWS = (1, 4, 8, 16)
"""Tokens of a pass: one in plain decoding, the others as drafts have."""
_VERIFIED = 8
"""Tokens of the pass that decides."""
_PREFERRED = ("bf16", "fp16", "fp32")
_MARGIN = 1.1
"""Times faster than a preferred dtype that another must be."""
_DEAR = 2.0
"""Cost of `_VERIFIED` tokens, in passes over one, from which drafts must be short."""
_WIDTH = 2048
_LAYERS = {"cpu": 6, "cuda": 24}
"""Products of a pass, by the device's type. Their weights together are larger than a cache, as a model's are."""
_COPY = ("copy", 0)
"""Key of copying among the runs."""
_WARM_UP, _LEAST, _MOST = 2, 3, 15
_SECONDS = 1.5
"""Seconds after which no further round begins."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of a pass by dtype and rows, bytes of the weights by dtype, bytes a second that copying moves."""

    seconds: Mapping[str, Mapping[int, float]]
    weights: Mapping[str, int]
    copied: float


def measure() -> Measured:
    """Time passes of every dtype on the device that models are loaded on, warmed up, and take medians."""
    device = default_device()
    made = torch.randn(_LAYERS[device.type], _WIDTH, _WIDTH, generator=torch.Generator().manual_seed(0)) / _WIDTH**0.5
    stacks = {name: made.to(device, dtype) for name, dtype in DTYPES.items()}
    source, copy = stacks["fp32"], torch.empty_like(stacks["fp32"])
    runs = {(name, rows): run_of(stack, rows) for name, stack in stacks.items() for rows in ROWS}
    found = medians({**runs, _COPY: lambda: copied(source, copy)}, time.perf_counter)
    seconds = {name: {rows: found[name, rows] for rows in ROWS} for name in stacks}
    weights = {name: stack.nbytes for name, stack in stacks.items()}
    return Measured(seconds, weights, 2 * source.nbytes / found[_COPY])


def run_of(stack: Tensor, rows: int) -> Callable[[], None]:
    """Return a pass over ``rows`` tokens: a product with each of the weights, (layers, width, width), in turn."""
    first = torch.ones(rows, stack.shape[-1], dtype=stack.dtype, device=stack.device)

    @torch.inference_mode()
    def run() -> None:
        x = first
        for weight in stack:
            x = F.linear(x, weight)
        wait(stack.device)

    return run


def copied(source: Tensor, copy: Tensor) -> None:
    """Copy a tensor, which reads and writes its bytes once."""
    copy.copy_(source)
    wait(source.device)


def wait(device: torch.device) -> None:
    """Wait until the device has computed all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(
    runs: Mapping[tuple[str, int], Callable[[], None]], clock: Callable[[], float]
) -> dict[tuple[str, int], float]:
    """Return the median seconds of each run, by its key.

    Runs take turns, so that what else the machine does hits all alike; the first rounds warm up and do not count.
    """
    rounds: list[list[float]] = []
    began = clock()
    for index in range(_WARM_UP + _MOST):
        if index >= _WARM_UP + _LEAST and clock() - began > _SECONDS:
            break
        times = []
        for run in runs.values():
            start = clock()
            run()
            times.append(clock() - start)
        rounds.append(times)
    return {
        key: statistics.median(times) for key, times in zip(runs, zip(*rounds[_WARM_UP:], strict=True), strict=True)
    }


def best(measured: Measured) -> str:
    """Return the dtype whose pass over a draft is the shortest; near ties go to bf16, then fp16: half the memory."""
    costs = {name: rows[_VERIFIED] for name, rows in measured.seconds.items()}
    fastest = min(costs.values())
    return next(name for name in _PREFERRED if name in costs and costs[name] <= _MARGIN * fastest)


def dtype_findings(measured: Measured, asked: str) -> list[Finding]:
    """Return a finding for each dtype, then the one to use beside the one ``asked`` for, then what a draft costs."""
    return [*(_described(measured, name) for name in measured.seconds), _choice(measured, asked), _price(measured)]


def _described(measured: Measured, name: str) -> Finding:
    rows, weights = measured.seconds[name], measured.weights[name]
    read = weights / rows[1]
    told = ", ".join(f"{count}{' token' * (count == 1)} {taken * 1e3:.3g} ms" for count, taken in rows.items())
    share = f"{read / 1e9:.0f} GB/s, {read / measured.copied:.0%} of what copying moves"
    found = f"{size(weights)} of weights: {told}; one token reads {share}"
    return ok(name, found, seconds=dict(rows), weight_bytes=weights, share_of_bandwidth=read / measured.copied)


def _choice(measured: Measured, asked: str) -> Finding:
    chosen = best(measured)
    costs = {name: rows[_VERIFIED] * 1e3 for name, rows in measured.seconds.items()}
    told = ", ".join(f"{name} {costs[name]:.3g} ms" for name in sorted(costs, key=lambda name: costs[name]))
    found = f"{_VERIFIED} drafted tokens are verified fastest in {chosen} ({told}, as measured here)"
    figures = {"best": chosen, "asked": asked}
    slower = costs[asked] / costs[chosen]
    if slower > _MARGIN:
        return note("dtype", f"{found}; {asked} takes {slower:.1f} times as long", f"--dtype {chosen}", **figures)
    return ok("dtype", found, **figures)


def _price(measured: Measured) -> Finding:
    chosen = best(measured)
    rows = measured.seconds[chosen]
    price = rows[_VERIFIED] / rows[1]
    found = f"in {chosen} a pass over {_VERIFIED} tokens costs {price:.1f} times one over a single token"
    if price > _DEAR:
        remedy = "draft few tokens at a time, as `headstart plan` chooses by the target's own costs"
        return note("cost of a draft", found, remedy, price=price)
    return ok("cost of a draft", found, price=price)
