"""Checks of a command's options before it runs: each given once, numbers finite, every error one sentence."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from trainer.terminal.console import say_error, standard_error

BAD_INPUT = 2
_UsageError: Any = typer.BadParameter.__bases__[0]
"""The base of all parser errors; typer gives it no name of its own."""


class Command(TyperCommand):
    """A command that reports usage errors in one sentence and refuses an option given twice."""

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
        say_error(standard_error(), message)
        raise typer.Exit(BAD_INPUT)

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
    if isinstance(error, typer.BadParameter) and option is not None and option.name in values:
        found = str(error.message)
        return f"{_name(option)} is {values[option.name]}: {found[:1].lower()}{found[1:].rstrip('.')}"
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
