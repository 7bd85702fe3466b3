"""The end of every command: an error, a signal or a closed pipe becomes one sentence and an exit code."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable

import typer

from decoding.measure.markdown import one_line
from decoding.measure.redact import without_secrets
from decoding.threads import spin_briefly
from trainer.terminal.console import say, say_error, standard_error
from trainer.terminal.exit_codes import ExitCode, Stopped
from trainer.terminal.quiet import quiet_libraries

_FULL = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Phrases of PyTorch's RuntimeErrors for full memory, on a CPU and on GPUs."""


def guarded(work: Callable[[], None], debug: bool = False, resumes: bool = False) -> int:
    """Run ``work``; return its exit code. An error becomes one sentence, or with ``debug`` a traceback.

    ``resumes``: the same command, started again after Ctrl-C, goes on where it was.
    """
    try:
        return _ended(work, debug, resumes)
    except BrokenPipeError:
        drop_output()
        return ExitCode.CLOSED_PIPE


def _ended(work: Callable[[], None], debug: bool, resumes: bool) -> int:
    errors = standard_error()
    try:
        try:
            spin_briefly()
            if not debug:
                quiet_libraries()
            work()
            code = int(ExitCode.DONE)
        except typer.Exit as ended:
            code = ended.exit_code
        sys.stdout.flush()
        return code
    except Stopped as stop:
        say(errors, f"{stop}: start the same command again to resume")
        return stop.code
    except KeyboardInterrupt:
        again = ": start the same command again to resume" if resumes else ""
        say(errors, f"stopped by Ctrl-C{again}")
        return ExitCode.STOPPED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            raise
        if debug:
            traceback.print_exc()
        code, sentence = _told(error)
        if not debug:
            say_error(errors, sentence)
        return code


def _told(error: Exception) -> tuple[ExitCode, str]:
    """Return the exit code of an error and its sentence, without secrets and without control characters."""
    sentence = without_secrets(one_line(error)) or type(error).__name__
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(it in str(error) for it in _FULL)):
        remedy = "make the batch or the texts smaller; 'headstart plan-training' prints what a training run needs"
        return ExitCode.OUT_OF_MEMORY, f"out of memory ({sentence}): {remedy}"
    if isinstance(error, (ValueError, OSError)):
        return ExitCode.BAD_INPUT, sentence
    kept = _kept_traceback()
    where = f"the traceback is in {kept}, and " if kept else ""
    remedy = f"{where}'headstart --debug COMMAND ...' prints it"
    return ExitCode.INTERNAL_ERROR, f"internal error, {type(error).__name__}: {sentence}: {remedy}"


def _kept_traceback() -> str | None:
    """Write the current error's traceback to a file that only this user reads; return its path, None if it failed."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="headstart-", suffix=".txt", delete=False) as file:
            file.write(without_secrets(traceback.format_exc()))
    except OSError:
        return None
    return file.name


def _output_is_closed() -> bool:
    """Return True if nobody reads standard output any more; a server may have closed a connection as well."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def drop_output() -> None:
    """Discard the rest of standard output, whose reader has ended, so that the interpreter's end is quiet too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
