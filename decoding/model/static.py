"""Steps of fixed shapes, for target and draft: CUDA graphs and `torch.compile` need them, and a CPU can run them too.

A step's shape is rounded up to a bucket (rows, nodes, keys). Everything that changes from step to step (tokens, depths,
the tree's mask, the start of each row) is copied into tensors of fixed address; positions, the attention mask and the
places to write to are computed from them on the device, inside the graph. The host never waits for the device here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decoding.model.cache import PreallocatedCache
from decoding.rules.tree import TokenTree, TreeShape

MODES = ("eager", "graphs", "compile")
_NODE_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_FREE_TOKENS = 64
"""Tokens in a pass up to which a GPU takes no longer than for a single token: there, a few large buckets suffice."""
_KEY_BUCKET = 256
_ALIGNMENT = 8  # bytes
_COMPILED_SHAPES = 1024


class Size(NamedTuple):
    """The shape of a bucket's steps: in each row ``nodes`` of a tree of ``span`` run, and see ``keys`` positions."""

    rows: int
    nodes: int
    span: int
    keys: int
    last_only: bool
    """True if the lm_head computes logits of each row's last node alone."""


def node_bucket(rows: int, nodes: int) -> int:
    """Round up the ``nodes`` of each row: to a power of two up to `_FREE_TOKENS` in all, else to `_NODE_BUCKETS`."""
    power = 1 << (nodes - 1).bit_length()
    if rows * power <= _FREE_TOKENS:
        return power
    return next(bucket for bucket in _NODE_BUCKETS if bucket >= nodes)


