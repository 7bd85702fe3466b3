"""Stand-ins for packages that `decoding` and `trainer` import but the suite does not need.

A machine with a GPU may have only torch and transformers. The suite uses these packages' names only in annotations and
for settings with plain values.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("accelerate", "datasets", "jaxtyping", "jinja2", "omegaconf", "pydantic", "rich", "scipy", "yaml")


class Nothing(Exception):  # an exception, so that except clauses accept it
    """Stand-in for anything in such a package: a settings class, a decorator, an array annotation."""

    def __init__(self, *_: Any, **values: Any) -> None:
        self.__dict__.update(values)

    def __class_getitem__(cls, item: Any) -> Any:
        """Return the array type: ``Float[Tensor, "rows vocab"]`` is Tensor."""
        return item[0] if isinstance(item, tuple) else cls

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Silent(Nothing):
    """Stand-in for printers: prints nothing, and every attribute is another such stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent if self.__name__.startswith("rich") else Nothing


class _Finder:
    """Finder and loader of the missing packages and everything imported from them."""

    def __init__(self, missing: Sequence[str]) -> None:
        self._missing = missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = name.partition(".")[0] in self._missing
        return ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]  # a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def stand_ins(packages: Sequence[str] = PACKAGES) -> Iterator[list[str]]:
    """Make missing packages importable within the context; yield their names."""
    missing = [name for name in packages if name not in sys.modules and find_spec(name) is None]
    finder = _Finder(missing)
    sys.meta_path.append(finder)  # type: ignore[arg-type]  # a finder needs only these methods
    try:
        yield missing
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]  # other code checks here what is installed
