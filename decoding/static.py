"""Target and draft steps of fixed shapes: what CUDA graphs and `torch.compile` need, and what runs the same on a CPU.

A step's shape is rounded up to a bucket (rows, nodes, keys). Everything that changes from step to step (tokens, depths,
the tree's mask, where each row begins) is copied into tensors that stay where they are; positions, the attention mask
and the places to write to are computed from them on the device, inside the graph. The host waits for nothing here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.cache import PreallocatedCache
from decoding.tree import TokenTree

MODES = ("eager", "graphs", "compile")
_NODE_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_KEY_BUCKET = 256


@dataclass(frozen=True)
class StaticInputs:
    """What a step reads. ``hidden_from[r, i, j]`` is true where node i of row r may not see node j of its own tree."""

    tokens: Tensor  # (rows, nodes)
    depths: Tensor  # (rows, nodes)
    hidden_from: Tensor  # (rows, nodes, nodes) bool
    starts: Tensor  # (rows,)

    @staticmethod
    def empty(rows: int, nodes: int, device: torch.device) -> "StaticInputs":
        return StaticInputs(
            torch.zeros(rows, nodes, dtype=torch.long, device=device),
            torch.zeros(rows, nodes, dtype=torch.long, device=device),
            torch.ones(rows, nodes, nodes, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
        )

    def fill(self, trees: Sequence[TokenTree], starts: Sequence[int]) -> None:
        """Copy a step in. What is left of the bucket are nodes that nobody sees."""
        for row, tree in enumerate(trees):
            size = len(tree)
            self.tokens[row, :size].copy_(tree.tokens, non_blocking=True)
            self.depths[row, :size].copy_(tree.shape.depth_tensor, non_blocking=True)
            self.hidden_from[row].fill_(True)
            self.hidden_from[row, :size, :size].copy_(~tree.shape.ancestor_mask, non_blocking=True)
        padded = [*starts, *[0] * (len(self.starts) - len(starts))]
        self.starts.copy_(torch.tensor(padded), non_blocking=True)


class StaticSteps:
    """Runs steps of one model on one cache, a graph (or compiled function) for each bucket met.

    ``forward`` is the model's own: (tokens, positions, cache, masks) -> (hidden, logits), each (rows, nodes, ...).
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, PreallocatedCache, Any], tuple[Tensor, Tensor]],
        windows: dict[str, int | None],
        max_positions: int | None,
        dtype: torch.dtype,
        mode: str,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"static mode is {mode!r}: give one of {', '.join(MODES)}")
        self._mode = mode
        self._forward = torch.compile(forward, dynamic=False) if mode == "compile" else forward
        self._windows = windows
        self._max_positions = max_positions
        self._dtype = dtype
        self._steps: dict[tuple[int, int, int, int], _Bucket] = {}

    def fits(self, trees: Sequence[TokenTree]) -> bool:
        """Whether the step is small enough for a bucket."""
        return max(len(tree) for tree in trees) <= _NODE_BUCKETS[-1]

    @torch.inference_mode()
    def run(self, trees: Sequence[TokenTree], cache: PreallocatedCache) -> tuple[Tensor, Tensor]:
        """A tree behind each of the first rows: (rows, nodes, hidden), (rows, nodes, vocab); padding included.

        The results are overwritten by the next step of the same bucket.
        """
        starts = cache.lengths[: len(trees)]
        size = max(len(tree) for tree in trees)
        nodes = next(bucket for bucket in _NODE_BUCKETS if bucket >= size)
        rows = min(cache.rows, 1 << (len(trees) - 1).bit_length())
        needed = max(starts) + nodes
        cache.reserve(needed)
        keys = min(cache.capacity, -(-needed // _KEY_BUCKET) * _KEY_BUCKET)
        key = (cache.buffers, rows, nodes, keys)
        if key not in self._steps:
            # Buffers that were replaced by larger ones take their graphs with them.
            self._steps = {old: step for old, step in self._steps.items() if old[0] == cache.buffers}
            self._steps[key] = _Bucket(self, cache, rows, nodes, keys)
        bucket = self._steps[key]
        bucket.inputs.fill(trees, starts)
        hidden, logits = bucket.run()
        cache.advance(range(len(trees)), [len(tree) for tree in trees])
        return hidden[: len(trees), :size], logits[: len(trees), :size]

    def compute(self, inputs: StaticInputs, cache: PreallocatedCache, keys: int) -> tuple[Tensor, Tensor]:
        """The step itself: the same kernels in the same order for every step of a bucket."""
        node_index = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)
        positions = inputs.depths + inputs.starts[:, None]
        if self._max_positions is not None:
            positions = positions.clamp(max=self._max_positions - 1)
        cache.begin_static(inputs.starts[:, None] + node_index, keys)
        masks: Any = {kind: self._mask(inputs, keys, window) for kind, window in self._windows.items()}
        if len(masks) == 1:
            (masks,) = masks.values()
        hidden, logits = self._forward(inputs.tokens, positions, cache, masks)
        cache.block = None
        return hidden, logits

    def _mask(self, inputs: StaticInputs, keys: int, window: int | None) -> Tensor:
        """Additive, (rows, 1, nodes, keys)."""
        rows, nodes = inputs.tokens.shape
        key = torch.arange(keys, device=inputs.tokens.device)[None]
        begin = inputs.starts[:, None]
        node = (key - begin).clamp(0, nodes - 1)
        in_prefix = key < begin
        in_tree = ~in_prefix & (key < begin + nodes)
        hidden_from = inputs.hidden_from.gather(2, node[:, None].expand(rows, nodes, keys))
        blocked = ~in_prefix[:, None] & (~in_tree[:, None] | hidden_from)
        if window is not None:
            key_positions = torch.where(in_prefix, key, begin + inputs.depths.gather(1, node))
            queries = inputs.depths + begin
            blocked = blocked | (queries[:, :, None] - key_positions[:, None] >= window)
        mask = torch.zeros(blocked.shape, dtype=self._dtype, device=blocked.device)
        return mask.masked_fill(blocked, torch.finfo(self._dtype).min)[:, None]

    @property
    def captures(self) -> bool:
        """Whether steps on a GPU are recorded as CUDA graphs."""
        return self._mode != "eager"


class _Bucket:
    """The steps of one shape."""

    def __init__(self, owner: StaticSteps, cache: PreallocatedCache, rows: int, nodes: int, keys: int) -> None:
        assert cache.device is not None, "a prefill comes before the first step"
        self.inputs = StaticInputs.empty(rows, nodes, cache.device)
        self._compute = lambda: owner.compute(self.inputs, cache, keys)
        self._captures = owner.captures and cache.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None

    def _capture(self) -> tuple[Tensor, Tensor]:
        """Record the step once. Its inputs are filled in already: the warm-up writes keys and values too."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            return self._compute()

    def run(self) -> tuple[Tensor, Tensor]:
        if not self._captures:
            return self._compute()
        if self._outputs is None:
            self._outputs = self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._outputs
