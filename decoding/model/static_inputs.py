"""Inputs of steps of fixed shapes: buckets that shapes are rounded up to, and tensors of fixed address for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.rules.tree import TreeShape

NODE_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_FREE_TOKENS = 64
"""Tokens in a pass up to which a GPU takes no longer than for a single token: there, a few large buckets suffice."""
_KEY_BUCKET = 256
_ALIGNMENT = 8  # bytes


class Size(NamedTuple):
    """The shape of a bucket's steps: in each row ``nodes`` of a tree of ``span`` run, and see ``keys`` positions."""

    rows: int
    nodes: int
    span: int
    keys: int
    last_only: bool
    """True if the lm_head computes logits of each row's last node alone."""
    added: int = 0
    """Width of the additions to the nodes' embeddings; 0 for none."""


def row_bucket(rows: int) -> int:
    """Round up a number of rows to a power of two.

    Caches are made with that number of rows: else the shape of a step, and in bf16 its rounding, would depend on the
    batches that the cache served before.
    """
    return 1 << (rows - 1).bit_length()


def node_bucket(rows: int, nodes: int) -> int:
    """Round up the ``nodes`` of each row: to a power of two up to `_FREE_TOKENS` in all, else to `NODE_BUCKETS`."""
    power = 1 << (nodes - 1).bit_length()
    if rows * power <= _FREE_TOKENS:
        return power
    return next(bucket for bucket in NODE_BUCKETS if bucket >= nodes)


def key_bucket(keys: int) -> int:
    """Round up a number of keys, at least to 256: to a power of two, or to three quarters of one.

    Each bucket has graphs of its own: a text that grows from 256 keys to 32k meets 15 of them.
    """
    power = max(_KEY_BUCKET, 1 << (keys - 1).bit_length())
    return power * 3 // 4 if power > _KEY_BUCKET and keys <= power * 3 // 4 else power


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
class Layout:
    """Shapes of a step's trees. A step with the same layout as the one before needs no copy of the tree fields."""

    shapes: tuple[TreeShape, ...]
    firsts: tuple[int, ...]
    """Number of nodes of each tree that are in the cache already; the others run."""

    @property
    def counts(self) -> list[int]:
        return [len(shape) - first for shape, first in zip(self.shapes, self.firsts, strict=True)]


class StaticInputs:
    """Inputs of a step, all on the model's device. Each row has a tree of ``span`` nodes; the last ``nodes`` of it run.

    ``tokens`` (rows, nodes) · ``starts`` (rows,): place of each row's root in its slot · ``dropped`` (rows,): number of
    its text's positions before that slot's first · ``firsts`` (rows,): number of cached nodes · ``last`` (rows,): index
    of each row's last own node among those that run, the rest being padding · ``depths`` (rows, nodes): depths of the
    nodes that run · ``key_depths`` (rows, span): depths of all nodes · ``hidden_from`` (rows, nodes, span): true where
    a node must not attend to another · ``added`` (rows, nodes, width): additions to the nodes' embeddings, or None.
    """

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        rows, nodes, span = size[:3]
        integers, flags = torch.long, torch.bool
        self._step = _Fields([((rows,), integers), ((rows,), integers), ((rows, nodes), integers)], device)
        self._tree = _Fields(
            [((rows,), integers)] * 2
            + [((rows, nodes), integers), ((rows, span), integers), ((rows, nodes, span), flags)],
            device,
        )
        self.starts, self.dropped, self.tokens = self._step.tensors
        self.firsts, self.last, self.depths, self.key_depths, self.hidden_from = self._tree.tensors
        self.added = torch.zeros(rows, nodes, size.added, dtype=dtype, device=device) if size.added else None
        self._layout: Layout | None = None

    def add(self, added: Tensor) -> None:
        """Copy the additions of a step in, (rows, nodes, width) of those that run; those of the others are zero."""
        assert self.added is not None
        self.added.zero_()
        self.added[: added.shape[0], : added.shape[1]].copy_(added)

    def fill(
        self,
        layout: Layout,
        starts: Sequence[int],
        dropped: Sequence[int],
        tokens: Tensor | Sequence[Sequence[int]],
    ) -> None:
        """Copy a step in: the layout only if it changed, the rest in one copy.

        ``tokens``: the tokens that run, as lists on the host, or as a (rows, nodes) tensor, which never leaves the
        device. The rest of the bucket is padding, to which no node of a tree attends.
        """
        if layout != self._layout:
            self._fill_layout(layout)
            self._layout = layout
        host, (host_starts, host_dropped, host_tokens) = self._step.staged()
        missing = [0] * (len(self.starts) - len(starts))
        host_starts[:] = torch.tensor([*starts, *missing])
        host_dropped[:] = torch.tensor([*dropped, *missing])
        if isinstance(tokens, Tensor):
            end = self.starts.nbytes + self.dropped.nbytes
            self._step.bytes[:end].copy_(host[:end], non_blocking=True)
            self.tokens[: tokens.shape[0], : tokens.shape[1]].copy_(tokens)
            return
        width = host_tokens.shape[1]
        padded = [[*row, *[0] * (width - len(row))] for row in tokens] + [[0] * width for _ in missing]
        host_tokens[:] = torch.tensor(padded)
        self._step.bytes.copy_(host, non_blocking=True)

    def _fill_layout(self, layout: Layout) -> None:
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
