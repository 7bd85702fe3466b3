"""Exit codes of real processes, the sentence with which each process ends, and the page that lists the codes."""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import COMMANDS, examples
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands.usage import guarded
from trainer.terminal.exit_codes import ExitCode, exit_code_line

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, signal, sys, types, typer
from decoding.errors import UserError
work = types.ModuleType("trainer.commands.demo")
def run_demo(options):
    {act}
work.run_demo = run_demo
sys.modules["trainer.commands.demo"] = work  # in place of the command's own, whose imports take seconds
from trainer.cli import main
main()
"""
"""A process of ``headstart`` whose command ``demo`` does what the test chooses."""

FOREVER = "while True: print('x' * 1000)"
RICH = "from trainer.terminal.console import say, standard_output\n    while True: say(standard_output(), 'x')"


def end_of(act: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM.format(act=act), *words, "demo"]
    return subprocess.run(program, capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore[call-overload, no-any-return]  # keywords of subprocess


@pytest.mark.parametrize(
    ("act", "code", "sentence"),
    [
        ("print('done')", ExitCode.DONE, ""),
        ("raise typer.Exit(1)", ExitCode.FAILED, ""),
        ("raise UserError('depth is 0', 'use 1')", ExitCode.BAD_INPUT, "error: depth is 0: use 1\n"),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", ExitCode.STOPPED, "stopped by Ctrl-C\n"),
    ],
)
def test_an_end_has_its_code_and_at_most_one_sentence(act: str, code: ExitCode, sentence: str) -> None:
    done = end_of(act)
    assert (done.returncode, done.stderr) == (code, sentence)


@pytest.mark.parametrize("kind", ["AssertionError", "ValueError"])
def test_an_internal_error_keeps_its_traceback_in_a_file_and_debug_prints_it(tmp_path: Path, kind: str) -> None:
    hidden = "hf_0123456789abcdefABCD"
    act = f"raise {kind}('no {hidden} here')"
    environment = {"TMPDIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = end_of(act, env=environment)
    assert done.returncode == ExitCode.INTERNAL_ERROR
    (kept,) = tmp_path.iterdir()
    assert done.stderr == (
        f"error: internal error, {kind}: no (withheld) here: the traceback is in {kept}; "
        "'headstart --debug COMMAND ...' prints the traceback\n"
    )
    text = kept.read_text()
    assert text.startswith("Traceback") and "run_demo" in text and hidden not in text
    assert kept.stat().st_mode & 0o077 == 0
    shown = end_of(act, "--debug", env=environment)
    assert shown.returncode == ExitCode.INTERNAL_ERROR and shown.stderr.startswith("Traceback")
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("error", ["MemoryError()", "RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"])
def test_full_memory_has_a_code_and_a_remedy(error: str) -> None:
    done = end_of(f"raise {error}")
    assert done.returncode == ExitCode.OUT_OF_MEMORY
    assert done.stderr.startswith("error: out of memory (") and "use smaller batches or shorter texts" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("act", [FOREVER, RICH])
def test_a_reader_that_ends_early_ends_the_command_quietly(act: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(act=act), "demo"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait() == ExitCode.CLOSED_PIPE
        errors.seek(0)
        assert errors.read() == ""


def test_streams_that_the_caller_has_closed_are_empty() -> None:
    act = "assert sys.stdin.read() == ''; print('x'); sys.stderr.write('y'); os._exit(5)"
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM.format(act=act), "demo"]
    assert subprocess.run(closing, cwd=ROOT, check=False).returncode == 5


def test_a_connection_that_a_server_closed_is_no_closed_output() -> None:
    done = end_of("raise BrokenPipeError(32, 'Broken pipe')")
    assert done.returncode == ExitCode.BAD_INPUT and done.stderr.startswith(
        "error: [Errno 32] Broken pipe: the traceback"
    )


def test_what_the_operating_system_answers_is_bad_input_with_a_traceback_in_a_file() -> None:
    done = end_of("open('nowhere')")
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr.startswith("error: [Errno 2] No such file or directory: 'nowhere': the traceback is in ")
    done = end_of("raise OSError('of a library')")
    assert done.returncode == ExitCode.INTERNAL_ERROR


def test_a_terminated_command_that_saves_nothing_ends_as_the_system_does() -> None:
    done = end_of("os.kill(os.getpid(), signal.SIGTERM); signal.pause()")
    assert (128 - done.returncode, done.stderr) == (ExitCode.TERMINATED, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_this_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command passes its work to `guarded`, which the tests above cover, and `guarded` also encloses the whole
    program.
    """

    def ends(work: Callable[[], None], *_: object) -> int:
        return 33 if "run.<locals>" in work.__qualname__ else guarded(work)

    monkeypatch.setattr("trainer.commands.usage.guarded", ends)
    assert CliRunner().invoke(app, shlex.split(examples(name)[0])[1:]).exit_code == 33


def test_a_command_that_resumes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    assert guarded(work, resumes=True) == ExitCode.STOPPED
    assert capsys.readouterr().err == "stopped by Ctrl-C: start the same command again to resume\n"


def test_the_page_and_the_help_list_every_code() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(str(code.value), code.short, code.meaning) for code in ExitCode]
    assert exit_code_line().startswith("0 done, 1 a check failed, 2 bad input, 70 ")
