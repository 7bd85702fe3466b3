"""The end of every command: errors, signals and closed pipes become one sentence and an exit code."""

import os
import select
import sys
import tempfile
import traceback
from collections.abc import Callable

import typer

from decoding.errors import UserError
from decoding.measure.markdown import one_line
from decoding.measure.redact import without_secrets
from decoding.threads import spin_briefly
from trainer.terminal.console import quiet_libraries, say, say_error, standard_error
from trainer.terminal.exit_codes import ExitCode, Stopped

_FULL = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Phrases in PyTorch's RuntimeErrors when memory is full, on CPUs and GPUs."""


def guarded(work: Callable[[], None], debug: bool = False, resumes: bool = False) -> int:
    """Run ``work``; return its exit code. An error becomes one sentence, or with ``debug`` a traceback.

    ``resumes``: the same command, started again after Ctrl-C, resumes.
    """
    _open_closed_streams()
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
        else:
            say_error(errors, _sentence(error))
        return _code(error)


def _code(error: Exception) -> ExitCode:
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(it in str(error) for it in _FULL)):
        return ExitCode.OUT_OF_MEMORY
    # An errno is the operating system's answer: a missing file, a full disk, no permission.
    of_the_user = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None)
    return ExitCode.BAD_INPUT if of_the_user else ExitCode.INTERNAL_ERROR


def _sentence(error: Exception) -> str:
    """Return an error's sentence with a remedy, free of secrets and control characters."""
    sentence, code = without_secrets(one_line(error)) or type(error).__name__, _code(error)
    if code == ExitCode.OUT_OF_MEMORY:
        remedy = "use smaller batches or shorter texts; 'headstart train RECIPE --dry-run' prints what training needs"
        return f"out of memory ({sentence}): {remedy}"
    if isinstance(error, UserError):
        return sentence
    kept = _kept_traceback()
    where = f"the traceback is in {kept}, and " if kept else ""
    kind = f"internal error, {type(error).__name__}: " if code == ExitCode.INTERNAL_ERROR else ""
    return f"{kind}{sentence}: {where}'headstart --debug COMMAND ...' prints it"


def _kept_traceback() -> str | None:
    """Write the current traceback to a file that only this user can read; return its path, or None if that failed."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="headstart-", suffix=".txt", delete=False) as file:
            file.write(without_secrets(traceback.format_exc()))
    except OSError:
        return None
    return file.name


def _output_is_closed() -> bool:
    """Return True if the reader of standard output or error is gone; a server's broken pipe does not count."""
    for stream in (sys.stdout, sys.stderr):
        try:
            watched = select.poll()
            watched.register(stream.fileno(), 0)  # POLLERR is reported without asking
            if any(event & select.POLLERR for _, event in watched.poll(0)):
                return True
        except (OSError, ValueError):  # a stream without a file
            continue
    return False


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (``<&-``) on the null device; Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def drop_output() -> None:
    """Discard the rest of the output after its reader ended; the interpreter then exits quietly too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
