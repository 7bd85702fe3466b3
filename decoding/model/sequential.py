"""Runs chains, row by row, on models that cannot run trees, because these models have recurrent states, attend in
chunks, or derive positions from the order of the tokens.

A recurrent state cannot drop a rejected token, so the states after a prefix are kept. Each pass runs the tokens that
were accepted after this prefix, followed by the new draft. If the whole draft is accepted, the prefix moves to its end.
Otherwise the kept states are restored, and the next pass also runs the accepted tokens. No step needs a second pass.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from decoding.model.architecture import CACHE_OF_THEIR_OWN, RESTARTING
from decoding.model.cache import PreallocatedCache
from decoding.model.forward import ModelOutput, run_model

MOST_FED_AGAIN = 8
"""Up to this many accepted tokens of a row wait to run together with a draft; if more are waiting, the next step runs
them alone. The value was chosen from 0, 4, 8, 12, 16, 24 and 32 by counts from the decoding loop, for acceptance rates
from 0.3 to 0.9 (dev/log/2026-11-25.md).
"""


class SequentialCache(PreallocatedCache):
    """The tokens of each row, and a `transformers` cache of the first of these tokens, which can be reset to an earlier
    state.

    Without a cache, each pass runs the whole text.
    """

    def __init__(self, new: Callable[[], Cache] | None, rows: int) -> None:
        """``new`` makes an empty cache for one text; None for a model without a cache."""
        super().__init__(0, 1, rows)
        self._new = new
        self._rows = [_Row(new) for _ in range(rows)]

    def is_full(self, row: int) -> bool:
        return self._new is not None and self._rows[row].waiting > MOST_FED_AGAIN

    def begin_row(self, row: int, block: Sequence[int], restarts: bool = False) -> list[int]:
        """Announce a pass that appends a block to a row; return the tokens to run: the waiting tokens, then the block.

        ``restarts``: the model cannot run several tokens after a cached text, so it runs the whole text.
        """
        text = self._rows[row]
        text.tokens += block
        if restarts and text.waiting > 1:
            text.restart()
        self.lengths[row] += len(block)
        return text.begin()

    def held(self, row: int) -> Cache | None:
        """Return the `transformers` cache that a pass over this row reads and writes."""
        return self._rows[row].cache

    def truncate(self, row: int, length: int) -> None:
        super().truncate(row, length)
        self._rows[row].truncate(length)

    def clear(self, row: int) -> None:
        super().clear(row)
        self._rows[row] = _Row(self._new)

    def move(self, row: int, to: int) -> None:
        self._rows[to] = self._rows[row]
        super().move(row, to)  # clears the row
        if row == to:
            self.lengths[to] = len(self._rows[to].tokens)


class _Row:
    """A text: its tokens, a cache of its first ``_live`` tokens, and the model's states after its first ``_kept``
    tokens.
    """

    def __init__(self, new: Callable[[], Cache] | None) -> None:
        self.tokens: list[int] = []
        self.cache = None if new is None else new()
        self._new, self._live, self._kept = new, 0, 0
        self._states: list[dict[str, Any]] = []

    @property
    def waiting(self) -> int:
        """Number of tokens that are not in the cache."""
        return len(self.tokens) - self._live

    def begin(self) -> list[int]:
        """Keep the current states, so that they can be restored; return the tokens that must run after them."""
        fed = self.tokens[self._live :]
        if self.cache is not None:
            self._kept, self._states = self._live, [_states_of(layer) for layer in self.cache.layers]
            self._live = len(self.tokens)
        return fed

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens."""
        del self.tokens[length:]
        if self.cache is None or length >= self._live:
            return
        if self._live and all(type(layer) is DynamicLayer for layer in self.cache.layers):
            layers: list[Any] = self.cache.layers
            for layer in layers:
                layer.crop(length - self._live)
            self._live = length
        elif length >= self._kept:
            for layer, states in zip(self.cache.layers, self._states, strict=True):
                for name, value in states.items():
                    cropped = name in _GROWING and isinstance(value, int)
                    setattr(layer, name, getattr(layer, name)[..., :value, :] if cropped else value)
            self._live = self._kept
        else:  # the kept states belong to a longer text
            self.restart()

    def restart(self) -> None:
        """Drop the cache, so the whole text runs again."""
        self.cache, self._live, self._kept = self._new() if self._new else None, 0, 0


