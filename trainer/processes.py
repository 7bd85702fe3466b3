"""Processes that run together agree on their errors: none waits for one that has stopped.

Every process calls these functions, in the same order. An error of one process reaches the others at their next call of
any of these functions, so the work given to one may call another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console

from trainer.terminal.console import say, standard_error

TIMEOUT = timedelta(minutes=30)
"""Time after which processes give up one that they hear nothing of."""
_SIGN_EVERY = 60.0  # seconds
_AGREED = "every process has this error, or one that names it"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Process:
    """One of the processes that run together: number ``rank`` (from 0) of ``world``."""

    rank: int = 0
    world: int = 1
    console: Console = field(default_factory=standard_error)

    @property
    def is_first(self) -> bool:
        """True on the process that writes and speaks for all."""
        return self.rank == 0

    def say(self, *lines: str) -> None:
        """Print each line once, on the first process."""
        if self.is_first:
            say(self.console, *lines)


ALONE = Process()
"""A single process that speaks on standard error."""


def any_process(flag: bool) -> bool:
    """Return True on every process if it is on one."""
    if _is_alone():
        return flag
    flags = torch.tensor(float(flag), device=PartialState().device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def agreed(work: Callable[[], Result], patient: bool = False) -> Result:
    """Return what the work returns; an error on one process becomes an error on all.

    ``patient``: one process may take hours longer than another. Its work then sends nothing to the others.
    """
    if _is_alone():
        return work()
    if patient:
        _raise_on_all(None)  # a process that stopped before does not come here
    with _in_touch() if patient else nullcontext() as wait_for_all:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if _AGREED in getattr(raised, "__notes__", ()):
                raise
            error = raised
        if wait_for_all is not None:
            wait_for_all()
        _raise_on_all(error)
        return cast(Result, result)


def on_first(work: Callable[[], object]) -> None:
    """Do work on the first process alone, for which the others wait; its error becomes an error on all."""
    agreed(work if _is_first() else lambda: None, patient=True)


def from_first(work: Callable[[], Result]) -> Result:
    """Return on every process what the first one's work returns; its error becomes an error on all."""
    found = [agreed(cast(Callable[[], Result | None], work) if _is_first() else lambda: None, patient=True)]
    if not _is_alone():
        dist.broadcast_object_list(found)
    return cast(Result, found[0])


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _raise_on_all(error: Exception | None) -> None:
    if any_process(error is not None):
        error = error or ValueError("another process cannot go on: its own message says why")
        error.add_note(_AGREED)
        raise error


@contextmanager
def _in_touch() -> Iterator[Callable[[], None]]:
    """Send the others a sign every minute; yields a function that waits until all have called it."""
    group, ended = dist.new_group(backend="gloo", timeout=TIMEOUT), Event()

    def send_signs() -> None:
        busy = torch.ones(())
        while busy:
            busy.fill_(not ended.wait(_SIGN_EVERY))
            dist.all_reduce(busy, dist.ReduceOp.MAX, group)

    signs = Thread(target=send_signs, daemon=True)

    def wait_for_all() -> None:
        ended.set()
        signs.join()

    signs.start()
    yield wait_for_all
    dist.destroy_process_group(group)
