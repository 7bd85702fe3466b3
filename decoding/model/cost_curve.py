"""The cost of a target pass on this machine, by the number of new tokens."""

import statistics
import time
from collections.abc import Sequence

import torch

from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import TokenTree


def measure_cost_curve(
    model: CausalLM, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), prefix: int = 128, repeats: int = 15
) -> dict[int, float]:
    """Median seconds of one pass over n new tokens behind ``prefix`` cached ones, for each n. v(n) is its shape."""
    longest = prefix + max(sizes)
    if model.max_positions is not None and longest > model.max_positions:
        prefix = max(1, model.max_positions - max(sizes))
    cache = model.new_cache(longest)
    token = min(10, model.vocab_size - 1)
    model.prefill([[token] * prefix], cache)
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 2):  # two rounds of warm-up; sizes take turns, so that drift hits all alike
        for size in sizes:
            tree = TokenTree.chain([token] * size, model.device)
            begin = time.perf_counter()
            model.verify([tree], cache)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            if repeat >= 2:
                samples[size].append(time.perf_counter() - begin)
            cache.truncate(0, prefix)
    return {size: statistics.median(times) for size, times in samples.items()}
