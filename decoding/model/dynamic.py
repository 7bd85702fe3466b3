"""Steps in the shapes in which they come, for target and draft: tokens or trees after each row of a cache.

Each node of a tree attends to its row's prefix and to its own path.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decoding.model.cache import PreallocatedCache
from decoding.model.forward import ModelOutput, run_model
from decoding.rules.tree import TokenTree, TreeShape

_APPENDED_TOKENS = 1 << 10
"""Greatest number of tokens that all rows together append in one pass: each has a mask of as many numbers as keys."""


_MOST_STORED = 256
_LARGEST_STORED = 256
"""Limits on stored tree masks: their number, and the nodes of the largest. A block of appended text has more nodes, and
its shape seldom occurs again."""


class TreeMasks:
    """Maker of the masks of one model; the masks among the nodes of small trees are stored."""

    def __init__(self, model: PreTrainedModel, windows: dict[str, int | None]) -> None:
        """Take the ``windows`` of `decoding.model.architecture.windows`."""
        self.windows = windows
        self._model = model
        self._stored: dict[TreeShape, Tensor] = {}

    def of_trees(self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int) -> Any:
        """Make additive masks (rows, 1, queries, keys): boolean 4-D masks are silently wrong under eager attention.

        Returns one mask for all layers, or a dict by layer type for models that mix full and sliding attention.
        """
        masks = {kind: self._mask(shapes, starts, first, size, window) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else masks["full_attention"]

    def _mask(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        if len(set(starts)) == len(set(first)) == len(set(shapes)) == 1:
            return self._shared_mask(shapes[0], starts[0], first[0], window)
        return self._ragged_mask(shapes, starts, first, size, window)

    def _shared_mask(self, shape: TreeShape, start: int, first: int, window: int | None) -> Tensor:
        """Make one mask for all rows, (1, 1, queries, keys): they have the same length and the same tree."""
        nodes = len(shape)
        mask = torch.zeros(nodes - first, start + nodes, dtype=self._model.dtype, device=self._model.device)
        mask[:, start:] = self.among_nodes(shape)[first:]
        if window is not None and start + shape.max_depth >= window:
            depths = shape.depth_tensor.to(self._model.device)
            key_positions = torch.cat([torch.arange(start, device=self._model.device), depths + start])
            too_far = (depths[first:, None] + start) - key_positions >= window
            mask.masked_fill_(too_far, torch.finfo(self._model.dtype).min)
        return mask[None, None]

    def _ragged_mask(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        """Make a mask for each row. A row's keys are its prefix, its tree's nodes, then padding that is masked out."""
        device, blocked = self._model.device, torch.finfo(self._model.dtype).min
        nodes = max(skipped + size for skipped in first)
        if len(set(shapes)) == len(set(first)) == 1:
            tree_masks = self.among_nodes(shapes[0])[first[0] :].expand(len(shapes), -1, -1)
            depths = shapes[0].depth_tensor.to(device).expand(len(shapes), -1)
        else:
            tree_masks = torch.full((len(shapes), size, nodes), blocked, dtype=self._model.dtype, device=device)
            depths = torch.zeros(len(shapes), nodes, dtype=torch.long, device=device)
            for row, (shape, skipped) in enumerate(zip(shapes, first, strict=True)):
                tree_masks[row, : len(shape) - skipped, : len(shape)] = self.among_nodes(shape)[skipped:]
                depths[row, : len(shape)] = shape.depth_tensor.to(device)
        begin = torch.tensor(starts).to(device, non_blocking=True)[:, None]
        width = max(start + skipped for start, skipped in zip(starts, first, strict=True)) + size
        keys = torch.arange(width, device=device)[None]
        node = (keys - begin).clamp(0, nodes - 1)
        behind_prefix = (keys >= begin)[:, None]
        mask = tree_masks.gather(2, node[:, None].expand(-1, size, -1))
        mask = torch.where(
            behind_prefix & (keys < begin + nodes)[:, None], mask, torch.where(behind_prefix, blocked, 0.0)
        )
        if window is not None:
            key_positions = torch.where(keys < begin, keys, begin + depths.gather(1, node))
            queries = torch.stack([depths[row, skipped : skipped + size] for row, skipped in enumerate(first)]) + begin
            mask = mask.masked_fill(queries[:, :, None] - key_positions[:, None] >= window, blocked)
        return mask.to(self._model.dtype)[:, None]

    def among_nodes(self, shape: TreeShape) -> Tensor:
        """Return the additive mask among a tree's nodes, (nodes, nodes); it is stored for small trees."""
        if shape in self._stored:
            return self._stored[shape]
        mask = torch.full(
            (len(shape),) * 2, torch.finfo(self._model.dtype).min, dtype=self._model.dtype, device=self._model.device
        )
        if shape.is_chain:
            mask.triu_(1)
        else:
            mask.masked_fill_(shape.ancestor_mask.to(self._model.device), 0)
        if len(shape) <= _LARGEST_STORED:
            if len(self._stored) >= _MOST_STORED:  # dynamic trees: keep the memory bounded
                self._stored.clear()
            self._stored[shape] = mask
        return mask


