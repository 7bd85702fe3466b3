"""Public names of a package that are imported on first use, so that importing the package does not load PyTorch."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package: the names that its ``__init__.pyi`` imports.

    ``file`` is the package's ``__init__.py``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    homes = {name.name: node.module for node in stub if isinstance(node, ast.ImportFrom) for name in node.names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(str(homes[name])), name)

    return find, lambda: sorted({*vars(import_module(package)), *homes}), [*homes]
