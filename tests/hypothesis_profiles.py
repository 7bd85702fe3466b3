"""Numbers of hypothesis examples: few in `make check`, all of them in `make test`."""

from hypothesis import settings

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
