"""Steps in the shapes in which they come, for target and draft: tokens or trees after each row of a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decoding.model.cache import PreallocatedCache
from decoding.model.forward import ModelOutput, run_model
from decoding.model.masks import TreeMasks
from decoding.rules.tree import TokenTree

_APPENDED_TOKENS = 1 << 10
"""Greatest number of tokens that all rows together append in one pass: each has a mask of as many numbers as keys."""


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
            masks = self._masks.of_tokens(starts)
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
