"""A preallocated key-value cache for transformers: it appends a block, keeps one path of the block and drops the rest.

The rows of a batch may differ in length. Nothing is concatenated or recomputed. A step writes keys and values after
each row's committed prefix, attention reads views of the buffers, and `commit` closes the gaps between accepted nodes
(in a chain there are none).
"""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decoding.errors import UserError
from decoding.rules.tree import common_length

_BUFFERS = itertools.count(1)


def rounded_up(count: int) -> int:
    """Round up a number of positions or rows by less than an eighth; between two powers of two there are 8 results."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


@dataclass(frozen=True)
class _Block:
    """The part of the cache that a pass writes: text i of the pass goes to row ``rows[i]``, from position ``starts[i]``
    on.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    positions: tuple[Tensor, ...] | None
    """Positions that the pass writes, a (rows, block) tensor for each device; None if all rows start at the same
    position.
    """
    keys: int
    """Number of positions of the buffers that attention reads."""

    @property
    def is_prefill(self) -> bool:
        """True if all rows are empty and attend only to their own block."""
        return not any(self.starts)


class _Buffers(NamedTuple):
    """Keys and values of all layers on one device, each (layers, rows, heads, capacity, dim)."""

    keys: Tensor
    values: Tensor
    row_index: Tensor
    """Numbers from 0 to rows - 1, (rows,)."""


