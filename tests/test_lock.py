"""A folder that one run writes at a time: the other is told who writes it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.files import folders
from trainer.files.folders import LOCK_NAME, hold

HOLDER = "import sys; from pathlib import Path; from trainer.files.folders import hold\n"
HOLDER += "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@contextmanager
def another_holds(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the folder until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_held_elsewhere_is_refused_naming_process_and_host(tmp_path: Path) -> None:
    with another_holds(tmp_path / "run") as other:
        with pytest.raises(ValueError) as error, hold(tmp_path / "run"):
            raise AssertionError("held twice")
        said = str(error.value)
        assert said.startswith(f"{tmp_path / 'run'} is being written by process {other.pid} on {socket.gethostname()}")
        assert said.endswith("wait until it ends, or give another output")
        (tmp_path / "run" / LOCK_NAME).write_text("{")
        with pytest.raises(ValueError, match="is being written by another process: wait"), hold(tmp_path / "run"):
            raise AssertionError("held twice")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with another_holds(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert (tmp_path / LOCK_NAME).exists()
        with hold(tmp_path):
            assert json.loads((tmp_path / LOCK_NAME).read_text())["process"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_waiting_for_the_other_run_says_so_and_then_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_PATIENCE", 0.05)
    said: list[str] = []
    with another_holds(tmp_path) as other:

        def on_wait(line: str) -> None:
            said.append(line)
            other.kill()
            other.wait()

        with hold(tmp_path, on_wait):
            assert said == [said[0]] and said[0].startswith(f"waiting for process {other.pid} on ")


def test_a_process_may_hold_a_folder_twice_and_keeps_it_until_the_last_end(tmp_path: Path) -> None:
    with hold(tmp_path):
        with hold(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
        done = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and f"process {os.getpid()} on" in done.stderr
    assert not (tmp_path / LOCK_NAME).exists()
