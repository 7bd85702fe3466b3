"""Steps with dynamic shapes, for targets and drafts. A step runs tokens or a tree after each row of a cache.

Each node of a tree attends to its row's prefix and to its own path.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decoding.model.cache import PreallocatedCache
from decoding.model.forward import ModelOutput, run_model
from decoding.rules.tree import TokenTree, TreeShape

_APPENDED_TOKENS = 1 << 10
"""Largest number of tokens in one appending pass. The number is limited because each token has a mask row over all
keys.
"""


_LARGEST_STORED = 256
"""Shapes of up to this many nodes are kept on the device. Larger shapes are appended texts and rarely recur."""


def blocked_keys(
    begin: Int[Tensor, "rows 1"],
    depths: Int[Tensor, "rows nodes"],
    key_depths: Int[Tensor, "rows span"],
    hidden_from: Bool[Tensor, "rows nodes span"],
    keys: int,
    window: int | None,
) -> Bool[Tensor, "rows nodes keys"]:
    """Mark, among a row's first ``keys`` positions, those to which each node must not attend.

    A row's keys are first its prefix, then the tree's nodes, which start at position ``begin``, and then padding.
    ``depths`` are the depths of the running nodes, and ``key_depths`` are the depths of all nodes. ``hidden_from``
    marks, for each node, the nodes that are not on the path to it.
    """
    key, span = torch.arange(keys, device=begin.device)[None], key_depths.shape[1]
    node = (key - begin).clamp(0, span - 1)
    behind_prefix = key >= begin
    hidden = hidden_from.gather(2, node[:, None].expand(-1, depths.shape[1], -1))
    blocked = behind_prefix[:, None] & (hidden | (key >= begin + span)[:, None])
    if window is not None:
        key_positions = torch.where(behind_prefix, begin + key_depths.gather(1, node), key)
        blocked = blocked | ((depths + begin)[:, :, None] - key_positions[:, None] >= window)
    return blocked


class TreeMasks:
    """Maker of a model's attention masks, in which each node attends to its row's prefix and to its own path."""

    def __init__(self, model: PreTrainedModel, windows: dict[str, int | None]) -> None:
        """``windows`` come from `decoding.model.architecture.windows`."""
        self.windows = windows
        self._model = model

    def of_trees(self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int) -> Any:
        """Make additive masks for these trees, of shape (rows, 1, queries, keys). They are additive because eager
        attention silently misreads boolean 4-D masks.

        Returns one mask for all layers, or a dict by layer type if the model mixes full and sliding attention.
        """
        make = self._shared if len(set(starts)) == len(set(first)) == len(set(shapes)) == 1 else self._ragged
        return self.by_layer_type(lambda window: make(shapes, starts, first, size, window))

    def by_layer_type(self, make: Callable[[int | None], Tensor]) -> Any:
        """Make a mask for each window; return the only mask, or a dict by layer type."""
        masks = {kind: make(window) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else masks["full_attention"]

    def additive(self, blocked: Bool[Tensor, "rows nodes keys"]) -> Float[Tensor, "rows 1 nodes keys"]:
        """Return the additive mask in the model's dtype."""
        dtype = self._model.dtype
        mask = torch.zeros(blocked.shape, dtype=dtype, device=blocked.device)
        return mask.masked_fill_(blocked, torch.finfo(dtype).min)[:, None]

    def _shared(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        """Make one mask of shape (1, 1, queries, keys) for rows with equal lengths and equal trees."""
        start, device = starts[0], self._model.device
        depths, hidden = self._of(shapes[0])
        blocked = torch.zeros(size, start + len(depths), dtype=torch.bool, device=device)
        blocked[:, start:] = hidden[first[0] :]
        if window is not None and start + shapes[0].max_depth >= window:
            key_positions = torch.cat([torch.arange(start, device=device), depths + start])
            blocked |= depths[first[0] :, None] + start - key_positions >= window
        return self.additive(blocked[None])

    def _ragged(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        """Make the rows' masks, of shape (rows, 1, queries, keys), with padding."""
        device, span = self._model.device, max(skipped + size for skipped in first)
        hidden_from = torch.ones(len(shapes), size, span, dtype=torch.bool, device=device)
        key_depths = torch.zeros(len(shapes), span, dtype=torch.long, device=device)
        depths = torch.zeros(len(shapes), size, dtype=torch.long, device=device)
        for row, (shape, skipped) in enumerate(zip(shapes, first, strict=True)):
            key_depths[row, : len(shape)], hidden = self._of(shape)
            hidden_from[row, : len(shape) - skipped, : len(shape)] = hidden[skipped:]
            depths[row, : len(shape) - skipped] = key_depths[row, skipped : len(shape)]
        begin = torch.tensor(starts).to(device, non_blocking=True)[:, None]
        width = max(start + skipped for start, skipped in zip(starts, first, strict=True)) + size
        return self.additive(blocked_keys(begin, depths, key_depths, hidden_from, width, window))

    def _of(self, shape: TreeShape) -> tuple[Tensor, Tensor]:
        return (of_shape if len(shape) <= _LARGEST_STORED else of_shape.__wrapped__)(shape, self._model.device)


@lru_cache(maxsize=256)
def of_shape(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tensors on a device: each node's depth, and for each node a mask that is true at the nodes to which it
    must not attend.
    """
    both = shape.depth_tensor, ~shape.ancestor_mask
    depths, hidden = (tensor.to(device, non_blocking=True) for tensor in both)
    return depths, hidden


class DynamicSteps:
    """Runner of one model's steps, on any number of caches."""

    def __init__(self, model: PreTrainedModel, masks: TreeMasks, max_positions: int | None) -> None:
        """``max_positions``: number of the model's position embeddings; None for unlimited rotary embeddings."""
        self._model = model
        self._masks = masks
        self._max_positions = max_positions

    def append(
        self, blocks: Sequence[Sequence[int]], cache: PreallocatedCache, taps: Sequence[int] = ()
    ) -> ModelOutput:
        """Run a chain of tokens after each row, in pieces of up to `_APPENDED_TOKENS` tokens.

        Returns hidden state and logits of each row's last token, of shapes (rows, 1, hidden) and (rows, 1, vocab).
        ``taps``: also return the states of all these tokens.
        """
        longest, size = max(map(len, blocks)), max(1, _APPENDED_TOKENS // len(blocks))
        last: ModelOutput | None = None
        states: list[list[Tensor]] = [[] for _ in blocks]
        for begin in range(0, longest, size):
            pieces = [block[begin : begin + size] for block in blocks]
            # A finished row runs one dummy token that the cache does not keep.
            trees = [TokenTree.chain(piece or [0]) for piece in pieces]
            select = last_of([len(tree) for tree in trees], 1, self._model.device)
            kept = None if all(pieces) else [len(piece) for piece in pieces]
            output = self.run(trees, cache, [0] * len(trees), select, kept, taps)
            for row, piece, of_piece in zip(states, pieces, output.states, strict=bool(taps)):
                row.append(of_piece[: len(piece)])
            if last is None or kept is None:
                last = output
                continue
            runs = torch.tensor([bool(piece) for piece in pieces])[:, None, None]
            runs = runs.to(self._model.device, non_blocking=True)
            hidden = torch.where(runs, output.hidden, last.hidden)
            last = ModelOutput(hidden, torch.where(runs, output.logits, last.logits))
        assert last is not None, "there is no token to append"
        return last._replace(states=tuple(map(torch.cat, states)) if taps else ())

    def step(self, tokens: Int[Tensor, " rows"], cache: PreallocatedCache, taps: Sequence[int] = ()) -> ModelOutput:
        """Run one token after each row, as a tree with one node.

        Returns hidden states (rows, 1, hidden) and logits (rows, 1, vocab).
        """
        rows, starts = len(tokens), cache.lengths[: len(tokens)]
        masks = None  # `transformers` builds the masks of these layers
        if len(set(starts)) > 1 or any(self._masks.windows.values()):
            masks = self._masks.of_trees([TreeShape.chain(0)] * rows, starts, [0] * rows, 1)
        positions = self._positions(starts, 0)
        cache.begin(range(rows), 1, self._model.device)
        output = run_model(self._model, tokens[:, None], positions, cache, masks, None, taps)
        cache.end([1] * rows)
        return output

    def run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int],
        select: Callable[[Tensor], Tensor] | None,
        kept: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run node ``first[row]`` of each tree and all nodes after it. The cache keeps the first ``kept[row]`` of these
        nodes (None: all).

        Returns hidden states (rows, nodes, hidden) and logits (rows, nodes, vocab) for the nodes that ``select`` picks.
        ``taps``: also return each row's states at all nodes, with padding.
        """
        counts = [len(tree) - skipped for tree, skipped in zip(trees, first, strict=True)]
        size = max(counts)
        fresh = [tree.tokens[skipped:] for tree, skipped in zip(trees, first, strict=True)]
        tokens = stacked(fresh, size, self._model.device)
        if size == 1 and kept is None and not any(first):
            return self.step(tokens[:, 0], cache, taps)
        shapes = [tree.shape for tree in trees]
        if len(set(shapes)) == len(set(first)) == 1:
            depths = shapes[0].depth_tensor[first[0] :].to(self._model.device, non_blocking=True)
        else:
            own = [shape.depth_tensor[skipped:] for shape, skipped in zip(shapes, first, strict=True)]
            depths = stacked(own, size, self._model.device)
        starts = [cache.lengths[row] - skipped for row, skipped in enumerate(first)]
        positions = self._positions(starts, depths)
        masks = self._masks.of_trees(shapes, starts, first, size)
        keys = cache.begin(range(len(trees)), size, self._model.device, counts)
        mask = _narrowed(masks, keys)
        output = run_model(self._model, tokens, positions, cache, mask, select, taps)
        cache.end(counts if kept is None else kept)
        return output

    def _positions(self, starts: Sequence[int], depths: Tensor | int) -> Tensor:
        """Return the nodes' positions, of shape (rows, nodes). A position is the row's start plus the node's depth."""
        positions = depths + torch.tensor(starts).to(self._model.device, non_blocking=True)[:, None]
        if self._max_positions is not None:  # the padding of a finished row may go past the end of the position table
            positions.clamp_(max=self._max_positions - 1)
        return positions


def stacked(parts: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Stack the parts to (rows, size, …) on a device, with shorter parts padded by zeros."""
    parts = [part if part.device == device else part.to(device, non_blocking=True) for part in parts]
    if all(len(part) == size for part in parts):
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)
    padded = pad_sequence(list(parts), batch_first=True)
    if not (missing := size - padded.shape[1]):
        return padded
    return torch.cat([padded, padded.new_zeros(len(parts), missing, *padded.shape[2:])], dim=1)


def last_of(lengths: Sequence[int], count: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that selects each row's last ``count`` own positions, (rows, count, hidden)."""
    if len(set(lengths)) == 1:
        return lambda hidden: hidden[:, -count:]
    ends = torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    index = ends + torch.arange(-count, 0, device=device)
    rows = torch.arange(len(lengths), device=device)[:, None]

    def select(hidden: Tensor) -> Tensor:
        return hidden[rows.to(hidden.device), index.to(hidden.device)]

    return select


def _narrowed(masks: Any, keys: int) -> Any:
    """Return the masks for the first ``keys`` positions; later positions are only padding."""
    if isinstance(masks, dict):
        return {kind: mask[..., :keys] for kind, mask in masks.items()}
    return masks[..., :keys]