def key_bucket(keys: int) -> int:
    """Round up a number of keys: to a multiple of 256, or of an eighth of the largest power of two in it if greater."""
    step = max(_KEY_BUCKET, 1 << max(0, keys.bit_length() - 4))
    return -(-keys // step) * step


class _Fields:
    """Tensors of several shapes and dtypes side by side in one byte buffer, which one copy fills."""

    def __init__(self, fields: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._fields = fields
        self.bytes = torch.zeros(self._carve(None)[-1], dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = self._carve(self.bytes)[0]

    def _carve(self, buffer: Tensor | None) -> tuple[list[Tensor], int]:
        tensors, begin = [], 0
        for shape, dtype in self._fields:
            end = begin + prod(shape) * dtype.itemsize
            if buffer is not None:
                tensors.append(buffer[begin:end].view(dtype).view(shape))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        return tensors, begin

    def staged(self) -> tuple[Tensor, list[Tensor]]:
        """Return an uninitialised host buffer of the same layout and its tensors, to fill in and copy over.

        The buffer is pinned, so that the copy does not block, and new at each step: PyTorch reuses its memory only when
        the copy from it is done.
        """
        host = torch.empty(self.bytes.shape, dtype=torch.uint8, pin_memory=self.bytes.is_cuda)
        return host, self._carve(host)[0]


@dataclass(frozen=True)
class _Layout:
    """Shapes of a step's trees. A step with the same layout as the one before needs no copy of the tree fields."""

    shapes: tuple[TreeShape, ...]
    firsts: tuple[int, ...]
    """Number of nodes of each tree that are in the cache already; the others run."""

    @property
    def counts(self) -> list[int]:
        return [len(shape) - first for shape, first in zip(self.shapes, self.firsts, strict=True)]


class StaticInputs:
    """Inputs of a step, all on the model's device. Each row has a tree of ``span`` nodes; the last ``nodes`` of it run.

    ``tokens`` (rows, nodes) · ``starts`` (rows,): position of each row's root · ``firsts`` (rows,): number of cached
    nodes · ``last`` (rows,): index of each row's last own node among those that run, the rest being padding ·
    ``depths`` (rows, nodes): depths of the nodes that run · ``key_depths`` (rows, span): depths of all nodes ·
    ``hidden_from`` (rows, nodes, span): true where a node must not attend to another.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        rows, nodes, span = size[:3]
        integers, flags = torch.long, torch.bool
        self._step = _Fields([((rows,), integers), ((rows, nodes), integers)], device)
        self._tree = _Fields(
            [((rows,), integers)] * 2
            + [((rows, nodes), integers), ((rows, span), integers), ((rows, nodes, span), flags)],
            device,
        )
        self.starts, self.tokens = self._step.tensors
        self.firsts, self.last, self.depths, self.key_depths, self.hidden_from = self._tree.tensors
        self._layout: _Layout | None = None

    def fill(self, layout: _Layout, starts: Sequence[int], tokens: Tensor | Sequence[Sequence[int]]) -> None:
        """Copy a step in: the layout only if it changed, the rest in one copy.

        ``tokens``: the tokens that run, as lists on the host, or as a (rows, nodes) tensor, which never leaves the
        device. The rest of the bucket is padding, to which no node of a tree attends.
        """
        if layout != self._layout:
            self._fill_layout(layout)
            self._layout = layout
        host, (host_starts, host_tokens) = self._step.staged()
        missing = [0] * (len(self.starts) - len(starts))
        host_starts[:] = torch.tensor([*starts, *missing])
        if isinstance(tokens, Tensor):
            end = self.starts.nbytes
            self._step.bytes[:end].copy_(host[:end], non_blocking=True)
            self.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
            return
        width = host_tokens.shape[1]
        padded = [[*row, *[0] * (width - len(row))] for row in tokens] + [[0] * width for _ in missing]
        host_tokens[:] = torch.tensor(padded)
        self._step.bytes.copy_(host, non_blocking=True)

    def _fill_layout(self, layout: _Layout) -> None:
        host, (firsts, last, depths, key_depths, hidden_from) = self._tree.staged()
        host.zero_()
        hidden_from.fill_(True)
        # Every node attends to at least one key, padding too: a softmax over none is NaN in fp16, which would stay in
        # the cache.
        hidden_from.diagonal(dim1=1, dim2=2).fill_(False)
        members: dict[tuple[TreeShape, int], list[int]] = {}
        for row, key in enumerate(zip(layout.shapes, layout.firsts, strict=True)):
            members.setdefault(key, []).append(row)
        for (shape, first), rows in members.items():
            of_tree = shape.depth_tensor
            firsts[rows], last[rows] = first, len(shape) - first - 1
            depths[rows, : len(shape) - first] = of_tree[first:]
            key_depths[rows, : len(shape)] = of_tree
            hidden_from[rows, : len(shape) - first, : len(shape)] = ~shape.ancestor_mask[first:]
        self._tree.bytes.copy_(host, non_blocking=True)


Forward = Callable[[Callable[..., Any], Tensor, Tensor, PreallocatedCache, Any, Tensor | None], tuple[Tensor, Tensor]]
"""A pass of the model: (model, tokens, positions, cache, masks, last) -> (hidden, logits), each (rows, nodes, ...).

With ``last`` (rows,), only that node of each row: (rows, 1, ...)."""


class StaticSteps:
    """Runner of one model's steps on one cache, with a graph (or compiled function) for each bucket that occurs."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        windows: dict[str, int | None],
        max_positions: int | None,
        dtype: torch.dtype,
        mode: str,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"static mode is {mode!r}: give one of {', '.join(MODES)}")
        self._forward = partial(forward, _compiled(model) if mode == "compile" else model)
        # torch.compile traces the hook that selects nodes, but does not notice when another hook replaces it.
        self._selects = mode != "compile"
        self._windows = windows
        self._max_positions = max_positions
        self._dtype = dtype
        self.captures = mode != "eager"
        """True if steps on a GPU are recorded as CUDA graphs."""
        self._steps: dict[Size, _Bucket] = {}
        self._buffers = 0
        self.pool: Any = None
        """Memory pool of all graphs. They never run side by side, and the outputs of a step are read before the next
        step begins."""

    def capacity(self, wanted: int) -> int:
        """Return the capacity that a cache for ``wanted`` positions needs so that no padded step makes it grow."""
        return key_bucket(wanted + _NODE_BUCKETS[-1])

    def fits(self, trees: Sequence[TokenTree]) -> bool:
        """Return True if the largest tree fits into the largest bucket."""
        return max(len(tree) for tree in trees) <= _NODE_BUCKETS[-1]

    @torch.inference_mode()
    def run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run a tree after each of the first rows; return (rows, nodes, hidden) and (rows, nodes, vocab), with padding.

        The nodes of row i from ``first[i]`` on run, the others are cached. ``last_only`` returns the last node of each
        row alone, (rows, 1, ...). The next step of this model overwrites the results.
        """
        layout = _Layout(tuple(tree.shape for tree in trees), tuple(first or [0] * len(trees)))
        if all(tree.on_host for tree in trees):
            lists = [tree.token_list[skipped:] for tree, skipped in zip(trees, layout.firsts, strict=True)]
            return self._run(layout, lists, cache, last_only)
        # The tokens stay on the device: a draft's tokens are verified before the host has read them.
        device = next(tree.tokens.device for tree in trees if not tree.on_host)
        parts = [
            tree.tokens[skipped:].to(device, non_blocking=True)
            for tree, skipped in zip(trees, layout.firsts, strict=True)
        ]
        equal = len(set(layout.counts)) == 1
        return self._run(layout, torch.stack(parts) if equal else pad_sequence(parts, True), cache, last_only)

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: PreallocatedCache) -> tuple[Tensor, Tensor]:
        """Run one token after each of the first rows; ``tokens`` (rows,) are on the device.

        Returns (rows, 1, hidden) and (rows, 1, vocab).
        """
        layout = _Layout((TreeShape.chain(0),) * len(tokens), (0,) * len(tokens))
        return self._run(layout, tokens[:, None], cache, False)

    def _run(
        self, layout: _Layout, tokens: Tensor | Sequence[Sequence[int]], cache: PreallocatedCache, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        asked, counts = len(layout.shapes), layout.counts
        starts = [held - first for held, first in zip(cache.lengths, layout.firsts, strict=False)]
        rows = min(cache.rows, 1 << (asked - 1).bit_length())
        nodes = node_bucket(rows, max(counts))
        span = nodes if not any(layout.firsts) else node_bucket(rows, max(map(len, layout.shapes)))
        needed = max(cache.lengths[:asked]) + nodes
        cache.reserve(needed)
        last_only = last_only and nodes > 1  # a single node is the last one
        keys = min(cache.capacity, key_bucket(needed))
        bucket = self._bucket(Size(rows, nodes, span, keys, last_only and self._selects), cache)
        bucket.inputs.fill(layout, starts, tokens)
        hidden, logits = bucket.run()
        cache.advance(range(asked), counts)
        if last_only and not self._selects:
            hidden, logits = (nodes_at(bucket.inputs.last, tensor) for tensor in (hidden, logits))
        given = 1 if last_only else max(counts)
        return hidden[:asked, :given], logits[:asked, :given]

    def _bucket(self, size: Size, cache: PreallocatedCache) -> "_Bucket":
        if cache.buffers != self._buffers:
            # Graphs recorded on replaced buffers are invalid, and free their pool.
            self._steps, self._buffers, self.pool = {}, cache.buffers, None
        if size not in self._steps:
            self._steps[size] = _Bucket(self, cache, size)
        return self._steps[size]

    def compute(self, inputs: StaticInputs, cache: PreallocatedCache, size: Size) -> tuple[Tensor, Tensor]:
        """Compute a step: the same kernels in the same order for every step of a bucket."""
        node_index = torch.arange(size.nodes, device=inputs.tokens.device)
        positions = inputs.depths + inputs.starts[:, None]
        if self._max_positions is not None:
            positions = positions.clamp(max=self._max_positions - 1)
        cache.begin_static((inputs.starts + inputs.firsts)[:, None] + node_index, size.keys)
        masks: Any = {kind: self._mask(inputs, size, window) for kind, window in self._windows.items()}
        if len(masks) == 1:
            (masks,) = masks.values()
        try:
            return self._forward(inputs.tokens, positions, cache, masks, inputs.last if size.last_only else None)
        finally:
            cache.block = None

    def _mask(self, inputs: StaticInputs, size: Size, window: int | None) -> Tensor:
        """Return the additive mask, (rows, 1, nodes, keys)."""
        key = torch.arange(size.keys, device=inputs.tokens.device)[None]
        begin = inputs.starts[:, None]
        node = (key - begin).clamp(0, size.span - 1)
        in_prefix = key < begin
        in_tree = ~in_prefix & (key < begin + size.span)
        hidden_from = inputs.hidden_from.gather(2, node[:, None].expand(-1, size.nodes, -1))
        blocked = ~in_prefix[:, None] & (~in_tree[:, None] | hidden_from)
        if window is not None:
            key_positions = torch.where(in_prefix, key, begin + inputs.key_depths.gather(1, node))
            queries = inputs.depths + begin
            blocked = blocked | (queries[:, :, None] - key_positions[:, None] >= window)
        mask = torch.zeros(blocked.shape, dtype=self._dtype, device=blocked.device)
        return mask.masked_fill(blocked, torch.finfo(self._dtype).min)[:, None]


def nodes_at(index: Tensor, values: Tensor) -> Tensor:
    """Return the node ``index[row]`` of each row of ``values`` (rows, nodes, width): (rows, 1, width)."""
    return values.gather(1, index[:, None, None].expand(-1, -1, values.shape[-1]))


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """Return the model through `torch.compile`, for up to `_COMPILED_SHAPES` shapes (torch's default limit is 8)."""

    # torch keeps compiled code per function: a new function keeps other uses of the same model apart.
    def run(**inputs: Any) -> Any:
        return model(**inputs)

    compiled = torch.compile(run, dynamic=False)

    def call(**inputs: Any) -> Any:
        limits = {"recompile_limit": _COMPILED_SHAPES, "accumulated_recompile_limit": 4 * _COMPILED_SHAPES}
        with torch._dynamo.config.patch(limits):
            return compiled(**inputs)

    return call


class _Bucket:
    """The steps of one shape: their inputs, and their CUDA graph once it is recorded."""

    def __init__(self, owner: StaticSteps, cache: PreallocatedCache, size: Size) -> None:
        assert cache.device is not None, "a prefill comes before the first step"
        self.inputs = StaticInputs(size, cache.device)
        self._owner = owner
        self._device = cache.device
        self._compute = partial(owner.compute, self.inputs, cache, size)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        if not self._owner.captures or self._device.type != "cuda":
            return self._compute()
        with torch.cuda.device(self._device):
            if self._outputs is None:
                self._outputs = self._capture()
            assert self._graph is not None
            self._graph.replay()
        return self._outputs

    def _capture(self) -> tuple[Tensor, Tensor]:
        """Record the step as a CUDA graph.

        The warm-up runs the step whose inputs are already filled in. That is harmless: every run of it, the replay
        too, writes the same keys and values to the same positions.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        if self._owner.pool is None:
            self._owner.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._owner.pool):
            outputs = self._compute()
        self._graph = graph
        return outputs
