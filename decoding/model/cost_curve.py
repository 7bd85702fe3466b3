"""The cost model, measured on this machine: seconds of a target pass by new tokens, and of a draft by depth."""

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSpark, TextKeys
from decoding.model.eagle3 import Eagle3Draft
from decoding.model.forward import unscaled_embeddings
from decoding.rules.tree import TokenTree


@dataclass(frozen=True)
class Costs:
    """Seconds of one step of the loop for a given number of rows; linear between measured sizes.

    ``target_pass`` maps the new tokens per row, including the root, to the seconds of a target pass; v(n) is its shape.
    ``draft`` maps the depth of the draft to the seconds of drafting; depth 0 takes no time unless given.
    """

    target_pass: Mapping[int, float]
    draft: Mapping[int, float] = field(default_factory=dict)

    def pass_over(self, tokens: float) -> float:
        """Return the seconds of a target pass over ``tokens`` new tokens in each row."""
        return _interpolate(sorted(self.target_pass.items()), tokens)

    def draft_to(self, depth: float) -> float:
        """Return the seconds of drafting to ``depth``."""
        return _interpolate(sorted({0: 0.0, **self.draft}.items()), depth)

    def step(self, depth: float, nodes: float) -> float:
        """Return the seconds of a step that drafts a tree of this depth with ``nodes`` nodes, including the root."""
        return self.draft_to(depth) + self.pass_over(nodes)

    @property
    def draft_step(self) -> float:
        """Cost of the draft's first token, in target passes over one token."""
        return self.draft_to(1) / self.pass_over(1)


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between sorted ``points``.

    The function is constant before the first point. After the last point it continues the last segment, but never
    decreases.
    """
    after = bisect_right(points, (at, math.inf))
    if after == 0 or len(points) == 1:
        return points[0][1]
    (left, low), (right, high) = points[min(after, len(points) - 1) - 1 :][:2]
    slope = (high - low) / (right - left)
    return low + slope * (at - left) if at <= right else high + max(0.0, slope) * (at - right)


class _Blocks:
    """Timer of a DSpark draft's blocks after ``prefix`` tokens in each of ``rows`` texts."""

    def __init__(self, dspark: DSpark, prefix: int, rows: int) -> None:
        self._dspark, device = dspark, dspark.target.device
        self._keys = TextKeys(dspark.draft, rows, prefix + 1)
        states = dspark.draft.fc.weight.new_ones(prefix, dspark.draft.fc.in_features)
        self._keys.append([states] * rows)
        self._newest = torch.arange(rows, device=device)
        self._state = states[:1]

    def seconds(self, size: int) -> float:
        """Time a draft step after one new token per text; ``size`` is ignored, because blocks have one size."""
        lengths = list(self._keys.lengths)
        begin = time.perf_counter()
        self._keys.append([self._state] * len(lengths))
        self._dspark.logits(self._keys.run(self._dspark.embed(self._newest)))
        if self._newest.is_cuda:
            torch.cuda.synchronize(self._newest.device)
        passed = time.perf_counter() - begin
        self._keys.lengths = lengths
        return passed


class _Slots:
    """Timer of an EAGLE-3 draft's slots after ``prefix`` slots in each of ``rows`` texts."""

    def __init__(self, draft: Eagle3Draft, target: CausalLM, prefix: int, rows: int) -> None:
        self._draft, config = draft, draft.config
        self._keys = draft.fc.weight.new_ones(rows, config.num_key_value_heads, prefix, config.head_dim)
        self._positions = torch.full((rows, 1), prefix, device=draft.device)
        self._embedded = unscaled_embeddings(target.model, torch.arange(rows, device=draft.device)[:, None])

    def seconds(self, size: int) -> float:
        """Time one slot per text and the logits after it; ``size`` is ignored."""

        def held(*fresh: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = (torch.cat((self._keys, each), 2) for each in fresh)
            return keys, values

        begin = time.perf_counter()
        self._draft.logits(self._draft(self._embedded, self._embedded, self._positions, held))
        if self._positions.is_cuda:
            torch.cuda.synchronize(self._positions.device)
        return time.perf_counter() - begin


class _Passes:
    """Timer of passes over new tokens after ``prefix`` cached tokens in each of ``rows`` texts."""

    def __init__(self, model: CausalLM, sizes: Sequence[int], prefix: int, rows: int) -> None:
        most = max(sizes)
        if model.max_positions is not None and prefix + most > model.max_positions:
            prefix = max(1, model.max_positions - most)
        self.model, self.prefix, self.rows = model, prefix, rows
        self.cache = model.new_cache(prefix + most, rows)
        # Use different tokens, because each may activate different experts of a mixture.
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
    draft: CausalLM | DSpark | Eagle3Draft | None = None,
    prefix: int = 128,
    rows: int = 1,
    repeats: int = 15,
    seconds: float = math.inf,
) -> Costs:
    """Measure the median seconds of a target pass over n new tokens after ``prefix`` cached ones, for n in ``sizes``.

    Each of ``rows`` texts has n new tokens. A forward of the ``draft`` model, a block of a DSpark draft, or a slot of
    an EAGLE-3 draft is measured too. The passes alternate, so other load on the machine affects all alike. No round
    begins after ``seconds``, but at least three are measured. If a pass looks cheaper than one over fewer tokens, this
    is noise: it gets the larger cost.
    """
    passes = _Passes(target, sizes, prefix, rows)
    timed: list[tuple[_Passes | _Blocks | _Slots, int]] = [(passes, size) for size in sizes]
    at_once = draft.config.block_size if isinstance(draft, DSpark) else 1
    if isinstance(draft, DSpark):
        with torch.inference_mode():
            timed.append((_Blocks(draft, prefix, rows), at_once))
    elif isinstance(draft, Eagle3Draft):
        timed.append((_Slots(draft, target, prefix, rows), 1))
    elif draft is not None:
        timed.append((_Passes(draft, (1,), prefix, rows), 1))
    warm_up, began = 2, time.perf_counter()
    rounds: list[list[float]] = []
    for repeat in range(warm_up + repeats):
        if repeat >= warm_up + 3 and time.perf_counter() - began > seconds:
            break
        with torch.inference_mode():
            rounds.append([each.seconds(size) for each, size in timed])
    medians = [statistics.median(times) for times in zip(*rounds[warm_up:], strict=True)]
    curve = dict(zip(sizes, accumulate(medians[: len(sizes)], max), strict=True))
    return Costs(curve, {} if draft is None else dict.fromkeys((1, at_once), medians[-1]))
