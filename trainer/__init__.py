"""Training and export of Medusa heads and distilled drafts. Imports decoding, never the reverse.

The public names load on first use, to keep ``import trainer`` from waiting for PyTorch; see ``__init__.pyi`` for types.
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
