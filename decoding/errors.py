"""Errors that users can fix, each with its remedy, and functions that shorten the errors of libraries."""

import reprlib
from collections.abc import Hashable, Iterable


class UserError(ValueError):
    """An error that the user can fix. It is the only type of error that commands print without a traceback.

    The text is ``message: remedy``; both are sentences without a full stop. If ``remedy`` is not passed, the message
    contains the remedy.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)  # both arguments, for pickling
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


def check_once(name: str, values: Iterable[Hashable]) -> None:
    """Raise UserError if a value occurs twice. ``name`` says what the values are, such as "--drafter"."""
    seen = set[Hashable]()
    for value in values:
        if value in seen:
            raise UserError(f"{name} {value} is given twice", "pass it once")
        seen.add(value)


def check_whole(key: str, value: object, least: int = 1) -> None:
    """Raise UserError unless the size ``key`` is an int of at least ``least``; True and 1.0 are also rejected."""
    if type(value) is not int or value < least:
        raise UserError(f"{key} is {reprlib.repr(value)}: use a whole number, {least} or more")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because libraries often raise messages of many lines. If the message
    is empty, return the name of the error's class.

    If the first line ends with a colon, the next line is appended.
    """
    first, *others = lines_of(error)
    return " ".join((first, *others[:1])) if first.endswith(":") else first


def lines_of(error: BaseException) -> list[str]:
    """Return the lines of an error, at least one, each cut to 300 characters."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return [line if len(line) <= 300 else f"{line[:300]}..." for line in lines]
