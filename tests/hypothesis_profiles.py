"""Numbers of examples, and of combinations of parameters: few in `make check`, all of them in `make test`."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

Value = TypeVar("Value")

ALL, FEW = 30, 6
_COMMON = {"deadline": None, "derandomize": True, "database": None}


def register_profiles() -> None:
    """Profiles ``thorough``, for ``--hypothesis-profile``, and ``quick``, which is loaded."""
    settings.register_profile("thorough", max_examples=ALL, **_COMMON)
    settings.register_profile("quick", max_examples=FEW, **_COMMON)
    settings.load_profile("quick")


def examples(count: int) -> settings:
    """Settings of a test that needs ``count`` examples where others need `ALL`; a fifth of them in `make check`."""
    return settings(max_examples=max(count * settings.default.max_examples // ALL, 2))


def all_examples() -> bool:
    """True in `make test`."""
    return settings.default.max_examples >= ALL


def few(whole: Iterable[Value], representatives: Iterable[Value]) -> list[Value]:
    """Return the values of a parameter: the whole in `make test`, and in `make check` those that stand for it."""
    return list(whole if all_examples() else representatives)


def in_fewest_combinations(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests with several parameters, keep so many that each value of each parameter occurs.

    `make test` runs every combination.
    """
    seen: set[tuple[str, str, int]] = set()
    kept: set[pytest.Item] = set()
    for enough in (all, any):  # first those in which every value is new
        for item in items:
            call = getattr(item, "callspec", None)
            values = [(item.nodeid.partition("[")[0], *value) for value in call.indices.items()] if call else []
            if not values or enough(value not in seen for value in values):
                kept.add(item)
                seen.update(values)
    return [item for item in items if item in kept]
