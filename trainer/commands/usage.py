"""Commands of the typer application: options from dataclasses, help, and usage errors in one sentence."""

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from decoding.errors import UserError
from trainer.commands.guarded import guarded
from trainer.terminal.exit_codes import ExitCode


class Group(TyperGroup):
    """The group of all commands. Usage errors are one sentence; `guarded` sets the exit codes."""

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
        given = [each for each in self.make_parser(ctx).parse_args(list(args))[2] if each.param_type_name == "option"]
        for option in given:
            if given.count(option) > 1 and not getattr(option, "multiple", False):
                raise UserError(f"{option.opts[0]} is given twice", "give it once")
        return super().parse_args(ctx, args)


Options = TypeVar("Options")


def command(
    app: typer.Typer, *examples: str, resumes: bool = False, failed: ExitCode = ExitCode.FAILED
) -> Callable[[Callable[[Options], object]], Callable[[Options], object]]:
    """Turn a function of ``options``, a dataclass with types, defaults and help, into a command.

    ``examples`` end the help. ``resumes``: the same command resumes after a stop. ``failed``: the exit code if the
    function returns False.
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
    more = f"More options, in docs/reference/commands.md: {', '.join(rare)}"
    return f"{shown}\n\n\b\n{textwrap.fill(more, 76, break_on_hyphens=False)}" if rare else shown
