"""Attention masks of token trees: each node attends to its row's prefix and to its own path."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.rules.tree import TreeShape

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

    def of_tokens(self, starts: Sequence[int]) -> Any:
        """Make the masks of one token after each row, which attends to all of the row within the window."""
        device, blocked = self._model.device, torch.finfo(self._model.dtype).min
        keys = torch.arange(max(starts) + 1, device=device)
        ahead = keys - torch.tensor(starts).to(device, non_blocking=True)[:, None]
        masks = {}
        for kind, window in self.windows.items():
            hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            mask = torch.zeros(ahead.shape, dtype=self._model.dtype, device=device)
            masks[kind] = mask.masked_fill_(hidden, blocked)[:, None, None]
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
