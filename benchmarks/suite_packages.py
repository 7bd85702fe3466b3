"""Stand-ins for packages that `decoding` and `trainer` import but the suite can do without.

A machine with a GPU may have torch and transformers and nothing else. The suite uses these packages' names
in annotations only, and settings that are plain values.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGES = ("jaxtyping", "pydantic", "jinja2")


class Nothing(Exception):  # an exception so that it may stand in an except clause too
    """Anything such a package has: a settings class, a decorator, an array's annotation."""

    def __init__(self, *_: Any, **values: Any) -> None:
        self.__dict__.update(values)

    def __class_getitem__(cls, item: Any) -> Any:
        """``Float[Tensor, "rows vocab"]`` is a Tensor."""
        return item[0] if isinstance(item, tuple) else cls

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


@contextmanager
def stand_ins(packages: Sequence[str] = PACKAGES) -> Iterator[list[str]]:
    """While this context lasts, what is not installed can be imported all the same; yields the names of that."""
    missing = []
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
            sys.modules[name] = _Package(name)
    try:
        yield missing
    finally:
        for name in missing:  # others look here to learn what is installed
            del sys.modules[name]