_GROWING = ("keys", "values", "indexer_keys")
"""Tensors of a layer that grow with the text, along the second-to-last dimension."""


def _states_of(layer: Any) -> dict[str, Any]:
    """Copy a layer's states but not its keys: a layer with a window replaces its keys as a whole, and a layer with full
    attention can crop its keys.
    """
    is_full = not getattr(layer, "is_sliding", False)
    states: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in _GROWING and isinstance(value, Tensor):
            states[name] = value.shape[-2] if is_full and value.ndim > 2 else value
        elif isinstance(value, dict):
            states[name] = {key: part.clone() if isinstance(part, Tensor) else part for key, part in value.items()}
        else:
            states[name] = value.clone() if isinstance(value, Tensor) else value
    return states


def _flat(value: Any) -> list[Tensor]:
    parts = value.values() if isinstance(value, dict) else [value]
    return [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]


class SequentialSteps:
    """Runner of one model's steps. It runs row by row, because padding would change a recurrent state."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        accepted, kind = inspect.signature(type(model).forward).parameters, model.config.model_type
        named = (name for name in ("past_key_values", "cache_params") if name in accepted)
        self._cache_name = None if kind in CACHE_OF_THEIR_OWN else next(named, None)
        self._restarts = kind in RESTARTING
        self._has_positions = "position_ids" in accepted
        if kind in ("nemotron_h", "zamba2"):  # transformers clamps time steps only in passes of several tokens
            for module in model.modules():
                if hasattr(module, "time_step_limit"):
                    vars(module)["time_step_limit"] = (0.0, float("inf"))

    def new_cache(self, rows: int) -> SequentialCache:
        """Make a cache for ``rows`` texts."""
        keeps = self._cache_name is not None
        return SequentialCache((lambda: DynamicCache(config=self._model.config)) if keeps else None, rows)

    def state_bytes(self) -> int:
        """Return the bytes of one text's states that do not grow with the text (recurrences and convolutions)."""
        cache = self.new_cache(1)
        self.run([[0]], cache, last=True)
        held = cache.held(0)
        states = [] if held is None else [_states_of(layer) for layer in held.layers]
        parts = [
            part for layer in states for name, value in layer.items() if name not in _GROWING for part in _flat(value)
        ]
        return sum(part.nbytes for part in parts)

    def run(
        self,
        blocks: Sequence[Sequence[int]],
        cache: PreallocatedCache,
        rows: Sequence[int] | None = None,
        last: bool = False,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run a chain of tokens after each of the ``rows`` (None: the first rows).

        Returns hidden states (rows, tokens, hidden) and logits (rows, tokens, vocab); shorter rows are padded.
        ``last``: return these only for each row's last token. ``taps``: also return the states of all tokens of each
        block.
        """
        assert isinstance(cache, SequentialCache), "the cache comes from another model"
        outputs = [
            self._run_row(block, cache, row, last, taps)
            for row, block in zip(range(len(blocks)) if rows is None else rows, blocks, strict=True)
        ]
        hidden, logits = (
            pad_sequence([part[0] for part in parts], batch_first=True)
            for parts in zip(*((output.hidden, output.logits) for output in outputs), strict=True)
        )
        return ModelOutput(hidden, logits, tuple(states for output in outputs for states in output.states))

    def _run_row(
        self, block: Sequence[int], cache: SequentialCache, row: int, last: bool, taps: Sequence[int]
    ) -> ModelOutput:
        start = cache.lengths[row] + len(block)
        fed = cache.begin_row(row, block, self._restarts)
        device = self._model.device
        positions = torch.arange(start - len(fed), start, device=device)[None] if self._has_positions else None
        count = 1 if last else len(block)
        tokens, held = torch.tensor([fed], device=device), cache.held(row)
        inputs = {} if self._cache_name is None else {self._cache_name: held}
        output = run_model(self._model, tokens, positions, inputs, None, lambda hidden: hidden[:, -count:], taps)
        return output._replace(states=tuple(states[-len(block) :] for states in output.states))
