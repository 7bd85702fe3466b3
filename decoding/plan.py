"""What pays here: a target pass's cost on this machine by block size, and the best Medusa tree for measured heads."""

import heapq
import statistics
import time
from collections.abc import Sequence

import torch

from decoding.target import CausalLM
from decoding.tree import TokenTree


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


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The ``nodes`` tree paths most likely to be accepted, given how often head d's rank-r token is the right one.

    ``accuracies[d][r]`` is head d's (from 0) share at rank r (from 0), taken as independent of the others, so a path
    is accepted with the product along it. The product falls along a path and, where shares fall with rank, among
    siblings; then the most probable nodes taken from a heap form the optimal tree (Medusa, 2401.10774, section 2.3.3).
    """
    shares = [list(_non_increasing(head)) for head in accuracies]
    if not shares or not shares[0] or nodes < 1:
        raise ValueError(f"a tree needs at least one node and one head's accuracies; got {nodes} and {accuracies}")
    heap: list[tuple[float, tuple[int, ...]]] = [(-shares[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < nodes:
        negated, path = heapq.heappop(heap)
        chosen.append(path)
        depth, rank = len(path) - 1, path[-1]
        parent = -negated / shares[depth][rank] if shares[depth][rank] > 0 else 0.0
        if rank + 1 < len(shares[depth]) and shares[depth][rank + 1] > 0:
            heapq.heappush(heap, (-parent * shares[depth][rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(shares) and shares[depth + 1][0] > 0:
            heapq.heappush(heap, (negated * shares[depth + 1][0], (*path, 0)))
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def _non_increasing(shares: Sequence[float]) -> list[float]:
    """A rank cannot be more likely than the one before it, but a small sample may say so: cap it."""
    capped: list[float] = []
    for share in shares:
        capped.append(min(share, capped[-1]) if capped else share)
    return capped
