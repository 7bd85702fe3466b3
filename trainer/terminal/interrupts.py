"""Ctrl-C while a text is decoded: it ends the text, not the program."""

import signal
import threading
from collections.abc import Generator, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar

Item = TypeVar("Item")


class CtrlC:
    """Handler of Ctrl-C between ``with`` and its end; ``asked`` is True once it was pressed.

    The first Ctrl-C ends `until_asked` after the running item. A second one ends the block at once. Threads other than
    the main one leave the handler alone, and so does a process that ignores Ctrl-C, as one that a script began with &.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "CtrlC":
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        return self.asked and isinstance(error, KeyboardInterrupt)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def until_asked(self, items: Iterable[Item]) -> Generator[Item, None, None]:
        """Yield the items until Ctrl-C, none behind one; a generator among ``items`` is closed at the end."""
        source = iter(items)
        try:
            if self.asked:
                return
            for item in source:
                yield item
                if self.asked:
                    return
        finally:
            if isinstance(source, Generator):
                source.close()
