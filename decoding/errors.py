"""Errors that users can fix, each with its remedy."""

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
