"""One process among those that run together, and the console that the first of them speaks on."""

from dataclasses import dataclass, field

from rich.console import Console

from trainer.terminal.console import say, standard_error


@dataclass(frozen=True)
class Place:
    """A process: number ``rank`` (from 0) of ``world`` processes that do the same work together."""

    rank: int = 0
    world: int = 1
    console: Console = field(default_factory=standard_error)

    @property
    def is_first(self) -> bool:
        """True on the process that writes and speaks for all."""
        return self.rank == 0

    def say(self, *lines: str) -> None:
        """Print each line once, on the first process."""
        if self.is_first:
            say(self.console, *lines)


ALONE = Place()
"""A single process that speaks on standard error."""
