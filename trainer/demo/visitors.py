"""The people at the demo: each has a race of their own, and one thread decodes for all of them in turn."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer.demo.form import Form, race_of
from trainer.demo.race import Models, Race

FRAME_SECONDS = 0.08
"""Seconds of decoding between two looks at a race."""
_MOST_VISITORS = 64

Result = TypeVar("Result")


class Visitors:
    """Races by visitor. Every pass of a model runs in one thread, so that decodes cannot disturb each other."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._races: dict[str, Race] = {}
        self._here: set[str] = set()
        """Visitors who have run something and have not left."""
        self._decoding: set[Race] = set()
        self._lock = threading.Lock()

    @property
    def decoding(self) -> int:
        """Number of races that are under way, whose caches are held."""
        return len(self._decoding)

    @property
    def present(self) -> int:
        """Number of visitors whose last race is kept for a look at its steps."""
        return len(self._races)

    def run(self, visitor: str, form: Form) -> Iterator[Race]:
        """Start a race in place of the visitor's last one; yield it once begun, then again and again to its end.

        ValueError at once for an entry that does not fit; the last race is then kept. When the iterator is closed, the
        race is closed too.
        """
        with self._lock:
            self._here.add(visitor)
        race = self._in_thread(lambda: race_of(self.models, form))
        self.stop(visitor)
        with self._lock:
            if visitor not in self._here:  # who left while others decoded
                race.close()
                return iter(())
            self._races.pop(visitor, None)  # the visitor becomes the latest
            self._races[visitor] = race
            while len(self._races) > _MOST_VISITORS:
                self._races.pop(next(iter(self._races)))
        return self._frames(race)

    def _frames(self, race: Race) -> Iterator[Race]:
        with self._lock:
            self._decoding.add(race)
        try:
            yield race
            while self._in_thread(lambda: race.advance(FRAME_SECONDS)):
                yield race
            self._close(race)
            yield race
        finally:
            self._close(race)

    def race(self, visitor: str) -> Race | None:
        """Return the visitor's last race, under way or finished."""
        return self._races.get(visitor)

    def stop(self, visitor: str) -> None:
        """Let the visitor's race end where it is; its texts and steps are kept."""
        if race := self._races.get(visitor):
            race.stopped = race.stopped or not race.finished

    def leave(self, visitor: str) -> None:
        """Forget a visitor: the race is stopped, and its caches are free."""
        with self._lock:
            race = self._races.pop(visitor, None)
            self._here.discard(visitor)
        if race is not None:
            self._close(race)

    def _close(self, race: Race) -> None:
        """Free a race's caches, behind the step that may be running."""
        race.stopped = race.stopped or not race.finished
        with self._lock:
            if race not in self._decoding:
                return
        self._in_thread(race.close)
        with self._lock:
            self._decoding.discard(race)

    def _in_thread(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(work).result()
