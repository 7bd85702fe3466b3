"""Drafters as text: ``NAME[:PATH][,option=value,…]``, and options with the types and defaults of a class."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args


class Option(NamedTuple):
    """An option of a drafter. ``parameter`` is its name in the drafter's class."""

    parameter: str
    default: Any
    wanted: str
    """Description of the values that it takes."""
    read: Callable[[str], Any]
    """Function from text to value; ValueError for any other text."""

    @property
    def shown(self) -> str:
        """Default value as a spec writes it; empty if it is None."""
        return "" if self.default is None else written(self.default)


class Words(NamedTuple):
    """Parts of a spec, unchecked. ``name`` is None if the text begins with the path."""

    name: str | None
    path: str | None
    options: Mapping[str, str]


@dataclass(frozen=True)
class DrafterSpec:
    """A requested drafter: its name in the registry, the path of its weights, its options by name."""

    name: str
    path: str | None
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.with_path(self.path)

    def with_path(self, path: str | None) -> str:
        """Write the spec with ``path`` in place of its own."""
        options = [f"{name}={written(value)}" for name, value in self.options.items()]
        items = [*([path] if path is not None else []), *options]
        return self.name + (":" if items else "") + ",".join(items)


def split_words(text: str, names: Sequence[str]) -> Words:
    """Split a spec into its parts. A text that begins with none of ``names`` is a path if it exists or has a slash.

    Behind a name the first item is the path if it exists or holds no ``=``.

    ValueError for an unknown name, and for an item that is neither the path nor ``option=value``.
    """
    head = re.split("[:,]", text, maxsplit=1)[0]
    named = head in names
    if not named and "/" not in head and not (head and Path(head).exists()):
        remedy = f", or draft:{head} for a model of that name" if head else ""
        raise ValueError(f"no drafter is called {head!r}: choose one of {', '.join(names)}{remedy}")
    rest = text[len(head) + 1 :] if named else text
    path: str | None = None
    options: dict[str, str] = {}
    for place, item in enumerate(rest.split(",") if rest else ()):
        option, equals, value = item.partition("=")
        if place == 0 and (not equals or not named or Path(item).exists()):
            path = item
        elif not equals or not option.strip():
            raise ValueError(f"{text!r} holds {item!r}: behind the path give option=value, with commas between them")
        elif option.strip() in options:
            raise ValueError(f"{text!r} gives {option.strip()} twice: give it once")
        else:
            options[option.strip()] = value.strip()
    return Words(head if named else None, path or None, options)


def options_of(make: Callable[..., Any], **parameters: str) -> dict[str, Option]:
    """Return the options ``option=parameter`` of a class or function, with the parameters' types and defaults."""
    known = signature(make).parameters
    options = {}
    for option, parameter in parameters.items():
        wanted, read = _reader(known[parameter].annotation)
        options[option] = Option(parameter, known[parameter].default, wanted, read)
    return options


def read_options(given: Mapping[str, Any], known: Mapping[str, Option], of: str) -> dict[str, Any]:
    """Read the values of the given options, each a text or a value already read.

    ValueError, in one sentence, for an option that ``known`` lacks and for a value that does not fit; ``of`` names the
    drafter in it.
    """
    values = {}
    for name, value in given.items():
        if name not in known:
            choice = f"choose among {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{of} has no option {name!r}: {choice}")
        option = known[name]
        try:
            values[name] = option.read(written(value))
        except ValueError:
            raise ValueError(f"{of} is given {name}={written(value)}: give {option.wanted}") from None
    places = [known[name].parameter for name in values]
    if again := next((place for place in places if places.count(place) > 1), None):
        both = " and ".join(name for name in values if known[name].parameter == again)
        raise ValueError(f"{of} is given {both}, which say the same: give one of them")
    return values


def one_of(*choices: str) -> tuple[str, Callable[[str], str]]:
    """Return the description and the reader of an option that takes one of ``choices``."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return f"one of {', '.join(choices)}", read


def whole(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(whole(part) for part in text.split("x"))


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("/"))


WHOLE = "a whole number of at least 1"
_READERS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    int: (WHOLE, whole),
    float: ("a finite number", _number),
    bool: ("true or false", _flag),
    Sequence[int]: ("whole numbers with x between them, such as 3x2x1", _wholes),
    Sequence[Sequence[int]]: ("paths of ranks, such as 0/1/0.0/0.1", _paths),
}


def _reader(annotation: Any) -> tuple[str, Callable[[str], Any]]:
    if isinstance(annotation, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return _READERS[annotation]


def written(value: Any) -> str:
    """Write a value as `read_options` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        nested = any(isinstance(part, Sequence) for part in value)
        return "/".join(".".join(map(str, path)) for path in value) if nested else "x".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