class DynamicSteps:
    """Runner of one model's steps, on any number of caches."""

    def __init__(self, model: PreTrainedModel, masks: TreeMasks, max_positions: int | None) -> None:
        """``max_positions``: places that the model has embeddings for; None for rotary embeddings of any place."""
        self._model = model
        self._masks = masks
        self._max_positions = max_positions

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def append(
        self, blocks: Sequence[Sequence[int]], cache: PreallocatedCache, keep_states: bool = False
    ) -> ModelOutput:
        """Run a chain of tokens after each row, in pieces of up to `_APPENDED_TOKENS` tokens.

        Returns hidden state and logits of each row's last token, (rows, 1, hidden) and (rows, 1, vocab); with
        ``keep_states`` also the states of all tokens of each row.
        """
        longest, size = max(map(len, blocks)), max(1, _APPENDED_TOKENS // len(blocks))
        last: ModelOutput | None = None
        states: list[list[Tensor]] = [[] for _ in blocks]
        for begin in range(0, longest, size):
            pieces = [block[begin : begin + size] for block in blocks]
            # A row that is done runs one token more, of which the cache keeps nothing.
            trees = [TokenTree.chain(piece or [0]) for piece in pieces]
            select = last_of([len(tree) for tree in trees], 1, self._device)
            kept = None if all(pieces) else [len(piece) for piece in pieces]
            output = self.run(trees, cache, [0] * len(trees), select, kept, keep_states)
            for row, piece, of_piece in zip(states, pieces, output.states, strict=keep_states):
                row.append(of_piece[: len(piece)])
            if last is None or kept is None:
                last = output
                continue
            runs = torch.tensor([bool(piece) for piece in pieces]).to(self._device, non_blocking=True)[:, None, None]
            hidden = torch.where(runs, output.hidden, last.hidden)
            last = ModelOutput(hidden, torch.where(runs, output.logits, last.logits))
        assert last is not None, "there is no token to append"
        return last._replace(states=tuple(map(torch.cat, states)) if keep_states else ())

    def step(self, tokens: Int[Tensor, " rows"], cache: PreallocatedCache) -> ModelOutput:
        """Run one token after each row, a tree of a root alone; return (rows, 1, hidden) and (rows, 1, vocab)."""
        rows, starts = len(tokens), cache.lengths[: len(tokens)]
        masks = None  # `transformers` builds the masks of its layers
        if len(set(starts)) > 1 or any(self._masks.windows.values()):
            masks = self._masks.of_trees([TreeShape.chain(0)] * rows, starts, [0] * rows, 1)
        positions = self._positions(starts, cache, 0)
        cache.begin(range(rows), 1, self._device)
        output = run_model(self._model, tokens[:, None], positions, cache, masks)
        cache.end([1] * rows)
        return output

    def run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int],
        select: Callable[[Tensor], Tensor] | None,
        kept: Sequence[int] | None = None,
        keep_states: bool = False,
    ) -> ModelOutput:
        """Run the nodes of each tree from ``first`` on; the cache keeps the first ``kept`` of them (None: all).

        Returns (rows, nodes, hidden) and (rows, nodes, vocab), of the positions alone that ``select`` picks; with
        ``keep_states`` also each row's states of all nodes, padding included.
        """
        counts = [len(tree) - skipped for tree, skipped in zip(trees, first, strict=True)]
        size = max(counts)
        fresh = [tree.tokens[skipped:] for tree, skipped in zip(trees, first, strict=True)]
        tokens = stacked(fresh, size, self._device)
        if size == 1 and kept is None and not any(first):
            output = self.step(tokens[:, 0], cache)
            return output._replace(states=tuple(output.hidden)) if keep_states else output
        shapes = [tree.shape for tree in trees]
        if len(set(shapes)) == len(set(first)) == 1:
            depths = shapes[0].depth_tensor[first[0] :].to(self._device)
        else:
            own = [shape.depth_tensor[skipped:] for shape, skipped in zip(shapes, first, strict=True)]
            depths = stacked(own, size, self._device)
        starts = [cache.lengths[row] - skipped for row, skipped in enumerate(first)]
        positions = self._positions(starts, cache, depths)
        masks = self._masks.of_trees(shapes, starts, first, size)
        keys = cache.begin(range(len(trees)), size, self._device, counts)
        mask = _narrowed(masks, keys)
        output = run_model(self._model, tokens, positions, cache, mask, select, keep_states)
        cache.end(counts if kept is None else kept)
        return output

    def _positions(self, starts: Sequence[int], cache: PreallocatedCache, depths: Tensor | int) -> Tensor:
        """Return the positions of nodes at these depths behind the cached ``starts``, (rows, nodes)."""
        places = [start + dropped for start, dropped in zip(starts, cache.dropped, strict=False)]
        positions = depths + torch.tensor(places).to(self._device, non_blocking=True)[:, None]
        if self._max_positions is not None:  # a row that is done may be padded past the end of the position table
            positions.clamp_(max=self._max_positions - 1)
        return positions


def stacked(parts: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Stack the parts to (rows, size, …) on a device, shorter ones padded with zeros."""
    parts = [part if part.device == device else part.to(device, non_blocking=True) for part in parts]
    if all(len(part) == size for part in parts):
        return torch.stack(list(parts))
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
    """Return the masks for the first ``keys`` positions: those behind are padding alone."""
    if isinstance(masks, dict):
        return {kind: mask[..., :keys] for kind, mask in masks.items()}
    return masks[..., :keys]
