"""Locks that let one run at a time write a folder or a file."""

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
_PATIENCE = 1.0  # seconds before a wait is reported


@contextmanager
def hold(folder: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock ``folder`` against other runs while this context lasts; create it if missing.

    A process may lock a folder repeatedly; a kill releases its locks. If another run has the lock, raises UserError
    naming its process and host. With ``on_wait`` it waits, and after a second passes a sentence to it.
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
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


@contextmanager
def hold_file(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock the file ``path`` against other runs, by a lock file next to it; wait or raise UserError as `hold` does."""
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
                raise UserError(message, "wait until it ends, or give another output") from None
            on_wait(f"waiting for {_holder(path)} to finish writing {held}")
            lock.acquire()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}))
    except OSError as error:
        lock.release()
        raise _unwritable(held, error) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(
                missing_ok=True
            )  # unlink before the release: a process that has opened this file notices and opens it again
        lock.release()


def _unwritable(held: Path, error: OSError) -> OSError:
    return OSError(f"{held} cannot be written ({error.strerror or error}): make room or give another output")


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_text())
        return f"process {content['process']} on {content['host']} (since {content['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
