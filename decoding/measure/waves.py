"""Waves: prompts that are decoded and timed at once, and the sources that write the prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


class PromptSource(Protocol):
    """Questions, by place from 0, each with one turn or several."""

    @property
    def ids(self) -> Sequence[str]:
        """Names of the questions, each its own."""

    @property
    def tasks(self) -> Sequence[str | None]:
        """Task of each question; None where the questions have none."""

    def turns(self, place: int) -> int:
        """Return the number of turns of a question."""

    def prompt(self, place: int, context: int | None = None, answers: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        """Return the prompt of the turn behind these answers to the turns before; ``context``: at most its tokens."""


@dataclass(frozen=True)
class TokenPrompts:
    """Prompts as token ids, of one turn each, used as they are at every context."""

    prompts: Sequence[Sequence[int]]

    @property
    def ids(self) -> Sequence[str]:
        return [str(place) for place in range(len(self.prompts))]

    @property
    def tasks(self) -> Sequence[str | None]:
        return [None] * len(self.prompts)

    def turns(self, place: int) -> int:
        return 1

    def prompt(self, place: int, context: int | None = None, answers: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        return tuple(self.prompts[place])


@dataclass(frozen=True)
class Wave:
    """Questions of one task, by place, that are decoded and timed at once."""

    index: int
    places: tuple[int, ...]


def waves_of(tasks: Sequence[str | None], batch_size: int) -> list[Wave]:
    """Deal the questions over waves: one each at batch size 1, else about twice the batch size of one task.

    A task's waves are of equal size, so that none is left with too few texts to fill the batch's rows for long.
    """
    groups: list[list[int]] = []
    for task in dict.fromkeys(tasks):
        places = [place for place, own in enumerate(tasks) if own == task]
        if batch_size == 1:
            groups += [[place] for place in places]
        else:
            groups += equal_parts(places, max(1, round(len(places) / (2 * batch_size))))
    if batch_size == 1:
        groups.sort()
    return [Wave(index, tuple(places)) for index, places in enumerate(groups)]


def equal_parts(places: Sequence[int], parts: int) -> list[list[int]]:
    """Cut a list into ``parts`` consecutive lists whose lengths differ by one at most."""
    ends = [round(len(places) * part / parts) for part in range(parts + 1)]
    return [list(places[begin:end]) for begin, end in pairwise(ends)]
