"""Commands and groups of commands: their help, and checks of options before the work: every error one sentence."""

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from trainer.commands.completion import prepare, shortened
from trainer.commands.guarded import guarded
from trainer.commands.help import columns, first_clause, full_page, list_page, rendered, short_page
from trainer.terminal.console import say_error, standard_error
from trainer.terminal.exit_codes import ExitCode

_UsageError: Any = typer.BadParameter.__bases__[0]
"""The base of all parser errors; typer gives it no name of its own."""


_COMPLETION = {
    "install_completion": "Complete words of this program by TAB in this shell.",
    "show_completion": "Print the shell's part of that completion.",
}
"""Shorter helps of typer's own options."""

Page = Callable[[Any, Any, int], Text]
"""A help page of a command, its context and a width."""


def _shows(page: Page) -> Callable[[Any, Any, Any], None]:
    def show(ctx: Any, option: Any, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            raise typer.Exit(guarded(lambda: typer.echo(rendered(page(ctx.command, ctx, columns())))))

    return show


def _help_option(option: Any, name: str, text: str, page: Page) -> Any:
    """Return a copy of typer's --help with another name, text and page."""
    other = copy.copy(option)
    other.name, other.opts = name.removeprefix("--").replace("-", "_"), [name]
    other.help, other.callback = text, _shows(page)
    return other


def _refused(message: str) -> typer.Exit:
    """Print a usage error; return the end of the program."""
    code = guarded(lambda: say_error(standard_error(), message))
    return typer.Exit(code or ExitCode.BAD_INPUT)


class Group(TyperGroup):
    """A group of commands with a help of one screen; its usage errors are one sentence."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with a --help that prints the list of commands."""
        options: list[Any] = super().get_params(ctx)
        *options, shown = options
        for option in options:
            option.help = _COMPLETION.get(option.name, option.help)
        if not hasattr(self, "_list_option"):
            self._list_option = _help_option(shown, "--help", "Show this page.", list_page)
        return [*options, self._list_option]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; without a command print the help and exit with `BAD_INPUT`."""
        if not args and not ctx.resilient_parsing:
            guarded(lambda: typer.echo(rendered(list_page(self, ctx, columns()))))
            raise typer.Exit(ExitCode.BAD_INPUT)
        rest: list[str] = self._in_one_sentence(ctx, lambda: super(Group, self).parse_args(ctx, args))
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; for an unknown one print a sentence and exit with `BAD_INPUT`."""
        return self._in_one_sentence(ctx, lambda: super(Group, self).resolve_command(ctx, args))

    def _in_one_sentence(self, ctx: Any, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except _UsageError as error:
            message = f"{_sentence(error, {})}: see '{ctx.command_path} --help'"
        raise _refused(message)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and options that begin so, each with the first clause of its help."""
        items = shortened(super().shell_complete(ctx, incomplete))
        for item in items:
            if command := self.commands.get(item.value):
                item.help = first_clause(command.help or "")
        return items

    def main(self, *args: Any, **named: Any) -> Any:
        """Run the program, or complete a command line for a shell."""
        if os.environ.get("_HEADSTART_COMPLETE") or {"--show-completion", "--install-completion"} & set(sys.argv):
            prepare()
        return super().main(*args, **named)


class Command(TyperCommand):
    """A command that reports usage errors in one sentence and refuses an option given twice.

    ``--help`` is one screen; ``--help-all`` shows every option in full.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with --help and --help-all."""
        *options, shown = super().get_params(ctx)
        if not hasattr(self, "_help_options"):
            self._help_options = [
                _help_option(shown, "--help", "Show this page.", short_page),
                _help_option(shown, "--help-all", "Show every option, with its whole help.", full_page),
            ]
        return [*options, *self._help_options]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; on an error print a sentence and exit with `BAD_INPUT`."""
        values: dict[str, Any] = {}
        try:
            values, _, given = self.make_parser(ctx).parse_args(args=list(args))
            self._check_given_once(given)
            rest: list[str] = super().parse_args(ctx, args)
            self._check_finite(ctx)
        except ValueError as error:
            message = str(error)
        except _UsageError as error:
            message = f"{_sentence(error, values)}: see '{ctx.command_path} --help'"
        else:
            return rest
        raise _refused(message)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the options that begin so, each with the first clause of its help."""
        return shortened(super().shell_complete(ctx, incomplete))

    def _check_given_once(self, given: Iterable[Any]) -> None:
        """Raise ValueError for an option of one value that is given twice: either value may be the one meant."""
        seen = set()
        for option in given:
            single = option.param_type_name == "option" and not option.multiple and not option.count
            if single and option.name in seen:
                raise ValueError(f"{_name(option)} is given twice: give it once")
            seen.add(option.name)

    def _check_finite(self, ctx: Any) -> None:
        for option in self.get_params(ctx):
            value = ctx.params.get(option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{_name(option)} is {value}: give a finite number")


def _name(option: Any) -> str:
    """Return the option as users write it: ``--max-new-tokens``, or both of ``--chat/--no-chat``."""
    return "/".join([*option.opts, *option.secondary_opts])


def _sentence(error: Any, values: Mapping[str, Any]) -> str:
    option = getattr(error, "param", None)
    given = values.get(option.name) if option is not None else None  # nothing is given for a missing argument
    if isinstance(error, typer.BadParameter) and given is not None:
        found = str(error.message)
        return f"{_name(option)} is {given}: {found[:1].lower()}{found[1:].rstrip('.')}"
    return " ".join(str(error.format_message()).split()).rstrip(".")


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


Options = TypeVar("Options")


def takes(options: type[Options], resumes: bool = False) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command's options of a dataclass: its fields with their types, their defaults and their help.

    ``resumes``: started again, the command goes on where it was stopped.
    """

    def decorate(work: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(work)
        def command(**values: Any) -> None:
            raise typer.Exit(guarded(lambda: work(options(**values)), debugging(), resumes))

        command.__signature__ = signature(options)  # type: ignore[attr-defined]  # what typer reads
        return command

    return decorate


def debugging() -> bool:
    """Return True under ``headstart --debug``."""
    return os.environ.get("HEADSTART_DEBUG") == "1"
