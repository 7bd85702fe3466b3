"""A program on a separate terminal, as a user sees it, with keys as input and everything printed as output."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CTRL_C, CTRL_D = b"\x03", b"\x04"


class PseudoTerminal:
    """The terminal of one running program. ``output`` is all that was printed so far."""

    def __init__(self, child: int, master: int) -> None:
        self._child, self._master = child, master
        self._read = 0
        self.output = b""

    def press(self, keys: bytes) -> None:
        """Type the keys; the terminal itself turns Ctrl-C into SIGINT."""
        os.write(self._master, keys)

    def wait_for(self, text: str) -> bytes:
        """Read until this text is printed after the text that was awaited before. Return what was printed up to the end
        of this text.
        """
        wanted = text.encode()
        while (found := self.output.find(wanted, self._read)) < 0:
            assert self._more(), f"ended before {text!r}: {self.output[-2000:]!r}"
        before, self._read = self.output[self._read : found], found + len(wanted)
        return before

    def exit_code(self) -> int:
        """Read to the end; return the exit code."""
        while self._more():
            pass
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def _more(self) -> bool:
        deadline = time.monotonic() + 90
        while not select.select([self._master], [], [], 1)[0]:
            assert time.monotonic() < deadline, f"hangs behind {self.output[-2000:]!r}"
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # the program has closed the terminal
            return False
        self.output += read
        return bool(read)

    def end(self) -> None:
        """Kill the program if it still runs."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        os.close(self._master)


@contextmanager
def headstart_on_terminal(
    words: Sequence[str], changes: Mapping[str, str] | None = None, rows: int = 24, columns: int = 100
) -> Iterator[PseudoTerminal]:
    """Start `headstart` with these words on a terminal of this size; end it at the end of the block."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(changes or {})}
    child, master = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execve(sys.executable, [sys.executable, "-m", "trainer.cli", *words], environment)
    terminal = PseudoTerminal(child, master)
    try:
        yield terminal
    finally:
        terminal.end()
