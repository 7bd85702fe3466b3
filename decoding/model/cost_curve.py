"""The cost curve: how many seconds a target pass takes on this machine, by its number of new tokens."""

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import TokenTree


def pass_over(curve: Mapping[int, float], size: float) -> float:
    """Return the seconds of a target pass over ``size`` new tokens per row, the root included.

    ``curve`` maps measured sizes to seconds. Between these sizes the curve is linear, and before the first size it is
    constant. After the last size the curve continues the last segment, but never decreases.
    """
    points = sorted(curve.items())
    after = bisect_right(points, (size, math.inf))
    if after == 0 or len(points) == 1:
        return points[0][1]
    (left, low), (right, high) = points[min(after, len(points) - 1) - 1 :][:2]
    slope = (high - low) / (right - left)
    return low + slope * (size - left) if size <= right else high + max(0.0, slope) * (size - right)


class _Passes:
    """Timer of passes over new tokens. There are ``rows`` texts; in each text, the new tokens follow ``prefix`` cached
    tokens.
    """

    def __init__(self, model: CausalLM, sizes: Sequence[int], prefix: int, rows: int) -> None:
        most = max(sizes)
        if model.max_positions is not None and prefix + most > model.max_positions:
            prefix = max(1, model.max_positions - most)
        self.model, self.prefix, self.rows = model, prefix, rows
        self.cache = model.new_cache(prefix + most, rows)
        # Different tokens are used, because each may activate different experts of a mixture.
        tokens = [(10 + 7919 * index) % model.vocab_size for index in range(prefix + most)]
        model.prefill([tokens[:prefix]] * rows, self.cache)
        self.trees = {size: [TokenTree.chain(tokens[-size:], model.device)] * rows for size in sizes}

    def seconds(self, size: int) -> float:
        """Time a pass over ``size`` new tokens in each row, then remove the tokens from the cache."""
        begin = time.perf_counter()
        self.model.verify(self.trees[size], self.cache)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        passed = time.perf_counter() - begin
        for row in range(self.rows):
            self.cache.truncate(row, self.prefix)
        return passed


def measure_costs(
    target: CausalLM,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    prefix: int = 128,
    rows: int = 1,
    repeats: int = 15,
    seconds: float = math.inf,
) -> dict[int, float]:
    """Measure the median seconds of a target pass over n new tokens after ``prefix`` cached tokens, for n in ``sizes``.

    Each of ``rows`` texts has n new tokens. Passes of all sizes alternate, so other load affects all sizes alike. No
    round begins after ``seconds``, but at least three rounds are measured. If a pass looks cheaper than a pass over
    fewer tokens, the difference is noise, so the pass gets the larger cost.
    """
    passes = _Passes(target, sizes, prefix, rows)
    warm_up, began = 2, time.perf_counter()
    rounds: list[list[float]] = []
    for repeat in range(warm_up + repeats):
        if repeat >= warm_up + 3 and time.perf_counter() - began > seconds:
            break
        with torch.inference_mode():
            rounds.append([passes.seconds(size) for size in sizes])
    medians = [statistics.median(times) for times in zip(*rounds[warm_up:], strict=True)]
    return dict(zip(sizes, accumulate(medians, max), strict=True))
