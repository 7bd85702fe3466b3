"""The commands of the typer application: how they get options from dataclasses, show help, and report usage errors in
one sentence.

An error, a signal or a closed pipe that ends a command is turned into one sentence and an exit code.
"""

import os
import select
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from decoding.errors import UserError
from decoding.measure.markdown import one_line
from decoding.measure.redact import without_secrets
from decoding.threads import spin_briefly
from trainer.terminal.console import quiet_libraries, say, say_error, standard_error
from trainer.terminal.exit_codes import ExitCode, Stopped

_FULL = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Phrases by which PyTorch's RuntimeErrors say that the memory of a CPU or a GPU is full."""


def guarded(work: Callable[[], None], debug: bool = False, resumes: bool = False) -> int:
    """Run ``work``; return its exit code. An error becomes one sentence, or with ``debug`` a traceback.

    ``resumes``: the command resumes if it is started again after Ctrl-C.
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
    # An errno comes from the operating system: a missing file, a full disk, no permission.
    of_the_user = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None)
    return ExitCode.BAD_INPUT if of_the_user else ExitCode.INTERNAL_ERROR


def _sentence(error: Exception) -> str:
    """Describe an error in one sentence, with a remedy and without secrets or control characters."""
    sentence, code = without_secrets(one_line(error)) or type(error).__name__, _code(error)
    if code == ExitCode.OUT_OF_MEMORY:
        remedy = (
            "use smaller batches or shorter texts, or stop other programs that use this memory, such as a server; "
            "'headstart train RECIPE --dry-run' prints the memory that training needs"
        )
        return f"out of memory ({sentence}): {remedy}"
    if isinstance(error, UserError):
        return sentence
    kept = _kept_traceback()
    where = f"the traceback is in {kept}; " if kept else ""
    kind = f"internal error, {type(error).__name__}: " if code == ExitCode.INTERNAL_ERROR else ""
    return f"{kind}{sentence}: {where}'headstart --debug COMMAND ...' prints the traceback"


def _kept_traceback() -> str | None:
    """Write the current traceback to a file that only this user can read; return its path, or None on failure."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="headstart-", suffix=".txt", delete=False) as file:
            file.write(without_secrets(traceback.format_exc()))
    except OSError:
        return None
    return file.name


def _output_is_closed() -> bool:
    """Return True if nobody reads standard output or standard error any more; a broken connection to a server does not
    count.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            watched = select.poll()
            watched.register(stream.fileno(), 0)  # POLLERR is always reported
            if any(event & select.POLLERR for _, event in watched.poll(0)):
                return True
        except (OSError, ValueError):  # a stream without a file
            continue
    return False


def _open_closed_streams() -> None:
    """Connect standard streams that the caller closed (``<&-``), which are None in Python, to the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def drop_output() -> None:
    """Discard the rest of the output after its reader ended, so that the interpreter exits quietly."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


class Group(TyperGroup):
    """The group of all commands. Usage errors are printed as one sentence; `guarded` sets the exit codes."""

    def main(self, *args: Any, **named: Any) -> Any:
        """Run a command line and exit."""

        def work() -> None:
            try:
                code = super(Group, self).main(*args, **{**named, "standalone_mode": False})
            except typer.TyperException as error:
                message = " ".join(error.format_message().split()).rstrip(".")
                context = getattr(error, "ctx", None)
                raise UserError(message, f"see '{context.command_path if context else 'headstart'} --help'") from None
            raise typer.Exit(code or 0)

        sys.exit(guarded(work))


class Once(TyperCommand):
    """A command that rejects a repeated single-value option; the first value would be lost silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        given = [
            parameter
            for parameter in self.make_parser(ctx).parse_args(list(args))[2]
            if parameter.param_type_name == "option"
        ]
        for option in given:
            if given.count(option) > 1 and not getattr(option, "multiple", False):
                raise UserError(f"{option.opts[0]} is given twice", "pass it once")
        return super().parse_args(ctx, args)


Options = TypeVar("Options")


def command(
    app: typer.Typer, *examples: str, resumes: bool = False, failed: ExitCode = ExitCode.FAILED
) -> Callable[[Callable[[Options], object]], Callable[[Options], object]]:
    """Make a command from a function that takes one argument, ``options``.

    The argument's type is a dataclass whose fields have types, defaults and help texts. The command's help ends with
    ``examples``. ``resumes``: the command resumes if it is started again. ``failed``: the exit code if the function
    returns False.
    """

    def decorate(work: Callable[[Options], object]) -> Callable[[Options], object]:
        options: Any = signature(work).parameters["options"].annotation

        @wraps(work)
        def run(**values: Any) -> None:
            def to_its_end() -> None:
                if work(options(**values)) is False:
                    raise typer.Exit(failed)

            raise typer.Exit(guarded(to_its_end, os.environ.get("HEADSTART_DEBUG") == "1", resumes))

        run.__signature__ = signature(options)  # type: ignore[attr-defined]  # read by typer
        app.command(cls=Once, epilog=_epilog(options, examples))(run)
        return work

    return decorate


def _epilog(options: Any, examples: Sequence[str]) -> str:
    """Return the end of a help text: the examples, and the names of hidden options."""
    lines = "\n".join(f"  {line}" for example in examples for line in example.splitlines())
    shown = f"\b\nExample{'s' if len(examples) > 1 else ''}:\n{lines}"  # \b: keep the line breaks
    hints = get_type_hints(options, include_extras=True)
    rare = [f"--{field.replace('_', '-')}" for field, hint in hints.items() if hint.__metadata__[0].hidden]
    more = f"More options are described in docs/reference/commands.md: {', '.join(rare)}"
    return f"{shown}\n\n\b\n{textwrap.fill(more, 76, break_on_hyphens=False)}" if rare else shown
