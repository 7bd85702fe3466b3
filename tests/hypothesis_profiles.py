"""Numbers of hypothesis examples: few in `make check`, all of them in `make test`."""

from hypothesis import settings

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
