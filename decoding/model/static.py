"""Steps of fixed shapes, for target and draft: CUDA graphs and `torch.compile` need them, and a CPU can run them too.

A step's shape is rounded up to a bucket (rows, nodes, keys). Everything that changes from step to step (tokens, depths,
the tree's mask, the start of each row) is copied into tensors of fixed address; positions, the attention mask and the
places to write to are computed from them on the device, inside the graph. The host never waits for the device here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decoding.model.cache import PreallocatedCache
from decoding.model.static_inputs import NODE_BUCKETS, Layout, Size, StaticInputs, key_bucket, node_bucket, row_bucket
from decoding.rules.tree import TokenTree, TreeShape

MODES = ("eager", "graphs", "compile")
_AHEAD = 2
"""Buckets of keys whose graphs are recorded before a text comes to them."""
_COMPILED_SHAPES = 1024


Forward = Callable[
    [Callable[..., Any], Tensor, Tensor, PreallocatedCache, Any, Tensor | None, Tensor | None], tuple[Tensor, Tensor]
]
"""A pass of the model: (model, tokens, positions, cache, masks, last, added) -> (hidden, logits), (rows, nodes, ...).

With ``last`` (rows,), only that node of each row: (rows, 1, ...). ``added``: additions to the embeddings."""


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
        # torch.compile traces the hooks that select nodes or add to embeddings, but does not notice when others
        # replace them.
        self._hooks = mode != "compile"
        self._prepares = mode == "graphs"
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
        return key_bucket(wanted + NODE_BUCKETS[-1])

    def fits(self, trees: Sequence[TokenTree], added: Tensor | None = None) -> bool:
        """Return True if the largest tree fits into the largest bucket, and its embeddings can be added to."""
        return max(len(tree) for tree in trees) <= NODE_BUCKETS[-1] and (added is None or self._hooks)

    @torch.inference_mode()
    def run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int] | None = None,
        last_only: bool = False,
        kept: Sequence[int] | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a tree after each of the first rows; return (rows, nodes, hidden) and (rows, nodes, vocab), with padding.

        The nodes of row i from ``first[i]`` on run, the others are cached. ``last_only`` returns the last node of each
        row alone, (rows, 1, ...). The cache keeps the first ``kept[i]`` nodes of those that run (None: all). ``added``
        (rows, nodes, width) is added to their embeddings. The next step of this model overwrites the results.
        """
        layout = Layout(tuple(tree.shape for tree in trees), tuple(first or [0] * len(trees)))
        if all(tree.on_host for tree in trees):
            lists = [tree.token_list[skipped:] for tree, skipped in zip(trees, layout.firsts, strict=True)]
            return self._run(layout, lists, cache, last_only, kept, added)
        # The tokens stay on the device: a draft's tokens are verified before the host has read them.
        device = next(tree.tokens.device for tree in trees if not tree.on_host)
        parts = [
            tree.tokens[skipped:].to(device, non_blocking=True)
            for tree, skipped in zip(trees, layout.firsts, strict=True)
        ]
        equal = len(set(layout.counts)) == 1
        tokens = torch.stack(parts) if equal else pad_sequence(parts, True)
        return self._run(layout, tokens, cache, last_only, kept, added)

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: PreallocatedCache) -> tuple[Tensor, Tensor]:
        """Run one token after each of the first rows; ``tokens`` (rows,) are on the device.

        Returns (rows, 1, hidden) and (rows, 1, vocab).
        """
        layout = Layout((TreeShape.chain(0),) * len(tokens), (0,) * len(tokens))
        return self._run(layout, tokens[:, None], cache, False)

    def _run(
        self,
        layout: Layout,
        tokens: Tensor | Sequence[Sequence[int]],
        cache: PreallocatedCache,
        last_only: bool,
        kept: Sequence[int] | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        asked, counts = len(layout.shapes), layout.counts
        starts = [held - first for held, first in zip(cache.lengths, layout.firsts, strict=False)]
        rows = min(cache.rows, row_bucket(asked))
        nodes = node_bucket(rows, max(counts))
        span = nodes if not any(layout.firsts) else node_bucket(rows, max(map(len, layout.shapes)))
        needed = max(cache.lengths[:asked]) + nodes
        cache.reserve(needed)
        last_only = last_only and nodes > 1  # a single node is the last one
        keys = min(cache.capacity, key_bucket(needed))
        width = 0 if added is None else added.shape[-1]
        bucket = self._bucket(Size(rows, nodes, span, keys, last_only and self._hooks, width), cache)
        bucket.inputs.fill(layout, starts, cache.dropped[:asked], tokens)
        if added is not None:
            bucket.inputs.add(added)
        hidden, logits = bucket.run()
        cache.advance(range(asked), counts if kept is None else kept)
        if last_only and not self._hooks:
            hidden, logits = (nodes_at(bucket.inputs.last, tensor) for tensor in (hidden, logits))
        given = 1 if last_only else max(counts)
        return hidden[:asked, :given], logits[:asked, :given]

    def _bucket(self, size: Size, cache: PreallocatedCache) -> "_Bucket":
        if cache.buffers != self._buffers:
            # Graphs recorded on replaced buffers are invalid, and free their pool.
            self._steps, self._buffers, self.pool = {}, cache.buffers, None
        if size not in self._steps:
            self._steps[size] = _Bucket(self, cache, size, self._dtype)
        return self._steps[size]

    @torch.inference_mode()
    def prepare(self, cache: PreallocatedCache, asked: int, nodes: Sequence[int], longest: int) -> None:
        """Record the graphs of the next steps: of all kinds met so far, and of trees of ``nodes``.

        Recorded for the first `_AHEAD` buckets of keys that the texts of the first ``asked`` rows will come to, while
        they grow to ``longest`` positions. What recording writes into the cache lies behind the texts.
        """
        if not (self._prepares and asked and cache.device):
            return
        rows, lengths = min(cache.rows, row_bucket(asked)), cache.lengths[:asked]
        kinds = {(size.nodes, size.span, size.last_only, size.added) for size in self._steps if size.rows == rows}
        kinds |= {(bucket, bucket, False, 0) for bucket in (node_bucket(rows, count) for count in nodes)}
        layout = Layout((TreeShape.chain(0),) * asked, (0,) * asked)
        for own, span, last_only, width in sorted(kinds):
            cache.reserve(max(lengths) + own)
            keys, most = key_bucket(max(lengths) + own), min(cache.capacity, key_bucket(longest + own))
            for _ in range(_AHEAD):
                bucket = self._bucket(Size(rows, own, span, min(keys, most), last_only, width), cache)
                if not bucket.has_run:
                    bucket.inputs.fill(layout, lengths, cache.dropped[:asked], [[0]] * asked)
                    bucket.run()
                keys = key_bucket(min(keys, most) + 1)

    def compute(self, inputs: StaticInputs, cache: PreallocatedCache, size: Size) -> tuple[Tensor, Tensor]:
        """Compute a step: the same kernels in the same order for every step of a bucket."""
        node_index = torch.arange(size.nodes, device=inputs.tokens.device)
        positions = inputs.depths + (inputs.starts + inputs.dropped)[:, None]
        if self._max_positions is not None:
            positions = positions.clamp(max=self._max_positions - 1)
        cache.begin_static((inputs.starts + inputs.firsts)[:, None] + node_index, size.keys)
        masks: Any = {kind: self._mask(inputs, size, window) for kind, window in self._windows.items()}
        if len(masks) == 1:
            (masks,) = masks.values()
        try:
            last = inputs.last if size.last_only else None
            return self._forward(inputs.tokens, positions, cache, masks, last, inputs.added)
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

    def __init__(self, owner: StaticSteps, cache: PreallocatedCache, size: Size, dtype: torch.dtype) -> None:
        assert cache.device is not None, "a prefill comes before the first step"
        self.inputs = StaticInputs(size, cache.device, dtype)
        self.has_run = False
        self._owner = owner
        self._device = cache.device
        self._compute = partial(owner.compute, self.inputs, cache, size)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        self.has_run = True
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
        # Other threads may use the GPU meanwhile: a training run's next batch, NCCL's watchdog.
        with torch.cuda.graph(graph, pool=self._owner.pool, capture_error_mode="thread_local"):
            outputs = self._compute()
        self._graph = graph
        return outputs
