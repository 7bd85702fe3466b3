"""Parsing of drafters written as ``NAME[:PATH][,option=value,…]``; the options are the parameters of the drafter's
class.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM


class DraftPath(str):
    """Value of an option that names a second draft: a folder or Hub id, which is replaced by the loaded weights."""


class Option(NamedTuple):
    """An option of a drafter, named after a parameter of the drafter's class. ``wanted`` describes allowed values."""

    default: Any
    wanted: str
    read: Callable[[str], Any]
    """Function from text to value; raises ValueError for a text that is not a value."""

    @property
    def shown(self) -> str:
        """Default value as written in a spec; the text is empty if there is no default."""
        return "" if self.default is None or self.required else _written(self.default)

    @property
    def required(self) -> bool:
        """True if a spec must contain the option."""
        return self.default is Parameter.empty


@dataclass(frozen=True)
class DrafterSpec:
    """A requested drafter: its name in the registry, the path of its weights, its options by name."""

    name: str
    path: str | None
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.with_path(self.path)

    def with_path(self, path: str | None) -> str:
        """Write the spec with ``path`` instead of its own path."""
        options = [f"{name}={_written(value)}" for name, value in self.options.items()]
        items = [*([path] if path is not None else []), *options]
        return self.name + (":" if items else "") + ",".join(items)

    def renamed(self, name_of: Callable[[str], str]) -> str:
        """Write the spec with every path replaced by the name that ``name_of`` returns for it."""
        named = {name: name_of(v) if isinstance(v, DraftPath) else v for name, v in self.options.items()}
        return replace(self, options=named).with_path(None if self.path is None else name_of(self.path))

    @property
    def paths(self) -> dict[str, str]:
        """The paths of the weights.

        The key of `path` is empty; the key of each further draft is the name of its option.
        """
        drafts: dict[str, str] = {name: value for name, value in self.options.items() if isinstance(value, DraftPath)}
        return drafts if self.path is None else {"": self.path, **drafts}


def all_paths(specs: Mapping[str, DrafterSpec]) -> dict[str, str]:
    """Return the paths of all weights. The keys are the names of the specs; for a further draft, the name of its option
    is appended.
    """
    return {f"{name} {option}".strip(): path for name, spec in specs.items() for option, path in spec.paths.items()}


def split_spec(text: str, names: Sequence[str]) -> tuple[str | None, str | None, dict[str, str]]:
    """Split a spec into name (None if it begins with the path), path and options, unchecked.

    A text that begins with none of ``names`` is a path if it exists or has a slash. After a name, the first item is the
    path if a file or folder of this name exists, or if the item lacks ``=``. If several items together form an existing
    path, they are the path.

    Raises UserError for an unknown name, and for an item that is neither the path nor ``option=value``.
    """
    head = re.split("[:,]", text, maxsplit=1)[0]
    named = head in names
    if not named and "/" not in head and not (head and Path(head).exists()):
        remedy = f", or draft:{head} for a model of that name" if head else ""
        raise UserError(f"no drafter is called {head!r}: choose one of {', '.join(names)}{remedy}")
    rest = text[len(head) + 1 :] if named else text
    path: str | None = None
    options: dict[str, str] = {}
    items = rest.split(",") if rest else []
    # A path may contain commas.
    parts = next((n for n in range(len(items), 1, -1) if os.path.exists(",".join(items[:n]))), 1)
    for index, item in enumerate([",".join(items[:parts]), *items[parts:]] if items else ()):
        option, equals, value = item.partition("=")
        if index == 0 and (parts > 1 or not equals or not named or Path(item).exists()):
            path = item
        elif not equals or not option.strip():
            raise UserError(f"{text!r} contains {item!r}: after the path, write option=value, separated by commas")
        elif option.strip() in options:
            raise UserError(f"{text!r} contains {option.strip()} twice: write it once")
        else:
            options[option.strip()] = value.strip()
    return (head if named else None), path or None, options


def options_of(make: Callable[..., Any], skipped: int = 0) -> dict[str, Option]:
    """Return the parameters of a class or function as options. The first ``skipped`` parameters are left out."""
    options = {}
    for parameter in list(signature(make).parameters.values())[skipped:]:
        annotation = parameter.annotation
        if isinstance(annotation, UnionType):
            (annotation,) = (part for part in get_args(annotation) if part is not type(None))
        options[parameter.name] = Option(parameter.default, *_READERS[annotation])
    return options


def read_options(given: Mapping[str, Any], known: Mapping[str, Option], of: str) -> dict[str, Any]:
    """Read the values of these options; each is a text, or a value that was read before.

    Raises UserError for an option that is not in ``known``, or for an invalid value; in the message the drafter is
    called ``of``.
    """
    values = {}
    for name, value in given.items():
        if name not in known:
            choice = f"choose among {', '.join(known)}" if known else "it has no options"
            raise UserError(f"{of} does not take {name!r}: {choice}")
        try:
            values[name] = value if isinstance(value, CausalLM) else known[name].read(_written(value))
        except ValueError:
            raise UserError(f"{of} is given {name}={_written(value)}: use {known[name].wanted}") from None
    return values


def one_of(*choices: str) -> Option:
    """Return an option that takes one of ``choices``."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return Option(None, f"one of {', '.join(choices)}", read)


def _whole(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _path(text: str) -> DraftPath:
    if not text:
        raise ValueError
    return DraftPath(text)


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    if text.isdecimal() and int(text):  # "tree=16" is probably meant as a size, not as the one token of rank 16
        raise ValueError
    return tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("/"))


_READERS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    CausalLM: ("a folder or Hub id of a draft", _path),
    int: ("a whole number of at least 1", _whole),
    float: ("a finite number", _number),
    bool: ("true or false", lambda text: bool(("false", "true").index(text))),
    Sequence[Sequence[int]]: ("paths of ranks, such as 0/1/0.0/0.1, not a size", _paths),
}


def _written(value: Any) -> str:
    """Write a value in the form that `read_options` reads."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "/".join(".".join(map(str, path)) for path in value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
