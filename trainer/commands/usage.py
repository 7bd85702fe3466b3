"""Commands of the typer application: options, help, and usage errors of one sentence before the work."""

import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from decoding.errors import UserError, check_once
from trainer.commands.guarded import guarded


class Group(TyperGroup):
    """The group of all commands. A usage error is one sentence, and the exit codes are those of `guarded`."""

    def main(self, *args: Any, **named: Any) -> Any:
        """Run a command line to its end."""

        def work() -> None:
            try:
                code = super(Group, self).main(*args, **{**named, "standalone_mode": False})
            except typer.TyperException as error:
                message = " ".join(error.format_message().split()).rstrip(".")
                context = getattr(error, "ctx", None)
                raise UserError(message, f"see '{context.command_path if context else 'headstart'} --help'") from None
            raise typer.Exit(code or 0)

        sys.exit(guarded(work))


class Command(TyperCommand):
    """A command that rejects a second value of an option that takes one. Typer alone would use the last value."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Parse the words behind the command's name."""
        options: dict[str, Any] = {name: each for each in self.params for name in (*each.opts, *each.secondary_opts)}
        given, words = [], iter(arguments)
        for word in words:
            if word == "--":
                break
            name, equals, _ = word.partition("=")
            option = options.get(name)
            if option is None or not name.startswith("-"):
                continue
            if not option.multiple:
                given.append(option.opts[0])
            if not (equals or option.is_flag):
                next(words, None)  # the option's value
        check_once("the option", given)
        return super().parse_args(context, arguments)


Options = TypeVar("Options")


def command(
    app: typer.Typer, options: type[Options], *examples: str, name: str | None = None, resumes: bool = False
) -> Callable[[Callable[[Options], None]], Callable[[Options], None]]:
    """Make a command of a function; its options are a dataclass, with their types, defaults and help.

    ``examples`` end the help. ``resumes``: started again, the command goes on where it was stopped.
    """

    def decorate(work: Callable[[Options], None]) -> Callable[[Options], None]:
        @wraps(work)
        def run(**values: Any) -> None:
            raise typer.Exit(guarded(lambda: work(options(**_finite(values))), debugging(), resumes))

        run.__signature__ = signature(options)  # type: ignore[attr-defined]  # what typer reads
        app.command(name, cls=Command, epilog=_epilog(options, examples))(run)
        return work

    return decorate


def _epilog(options: Any, examples: Sequence[str]) -> str:
    """Return a help's end: the examples, and the names of the options that it leaves to the reference."""
    lines = "\n".join(f"  {line}" for example in examples for line in example.splitlines())
    shown = f"\b\nExample{'s' if len(examples) > 1 else ''}:\n{lines}"  # \b: the paragraph keeps its lines
    hints = get_type_hints(options, include_extras=True)
    rare = [_name(field) for field, hint in hints.items() if hint.__metadata__[0].hidden]
    more = f"More options, in docs/reference/commands.md: {', '.join(rare)}"
    return f"{shown}\n\n\b\n{textwrap.fill(more, 76, break_on_hyphens=False)}" if rare else shown


def _name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values; UserError for a number that is not finite, which typer lets through."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{_name(name)} is {value}", "give a finite number")
    return values


def debugging() -> bool:
    """Return True under ``headstart --debug``."""
    return os.environ.get("HEADSTART_DEBUG") == "1"
