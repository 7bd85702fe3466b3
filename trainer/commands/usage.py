"""Commands of the typer application: options, help, and usage errors of one sentence before the work."""

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from trainer.commands.guarded import guarded


class Group(TyperGroup):
    """The group of all commands. A usage error is one sentence, and the exit codes are those of `guarded`."""

    def main(self, *args: Any, **named: Any) -> Any:
        """Run a command line to its end."""

        def work() -> None:
            try:
                code = super(Group, self).main(*args, **{**named, "standalone_mode": False})
            except typer.TyperException as error:
                told = " ".join(error.format_message().split()).rstrip(".")
                context = getattr(error, "ctx", None)
                raise ValueError(f"{told}: see '{context.command_path if context else 'headstart'} --help'") from None
            raise typer.Exit(code or 0)

        sys.exit(guarded(work))


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
        app.command(name, epilog=_epilog(options, examples))(run)
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
    """Return the values; ValueError for a number that is not finite, which typer lets through."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{_name(name)} is {value}: give a finite number")
    return values


def listed(values: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the values of a list-like option, given by commas, repeated, or both; None if it was not given."""
    if values is None:
        return None
    found = tuple(name.strip() for value in values for name in value.split(","))
    if again := next((name for place, name in enumerate(found) if name in found[:place]), None):
        raise ValueError(f"{again!r} is listed twice in {','.join(found)}: give each once")
    return found


Number = TypeVar("Number", int, float)


def numbers(option: str, values: Iterable[str] | None, kind: type[Number]) -> tuple[Number, ...] | None:
    """Return the numbers of a list-like option; None if it was not given. ValueError names the option."""
    found: list[Number] = []
    for text in listed(values) or ():
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not math.isfinite(number) or number <= 0:
            wanted = "whole numbers of at least 1" if kind is int else "numbers above 0"
            hint = ""
            if kind is float:
                hint = " (0 is the setting greedy)"
            raise ValueError(f"{option} is {text}: give {wanted}{hint}")
        if number in found:
            raise ValueError(f"{option} has {number:g} twice: give each once")
        found.append(number)
    return tuple(found) or None


def debugging() -> bool:
    """Return True under ``headstart --debug``."""
    return os.environ.get("HEADSTART_DEBUG") == "1"
