"""How many examples and combinations of parameters the tests use: few in `make check`, and all in `make test`."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

Value = TypeVar("Value")

ALL, FEW = 30, 6
_COMMON = {"deadline": None, "derandomize": True, "database": None}


def register_profiles() -> None:
    """Register the profiles ``thorough``, for ``--hypothesis-profile``, and ``quick``, which is loaded by default."""
    settings.register_profile("thorough", max_examples=ALL, **_COMMON)
    settings.register_profile("quick", max_examples=FEW, **_COMMON)
    settings.load_profile("quick")


def examples(count: int) -> settings:
    """Return the settings of a test that needs ``count`` examples instead of `ALL`;
    `make check` runs a fifth of them.
    """
    return settings(max_examples=max(count * settings.default.max_examples // ALL, 2))


def all_examples() -> bool:
    """True in `make test`."""
    return settings.default.max_examples >= ALL


def few(whole: Iterable[Value], representatives: Iterable[Value]) -> list[Value]:
    """Return the values of a parameter: all values in `make test`, and in `make check` only the values that represent
    them.
    """
    return list(whole if all_examples() else representatives)


def in_fewest_combinations(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests to run and the tests to leave out. Each value of each parameter occurs in some test to run."""
    seen: set[object] = set()
    kept: set[pytest.Item] = set()
    for enough in (all, any):  # first those in which every value is new
        for item in items:
            values = _values(item)
            if not values or enough(value not in seen for value in values):
                kept.add(item)
                seen.update(values)
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def _values(item: pytest.Item) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the value of each `parametrize` of a test, by identity, because combinations of values share their
    objects.
    """
    argnames = [mark.args[0] for mark in item.iter_markers("parametrize")]
    given = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in argnames]
    params: dict[str, object] = item.callspec.params if given else {}  # type: ignore[attr-defined]  # of a function
    test = item.nodeid.partition("[")[0]
    return [(test, index, tuple(id(params[name]) for name in names)) for index, names in enumerate(given)]
