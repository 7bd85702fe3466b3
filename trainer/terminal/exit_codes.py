"""How programs end: exit codes of every command (docs/reference/commands.md shows the same table), and stop signals."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any


class ExitCode(IntEnum):
    """An exit code: its number, a short meaning, and a full sentence."""

    short: str
    meaning: str

    def __new__(cls, number: int, short: str, meaning: str) -> "ExitCode":
        """Make a member that equals its number."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.short, code.meaning = short, meaning
        return code

    DONE = 0, "done", "The work is done; a verification, a diagnosis or a check found nothing wrong."
    FAILED = 1, "a check failed", "A verification failed, or a diagnosis or a check found a fault or a difference."
    BAD_INPUT = 2, "bad input", "An option, a file or a model cannot be used; one sentence names cause and remedy."
    INTERNAL_ERROR = 70, "internal error", "A bug in the program. The error message names a file with the traceback."
    OUT_OF_MEMORY = 71, "out of memory", "The memory of the device or of the machine is full."
    STOPPED = 130, "Ctrl-C", "Stopped by Ctrl-C (SIGINT). Training saves its state first."
    CLOSED_PIPE = 141, "closed pipe", "The reader of the output, such as `head`, has exited. Nothing is printed."
    TERMINATED = 143, "SIGTERM", "Stopped by SIGTERM. Training saves its state first."


def exit_code_line() -> str:
    """Return all codes in one line: "0 done, 1 a check failed, ...\""""
    return ", ".join(f"{code.value} {code.short}" for code in ExitCode)


class Stopped(Exception):  # not an error, because the work can be resumed
    """Says that a signal ended the work and that its state is saved; ``code`` is the signal's exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.TERMINATED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the first SIGTERM or SIGINT received, or 0; a second signal acts as usual.

    The death of the launcher counts as a SIGTERM, because ``accelerate launch`` does not forward the signal to a single
    process, and nothing else stops the processes of a killed ``torchrun``.
    """
    received: list[int] = []
    launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()  # set by launchers
    parent = os.getppid() if launched else None
    previous: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    def orphaned() -> int:
        return int(signal.SIGTERM) if parent is not None and os.getppid() != parent else 0

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        previous[number] = signal.signal(number, note)
    try:
        yield lambda: received[0] if received else orphaned()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
