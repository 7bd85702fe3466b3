"""Locks: one run at a time writes a folder or a file."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from decoding.errors import UserError

LOCK_NAME = "run.lock"
_PATIENCE = 1.0  # seconds, after which a person wonders


@contextmanager
def hold(folder: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other runs out of ``folder`` while this context lasts; a missing folder is made.

    A killed process holds nothing any more. A process may hold a folder more than once. ValueError, naming the process
    and the host, where another run holds the folder. With ``on_wait`` this waits for the end of that run instead, and
    calls ``on_wait`` with a sentence after a second.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        with _acquired(FileLock(folder / LOCK_NAME, is_singleton=True), folder, on_wait):
            yield
    finally:
        if made:
            with suppress(OSError):  # something was written
                folder.rmdir()


@contextmanager
def hold_file(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other runs away from the file ``path``, by a lock beside it; waits, or raises ValueError, as `hold` does."""
    with _acquired(FileLock(path.with_name(f"{path.name}.lock")), path, on_wait):
        yield


@contextmanager
def _acquired(lock: BaseFileLock, held: Path, on_wait: Callable[[str], None] | None) -> Iterator[None]:
    path = Path(lock.lock_file)
    try:
        try:
            lock.acquire(timeout=0.0 if on_wait is None else _PATIENCE)
        except Timeout:
            if on_wait is None:
                message = f"{held} is being written by {_holder(path)}"
                raise UserError(message, "wait for its end, or give another output") from None
            on_wait(f"waiting for {_holder(path)}, which writes {held}")
            lock.acquire()
        path.write_text(json.dumps(_self_description()))
    except OSError as error:
        lock.release()
        raise _unwritable(held, error) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)  # while held: a process that opened the file meanwhile notices, and opens anew
        lock.release()


def _unwritable(held: Path, error: OSError) -> OSError:
    return OSError(f"{held} cannot be written ({error.strerror or error}): make room or give another output")


def _self_description() -> dict[str, str | int]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"process": os.getpid(), "host": socket.gethostname(), "since": since}


def _holder(path: Path) -> str:
    """Name the process that holds a lock, from the lock's file."""
    try:
        content = json.loads(path.read_text())
        return f"process {content['process']} on {content['host']} (since {content['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
