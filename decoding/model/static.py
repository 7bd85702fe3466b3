"""Steps with fixed shapes, for target and draft, as CUDA graphs require them. Such steps also run on a CPU.

A step's shape is rounded up to a bucket (rows, nodes, keys). Everything that changes from step to step (tokens, depths,
the tree's mask, the start of each row) is copied into tensors with fixed addresses. The graph computes positions,
attention mask and write positions from these tensors on the device. In this module the host never waits for the device.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock, get_ident
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import UserError
from decoding.model.architecture import STATIC_MODES, why_not_static
from decoding.model.cache import PreallocatedCache, rounded_up
from decoding.model.dynamic import DynamicSteps, TreeMasks, blocked_keys, stacked
from decoding.model.forward import ModelOutput, run_model
from decoding.rules.tree import TokenTree, TreeShape

NODE_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_FREE_TOKENS = 64  # up to this many tokens a GPU pass takes as long as a pass over one token, so few buckets suffice
_KEY_BUCKET = 256
_AHEAD = 2  # number of buckets of keys whose graphs are recorded before a text becomes that long
_RECORDING = Lock()  # PyTorch allows only one recording at a time in a process


Shapes = tuple[tuple[int, ...], ...]


class Size(NamedTuple):
    """The shape of the steps in a bucket: each row runs ``nodes`` of a tree's ``span`` nodes and reads ``keys``
    positions.
    """

    rows: int
    nodes: int
    span: int
    keys: int
    taps: tuple[int, ...] = ()
    """Layers after which the states are returned."""


def row_bucket(rows: int) -> int:
    """Round up a number of rows to a power of two. A step has this number of rows, or all rows of its cache."""
    return 1 << (rows - 1).bit_length()


def node_bucket(rows: int, nodes: int) -> int:
    """Round up the ``nodes`` of each row to a power of two if all rows together then have at most `_FREE_TOKENS` nodes,
    and otherwise to the next of `NODE_BUCKETS`.
    """
    power = 1 << (nodes - 1).bit_length()
    if rows * power <= _FREE_TOKENS:
        return power
    return next(bucket for bucket in NODE_BUCKETS if bucket >= nodes)


def key_bucket(keys: int) -> int:
    """Round a number of keys up to the next power of two or 3/4 of a power of two; the smallest result is 256.

    A step reads this number of keys, or all keys of a smaller cache. Each bucket has separate graphs. A text that grows
    from 256 keys to 32k uses 15 buckets.
    """
    power = max(_KEY_BUCKET, 1 << (keys - 1).bit_length())
    return power * 3 // 4 if power > _KEY_BUCKET and keys <= power * 3 // 4 else power


@dataclass(frozen=True)
class TreeLayout:
    """Shapes of the trees of a step; they are copied to the device only if they differ from the shapes of the previous
    step.
    """

    shapes: tuple[TreeShape, ...]
    firsts: tuple[int, ...]
    """Number of nodes of each tree that are already cached; the step runs the other nodes."""

    @property
    def counts(self) -> list[int]:
        return [len(shape) - first for shape, first in zip(self.shapes, self.firsts, strict=True)]


class StaticInputs:
    """Inputs of a step, all on the model's device. Each row has a tree of ``span`` nodes; the last ``nodes`` run.

    ``tokens`` (rows, nodes) · ``starts`` (rows,): position of each row's root in the cache · ``firsts`` (rows,): number
    of cached nodes · ``depths`` (rows, nodes): depths of the running nodes · ``key_depths`` (rows, span): depths of all
    nodes · ``hidden_from`` (rows, nodes, span): true if a node must not attend to another node.
    """

    def __init__(self, rows: int, nodes: int, span: int, device: torch.device) -> None:
        self._step_shapes: Shapes = ((rows,), (rows, nodes))
        self._tree_shapes: Shapes = ((rows,), (rows, nodes), (rows, span))
        self._step, (self.starts, self.tokens) = _side_by_side(self._step_shapes, device)
        self._tree, (self.firsts, self.depths, self.key_depths) = _side_by_side(self._tree_shapes, device)
        self.hidden_from = torch.zeros(rows, nodes, span, dtype=torch.bool, device=device)
        self._layout: TreeLayout | None = None

    def fill(self, layout: TreeLayout, starts: Sequence[int], tokens: Tensor | Sequence[Sequence[int]]) -> None:
        """Copy the inputs of a step: the layout only if it changed, everything else in one copy.

        ``tokens`` are the running tokens: lists on the host, or a (rows, nodes) tensor that stays on the device. The
        rest of the bucket is padding, and no node of a tree attends to it.
        """
        if layout != self._layout:
            self._fill_layout(layout)
            self._layout = layout
        host, (host_starts, host_tokens) = _side_by_side(self._step_shapes, self._step.device, True)
        host_starts[: len(starts)] = torch.tensor(starts)
        if isinstance(tokens, Tensor):
            end = len(self.starts)
            self._step[:end].copy_(host[:end], non_blocking=True)
            self.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
            return
        width = host_tokens.shape[1]
        host_tokens[: len(tokens)] = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        self._step.copy_(host, non_blocking=True)

    def _fill_layout(self, layout: TreeLayout) -> None:
        host, (firsts, depths, key_depths) = _side_by_side(self._tree_shapes, self._tree.device, True)
        hidden_from = torch.ones(self.hidden_from.shape, dtype=torch.bool, pin_memory=self._tree.is_cuda)
        # Every node, even padding, attends to at least one key.
        # In fp16 a softmax over no keys is NaN, and the NaN would stay in the cache.
        hidden_from.diagonal(dim1=1, dim2=2).fill_(False)
        for row, (shape, first) in enumerate(zip(layout.shapes, layout.firsts, strict=True)):
            own = len(shape) - first
            firsts[row] = first
            depths[row, :own] = shape.depth_tensor[first:]
            key_depths[row, : len(shape)] = shape.depth_tensor
            hidden_from[row, :own, : len(shape)] = ~shape.ancestor_mask[first:]
        self._tree.copy_(host, non_blocking=True)
        self.hidden_from.copy_(hidden_from, non_blocking=True)


def _side_by_side(shapes: Shapes, device: torch.device, on_host: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Make a buffer of zeros that one copy can fill; return the buffer and its parts of these shapes.

    A buffer ``on_host`` is pinned for a GPU, so that copying does not block. PyTorch reuses the memory only after the
    copy.
    """
    sizes = list(map(prod, shapes))
    pinned = on_host and device.type == "cuda"
    buffer = torch.zeros(sum(sizes), dtype=torch.long, device="cpu" if on_host else device, pin_memory=pinned)
    return buffer, [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


class StaticSteps:
    """Runner of one model's steps on one cache, with one graph for each bucket that is used.

    In the mode ``auto``, all steps switch to dynamic shapes as soon as a step cannot be recorded.
    """

    def __init__(
        self, model: PreTrainedModel, masks: TreeMasks, max_positions: int | None, mode: str, dynamic: DynamicSteps
    ) -> None:
        """``max_positions``: number of the model's position embeddings; None for unlimited rotary embeddings."""
        if mode not in STATIC_MODES:
            raise UserError(f"static mode is {mode!r}: use one of {', '.join(STATIC_MODES)}")
        if reason := why_not_static(model):
            raise UserError(reason)
        self._model = model
        self._masks = masks
        self._max_positions = max_positions
        self.captures = mode != "eager"
        self.gave_way = False
        """True once steps have switched to dynamic shapes."""
        self.may_give_way = mode == "auto"
        self._dynamic = dynamic
        self._steps: dict[Size, _Bucket] = {}
        self._buffers = 0
        self.pool: Any = None
        """Memory pool shared by all graphs: they never run concurrently, and outputs are read before the next step."""
        self.stream: torch.cuda.Stream | None = None
        """The stream of all recordings. PyTorch's own stream for recordings is on the GPU that was used first."""

    def drop_graphs(self) -> None:
        """Drop all graphs, and with them their memory and their references to a cache."""
        self._steps, self.pool = {}, None

    def capacity(self, wanted: int) -> int:
        """Return the capacity with which a cache for ``wanted`` positions never grows because of padding.

        It need not be a bucket: buffers for 32 texts of an 8B model take 4 GiB for each 1,024 positions.
        """
        return max(_KEY_BUCKET, rounded_up(wanted + NODE_BUCKETS[-1]))

    def fits(self, trees: Sequence[TokenTree]) -> bool:
        """Return True if steps still have fixed shapes and the largest tree fits into the largest bucket."""
        return not self.gave_way and max(len(tree) for tree in trees) <= NODE_BUCKETS[-1]

    @torch.inference_mode()
    def run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run ``trees[i]`` after row i; return hidden states (rows, nodes, hidden) and logits (rows, nodes, vocab).

        Smaller trees are padded. Row i runs its nodes from ``first[i]`` on; earlier nodes are cached. ``taps``: also
        return these nodes' states after these layers. The model's next step overwrites the results.
        """
        layout = TreeLayout(tuple(tree.shape for tree in trees), tuple(first or [0] * len(trees)))
        tokens: Tensor | list[list[int]]
        if all(tree.on_host for tree in trees):
            tokens = [tree.token_list[skipped:] for tree, skipped in zip(trees, layout.firsts, strict=True)]
        else:  # tokens stay on the device, because the target verifies a draft's tokens before the host reads them
            device = next(tree.tokens.device for tree in trees if not tree.on_host)
            parts = [tree.tokens[skipped:] for tree, skipped in zip(trees, layout.firsts, strict=True)]
            tokens = stacked(parts, max(layout.counts), device)
        output = self._run(layout, tokens, cache, taps)
        return output or self._dynamic.run(trees, cache, layout.firsts, None, taps=taps)

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: PreallocatedCache) -> ModelOutput:
        """Run ``tokens[i]`` after row i; ``tokens`` (rows,) is on the device.

        Returns hidden states (rows, 1, hidden) and logits (rows, 1, vocab).
        """
        layout = TreeLayout((TreeShape.chain(0),) * len(tokens), (0,) * len(tokens))
        return self._run(layout, tokens[:, None], cache) or self._dynamic.step(tokens, cache)

    def _run(
        self,
        layout: TreeLayout,
        tokens: Tensor | Sequence[Sequence[int]],
        cache: PreallocatedCache,
        taps: Sequence[int] = (),
    ) -> ModelOutput | None:
        """Run a step. If steps have switched to dynamic shapes, do nothing and return None."""
        if self.gave_way:
            return None
        asked, counts = len(layout.shapes), layout.counts
        starts = [held - first for held, first in zip(cache.lengths, layout.firsts, strict=False)]
        rows = min(cache.rows, row_bucket(asked))
        nodes = node_bucket(rows, max(counts))
        span = nodes if not any(layout.firsts) else node_bucket(rows, max(map(len, layout.shapes)))
        needed = max(cache.lengths[:asked]) + nodes
        cache.reserve(needed)
        keys = min(cache.capacity, key_bucket(needed))
        bucket = self._bucket(Size(rows, nodes, span, keys, tuple(taps)), cache)
        bucket.inputs.fill(layout, starts, tokens)
        if (output := self._try(bucket)) is None:
            return None
        hidden, logits, states = output
        cache.advance(range(asked), counts)
        widest = max(counts)
        return ModelOutput(
            hidden[:asked, :widest], logits[:asked, :widest], tuple(row[:widest] for row in states[:asked])
        )

    def _try(self, bucket: "_Bucket") -> ModelOutput | None:
        """Run a bucket's step. If it fails in the mode ``auto``, warn, drop all graphs and return None."""
        try:
            return bucket.run()
        except Exception as error:  # any type of error, because the model's code ran
            if not self.may_give_way:
                raise
            first = error.__context__ or error  # the end of a failed recording fails too and hides the cause
            cause = str(first).strip().partition("\n")[0] or type(first).__name__
            warnings.warn(
                f"the model's steps cannot be recorded as CUDA graphs, so they run in dynamic shapes: {cause}",
                stacklevel=2,
            )
        self.gave_way = True
        self.drop_graphs()
        return None

    def _bucket(self, size: Size, cache: PreallocatedCache) -> "_Bucket":
        if cache.buffers != self._buffers:
            self.drop_graphs()  # graphs recorded on replaced buffers are invalid
            self._buffers = cache.buffers
        if size not in self._steps:
            self._steps[size] = _Bucket(self, cache, size)
        return self._steps[size]

    @torch.inference_mode()
    def prepare(
        self, cache: PreallocatedCache, asked: int, nodes: Sequence[int], longest: int, taps: Sequence[int] = ()
    ) -> None:
        """Record graphs for the next steps: for all shapes seen so far, and for trees of ``nodes`` nodes with ``taps``.

        The graphs cover the next `_AHEAD` buckets of keys that texts in the first ``asked`` rows will reach, up to
        ``longest`` positions. Recording writes into the cache only after the ends of the texts.
        """
        if self.gave_way or not (self.captures and asked and cache.device):
            return
        rows, lengths = min(cache.rows, row_bucket(asked)), cache.lengths[:asked]
        kinds = {(size.nodes, size.span, size.taps) for size in self._steps if size.rows == rows}
        kinds |= {(bucket, bucket, tuple(taps)) for bucket in (node_bucket(rows, count) for count in nodes)}
        layout = TreeLayout((TreeShape.chain(0),) * asked, (0,) * asked)
        for own, span, tapped in sorted(kinds):
            cache.reserve(max(lengths) + own)
            keys, most = key_bucket(max(lengths) + own), min(cache.capacity, key_bucket(longest + own))
            for _ in range(_AHEAD):
                bucket = self._bucket(Size(rows, own, span, min(keys, most), tapped), cache)
                if not bucket.has_run:
                    bucket.inputs.fill(layout, lengths, [[0]] * asked)
                    if self._try(bucket) is None:
                        return
                keys = key_bucket(min(keys, most) + 1)

    def compute(self, inputs: StaticInputs, cache: PreallocatedCache, size: Size) -> ModelOutput:
        """Compute a step with the same kernels, in the same order, as every other step of the bucket."""
        node_index = torch.arange(size.nodes, device=inputs.tokens.device)
        positions = inputs.depths + inputs.starts[:, None]
        if self._max_positions is not None:
            positions = positions.clamp(max=self._max_positions - 1)
        cache.begin_static((inputs.starts + inputs.firsts)[:, None] + node_index, size.keys)
        begin, trees = inputs.starts[:, None], (inputs.depths, inputs.key_depths, inputs.hidden_from)
        masks = self._masks.by_layer_type(
            lambda window: self._masks.additive(blocked_keys(begin, *trees, size.keys, window))
        )
        try:
            return run_model(self._model, inputs.tokens, positions, cache, masks, None, size.taps)
        finally:
            cache.block = None


class _Bucket:
    """The steps with one shape: their inputs, and their CUDA graph once it is recorded."""

    def __init__(self, owner: StaticSteps, cache: PreallocatedCache, size: Size) -> None:
        assert cache.device is not None, "a prefill comes before the first step"
        self.inputs = inputs = StaticInputs(size.rows, size.nodes, size.span, cache.device)
        self.has_run = False
        # A cycle of references would keep graphs and buffers of a dropped model until a garbage collection.
        self._owner = owner = proxy(owner)
        self._device = cache.device
        self._compute: Callable[[], ModelOutput] = lambda: owner.compute(inputs, cache, size)
        self._recorded: tuple[torch.cuda.CUDAGraph, ModelOutput] | None = None

    def run(self) -> ModelOutput:
        self.has_run = True
        if not self._owner.captures or self._device.type != "cuda":
            return self._compute()
        with torch.cuda.device(self._device):
            if self._recorded is None:
                with _RECORDING:
                    self._recorded = self._record()
            graph, outputs = self._recorded
            graph.replay()
        return outputs

    def _record(self) -> tuple[torch.cuda.CUDAGraph, ModelOutput]:
        """Record the step as a CUDA graph; return the graph and the tensors into which each replay writes its outputs.

        The warm-up runs the step on its real inputs. This is harmless, because every run, including the replay, writes
        the same keys and values to the same positions.
        """
        owner, before = self._owner, torch.cuda.current_stream()
        owner.stream = stream = owner.stream or torch.cuda.Stream()
        owner.pool = owner.pool or torch.cuda.graph_pool_handle()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            self._compute()
            (self._compute_without_waiting if owner.may_give_way else self._compute)()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU during capture: for a training run's next batch, or as NCCL's watchdog.
        # The outer context restores the stream: after a failed capture, torch leaves its own stream as the current one.
        with torch.cuda.stream(before), torch.cuda.graph(graph, owner.pool, stream, capture_error_mode="thread_local"):
            return graph, self._compute()

    def _compute_without_waiting(self) -> None:
        """Run the step; raise RuntimeError if it makes the host wait for the GPU.

        Recording such a step fails, and PyTorch's allocator and random numbers may stay in the middle of the recording.
        """
        mode, thread, waits = torch.cuda.get_sync_debug_mode(), get_ident(), list[str]()

        def note(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
            if "synchronizing CUDA operation" in str(message) and get_ident() == thread:  # other threads may wait
                waits.append(f"{filename}:{lineno}")

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        if waits:
            raise RuntimeError(f"{waits[0]} makes the host wait for the GPU")
