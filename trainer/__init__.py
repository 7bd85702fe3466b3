"""Training of Medusa heads and distilled drafts, and their export. Imports decoding, never the reverse.

The names below are imported when they are first asked for, so that ``import trainer`` does not wait for PyTorch. Their
types stand in ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "load_recipe": "trainer.recipe.reading",
    "prepare_target": "trainer.run.train",
    "run_recipe": "trainer.run.train",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