class PreallocatedLayer(CacheLayerMixin):
    """One layer's part of the buffers; ``number`` is the index (from 0) of the layer's device."""

    is_sliding = False

    def __init__(self, owner: "PreallocatedCache", number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' annotations are partial
        # A strong reference would form a cycle, and a dropped cache would keep its buffers until a garbage collection.
        self._owner: PreallocatedCache = proxy(owner)
        self._number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._owner.allocate(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a block after each row's prefix; return the keys and values to attend to.

        All tensors have the shape (batch, heads, positions, dim).
        """
        owner, block = self._owner, self._owner.block
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and block is not None
        size = key_states.shape[-2]
        if key_states.shape[1::2] != self.keys.shape[1::2] or value_states.shape[1::2] != self.values.shape[1::2]:
            raise UserError(
                "the layers of this model have keys of different shapes (heads and widths "
                f"{list(self.keys.shape[1::2])} and {list(key_states.shape[1::2])}): use a model with equal layers"
            )
        if block.is_prefill:
            for index, row in enumerate(block.rows):
                self.keys[row, :, :size] = key_states[index]
                self.values[row, :, :size] = value_states[index]
            return key_states, value_states
        rows = len(block.rows)
        if block.positions is None:
            start = block.starts[0]
            self.keys[:rows, :, start : start + size] = key_states
            self.values[:rows, :, start : start + size] = value_states
        else:
            row_index, positions = owner._held[self._number].row_index[:rows, None], block.positions[self._number]
            self.keys[row_index, :, positions] = key_states.transpose(1, 2)
            self.values[row_index, :, positions] = value_states.transpose(1, 2)
        return self.keys[:rows, :, : block.keys], self.values[:rows, :, : block.keys]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached positions for transformers, which assumes that all rows are as long as the
        longest.
        """
        block = self._owner.block
        return max(block.starts) if block is not None else max(self._owner.lengths)

    def get_max_length(self) -> int:
        return -1


class PreallocatedCache(Cache):
    """Keys and values of every layer and row in two stacked buffers per device, allocated at first use.

    ``capacity`` is a number of positions, not a limit: a longer text doubles the buffers (one copy, amortised). After
    `restart` the buffers may be larger than ``rows`` and ``capacity``. Sliding-window layers also keep all positions,
    and the mask applies the window; rejected tokens can therefore always be dropped.

    ``lengths[row]`` is the number of cached positions of a row. ``text`` contains the tokens of row 0 whose keys are
    certainly cached. ``states`` are the target's states after the layers that a drafter reads (taps), at these tokens
    from the first on. The decoding loop updates ``text`` and ``states`` in caches that serve several calls.
    """

    def __init__(
        self, num_layers: int, capacity: int, rows: int = 1, devices: Sequence[torch.device] | None = None
    ) -> None:
        """``devices``: the device of each layer's keys; None if all layers share the device of the first block."""
        self._devices: tuple[torch.device | None, ...] = tuple(dict.fromkeys(devices)) if devices else (None,)
        numbers = [self._devices.index(device) for device in devices] if devices else [0] * num_layers
        self._members = [[i for i in range(num_layers) if numbers[i] == number] for number in range(len(self._devices))]
        self._own_layers = [PreallocatedLayer(self, number) for number in numbers]
        super().__init__(layers=list(self._own_layers))
        self.rows = rows
        self.capacity = max(capacity, 1)
        self.lengths = [0] * rows
        self.block: _Block | None = None
        self.buffers = 0
        """Serial number of the current buffers: a CUDA graph recorded on other buffers is invalid."""
        self.lease = 0
        self.text: list[int] = []
        self.states: list[Tensor] = []
        self._taps: tuple[int, ...] = ()
        self._held: tuple[_Buffers, ...] = ()  # buffers of each device; empty before the first block
        self._handed_out: tuple[_Buffers, ...] = self._held
        """Buffers whose views the layers use; they differ from `_held` only after an interrupt between the two updates.
        """

    def begin(self, rows: Sequence[int], size: int, device: torch.device, own: Sequence[int] | None = None) -> int:
        """Announce a pass that appends ``size`` positions to each of the ``rows``; return how many keys it reads.

        Only the first ``own[i]`` positions belong to row i (None: all). The rest is padding, which never makes the
        buffers grow: padding without room overwrites the last position, which no row uses in that case. Rows with
        content must come first, in order, because attention reads a slice of the buffers.
        """
        starts = [self.lengths[row] for row in rows]
        assert not any(starts) or list(rows) == list(range(len(rows))), f"rows {rows} are not the first rows"
        padded = max(starts) + size
        needed = max(start + count for start, count in zip(starts, own or [size] * len(starts), strict=True))
        self.reserve(padded if padded <= self.capacity or needed == padded else needed + 1)
        keys = min(padded, self.capacity)
        positions = None
        if len(set(starts)) > 1:
            positions = tuple(_positions(starts, size, own or device) for own in self._devices)
            if padded > keys:
                positions = tuple(part.clamp(max=keys - 1) for part in positions)
        self.block = _Block(tuple(rows), tuple(starts), positions, keys)
        return keys

    def begin_static(self, positions: Tensor, keys: int) -> None:
        """Announce a pass whose rows write at ``positions`` (rows, block) and attend to ``keys`` positions.

        Nothing here depends on the rows' lengths (see `decoding.model.static`).
        """
        rows = len(positions)
        self.block = _Block(range(rows), (keys,) * rows, (positions,), keys)

    def end(self, written: Sequence[int]) -> None:
        """Finish the pass: row i keeps the first ``written[i]`` positions of its block; the rest is padding."""
        assert self.block is not None
        self.advance(self.block.rows, written)
        self.block = None

    def advance(self, rows: Sequence[int], written: Sequence[int]) -> None:
        """Increase the length of each row in ``rows`` by the number of positions ``written`` to the row."""
        for row, count in zip(rows, written, strict=True):
            self.lengths[row] += count

    def reserve(self, needed: int) -> None:
        """Make room for ``needed`` positions in each row."""
        if needed > self.capacity:
            self._grow(needed)
        if self._handed_out is not self._held:
            self._hand_out_views()

    @property
    def device(self) -> torch.device | None:
        """Device of the first layer's buffers; None before the first block."""
        return self._held[0].keys.device if self._held else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PreallocatedCache":
        copied = type(self).__new__(type(self))
        # The layers' references to their cache are weak, which deepcopy cannot copy.
        memo |= {id(self): copied, **{id(layer._owner): proxy(copied) for layer in self._own_layers}}
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        copied.buffers = next(_BUFFERS)
        return copied

    def fits(self, capacity: int, rows: int) -> bool:
        """Return True if the buffers have room for ``rows`` texts of ``capacity`` positions, or do not exist yet."""
        buffers = (buffer for held in self._held for buffer in (held.keys, held.values))
        return all(buffer.shape[1] >= rows and buffer.shape[-2] >= capacity for buffer in buffers)

    def restart(self, capacity: int, rows: int) -> None:
        """Drop all texts and lease the buffers, if they fit, to a new generation; older leases end.

        The generation uses no more than this capacity and these rows, so that the shapes of its steps do not depend on
        earlier generations.
        """
        self.lease += 1
        self.capacity, self.rows, self.lengths = capacity, rows, [0] * rows
        self.block, self.text, self.states = None, [], []
        self.reserve(capacity)

    def take(self) -> int:
        """Lease the buffers to a new generation and end older leases; return the new lease for `check`."""
        self.lease += 1
        return self.lease

    def check(self, lease: int) -> None:
        """Raise UserError if another generation took the buffers after this ``lease``."""
        if lease != self.lease:
            raise UserError(
                "another generation has begun on this cache: finish or drop the first one, or use separate caches"
            )

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all buffers with the shapes of the first block seen, (batch, heads, positions, dim)."""
        held = []
        for members, own in zip(self._members, self._devices, strict=True):
            device, both = own or key_states.device, (key_states, value_states)
            keys, values = (self._new_buffer(like, len(members), self.capacity, device) for like in both)
            held.append(_Buffers(keys, values, torch.arange(self.rows, device=device)))
        self._held = tuple(held)
        self._hand_out_views()

    def _new_buffer(self, like: Tensor, layers: int, capacity: int, device: torch.device) -> Tensor:
        heads, _, dim = like.shape[-3:]
        # Zeros instead of uninitialised memory: attention also reads masked positions, and 0 * NaN is NaN.
        return like.new_zeros(layers, self.rows, heads, capacity, dim, device=device)

    def _grow(self, needed: int) -> None:
        """Double the buffers until ``needed`` positions fit, and copy their content.

        Buffers grow one by one, so that at most one of them exists twice. ``capacity`` is set last: after an earlier
        error (out of memory) the cache is still usable.
        """
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        for number in range(len(self._held)):
            for name in ("keys", "values"):
                self._grow_buffer(number, name, capacity)
        self.capacity = capacity

    def _grow_buffer(self, number: int, name: str, capacity: int) -> None:
        """Replace a device's keys or values by a copy with room for ``capacity`` positions; free the old buffer."""
        old: Tensor = getattr(self._held[number], name)
        layers, _, _, held, _ = old.shape
        if held >= capacity:  # the buffer grew before an error or for an earlier generation
            return
        new = self._new_buffer(old, layers, capacity, old.device)
        new[..., :held, :] = old[:, : self.rows]
        grown = self._held[number]._replace(**{name: new})
        self._held = (*self._held[:number], grown, *self._held[number + 1 :])
        self._hand_out_views()

    def _hand_out_views(self) -> None:
        self.buffers = next(_BUFFERS)
        for members, held in zip(self._members, self._held, strict=True):
            for index, number in enumerate(members):
                layer = self._own_layers[number]
                layer.keys, layer.values = held.keys[index], held.values[index]
                layer.is_initialized = True
        self._handed_out = self._held

    def is_full(self, row: int) -> bool:
        """Return True if the next step of a row must not draft (see `decoding.model.sequential`)."""
        return False

    @torch.inference_mode()
    def commit(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Keep the nodes ``kept`` (increasing) of the block that a row wrote at ``start``; drop the other nodes."""
        if list(kept) != list(range(len(kept))):
            for held in self._held:
                index = torch.tensor(kept).to(held.keys.device, non_blocking=True) + start
                for buffer in (held.keys[:, row], held.values[:, row]):
                    buffer[..., start : start + len(kept), :] = buffer.index_select(-2, index)
        self.truncate(row, start + len(kept))

    def truncate(self, row: int, length: int) -> None:
        """Drop every position of a row from ``length`` on."""
        assert length <= self.lengths[row], f"cannot truncate {self.lengths[row]} positions to {length}"
        self.lengths[row] = length

    def clear(self, row: int) -> None:
        """Forget the text in a row."""
        self.lengths[row] = 0

    def rewind(self, prompt: Sequence[int], taps: tuple[int, ...] = ()) -> int:
        """Cut row 0 to the longest prefix that it shares with ``prompt[:-1]``; return the prefix's length.

        With ``taps``, the prefix is at most as long as the kept states after these layers; states after other layers
        are dropped.
        """
        common = common_length(self.text, prompt[:-1])
        if taps:
            if taps != self._taps:
                self.states, self._taps = [], taps
            common = min(common, sum(map(len, self.states)))
        self.text = self.text[:common]
        if self.states:
            self.states = [torch.cat(self.states)[:common]]
        self.truncate(0, common)
        return common

    @torch.inference_mode()
    def move(self, row: int, to: int) -> None:
        """Move the text in a row to row ``to``, where it replaces the text of that row."""
        length = self.lengths[row]
        if row != to:
            for held in self._held:
                for buffer in (held.keys, held.values):
                    buffer[:, to, :, :length] = buffer[:, row, :, :length]
        self.clear(row)
        self.lengths[to] = length


def _positions(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return the ``size`` positions from each start on, (rows, size)."""
    return torch.tensor(starts).to(device, non_blocking=True)[:, None] + torch.arange(size, device=device)
