"""A preallocated key-value cache on transformers' own interface: append a block, keep one path of it, drop the rest.

Nothing is concatenated or recomputed: a step writes its keys and values behind the committed prefix, attention reads
views of the buffers, and `commit` moves the accepted nodes together (for a chain there is nothing to move).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PreallocatedLayer(CacheLayerMixin):
    """One layer's share of the buffers. ``length`` counts the positions that hold data."""

    is_sliding = False

    def __init__(self, owner: "PreallocatedCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' annotations are partial
        self._owner = owner
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._owner.allocate(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a block behind what is there; return views of everything. Both (batch, heads, positions, dim)."""
        start, end = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if end > self._owner.capacity:
            self._owner.grow(end)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class PreallocatedCache(Cache):
    """Keys and values of every layer in two stacked buffers of ``capacity`` positions, allocated at first use.

    ``capacity`` is a first size, not a limit: a longer text doubles the buffers (one copy, amortised).
    Sliding-window layers keep all positions here, so that rejected tokens can always be dropped; the window is in
    the mask.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._own_layers = [PreallocatedLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))
        self.capacity = max(capacity, 1)
        self._keys: Tensor | None = None  # (layers, batch, heads, capacity, dim)
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Committed positions (during a forward: positions written by the first layer)."""
        return self._own_layers[0].length

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both buffers with the shapes of the first block seen, (batch, heads, positions, dim)."""
        self._keys = self._new_buffer(key_states, self.capacity)
        self._values = self._new_buffer(value_states, self.capacity)
        self._hand_out_views()

    def _new_buffer(self, like: Tensor, capacity: int) -> Tensor:
        batch, heads, _, dim = like.shape[-4:]
        # Zeros, not empty: attention reads masked positions too, and 0 * NaN is NaN.
        return like.new_zeros(len(self._own_layers), batch, heads, capacity, dim)

    def grow(self, needed: int) -> None:
        """Double the buffers until ``needed`` positions fit, keeping what is in them."""
        assert self._keys is not None and self._values is not None
        old = self.capacity
        while self.capacity < needed:
            self.capacity *= 2
        for name, buffer in (("_keys", self._keys), ("_values", self._values)):
            larger = self._new_buffer(buffer, self.capacity)
            larger[..., :old, :] = buffer
            setattr(self, name, larger)
        self._hand_out_views()

    def _hand_out_views(self) -> None:
        assert self._keys is not None and self._values is not None
        for index, layer in enumerate(self._own_layers):
            layer.keys, layer.values = self._keys[index], self._values[index]
            layer.is_initialized = True

    @torch.inference_mode()
    def commit(self, start: int, kept: Sequence[int]) -> None:
        """Of the block written at ``start``, keep the nodes ``kept`` (increasing), in that order, and drop the rest."""
        if self._keys is not None and self._values is not None and list(kept) != list(range(len(kept))):
            index = torch.tensor(kept, device=self._keys.device) + start
            for buffer in (self._keys, self._values):
                buffer[..., start : start + len(kept), :] = buffer.index_select(-2, index)
        self.truncate(start + len(kept))

    def truncate(self, length: int) -> None:
        """Drop every position from ``length`` on."""
        assert length <= self.length, f"cannot truncate {self.length} positions to {length}"
        for layer in self._own_layers:
            layer.length = length
