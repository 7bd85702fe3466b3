"""Several threads share a model: their steps alternate, and they take turns with the cache of a static model."""

import threading
import time
import warnings
from typing import Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn

PATIENCE = 10.0
"""A stream that nobody reads for this many seconds loses the cache of a static model to a waiting call."""
_POLL = 0.05

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock that a thread holds during a step of the model; all wrappers of the model share the lock.

    A pass switches hooks and attention on the model, so concurrent passes would read each other's states.
    """
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


class CacheHolder(Protocol):
    """A generation that uses a cache. ``last_step``: the time at which its last step ended, by `time.monotonic`."""

    last_step: float


class CacheTurns:
    """Decides which generation may use the single cache of a static model."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder: ref[CacheHolder] | None = None

    def take(self, generation: CacheHolder | None) -> None:
        """Wait until the cache is free, or until the generation that has it makes no step for `PATIENCE` seconds.

        A generation that was dropped or has ended releases the cache. If ``generation`` is None, the cache is free
        afterwards.
        """
        with self._free:
            while (held := self._held_by_another(generation)) is not None:
                idle = time.monotonic() - held.last_step
                if idle >= PATIENCE:
                    warnings.warn(
                        f"a stream was ended because nobody read it for {idle:.0f} seconds and another call waited: "
                        "a model with static shapes decodes one batch at a time",
                        stacklevel=3,
                    )
                    break
                del held  # a thread that waits must not keep a dropped generation alive
                self._free.wait(_POLL)
            self._holder = None if generation is None else ref(generation)

    def give_back(self, generation: CacheHolder) -> None:
        """Release the cache if this generation still has it."""
        with self._free:
            if self._holder is not None and self._holder() is generation:
                self._holder = None
                self._free.notify()

    def _held_by_another(self, generation: CacheHolder | None) -> CacheHolder | None:
        holder = None if self._holder is None else self._holder()
        return None if holder is generation else holder
