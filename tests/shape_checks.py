"""Checks of the shape annotations in the pure modules, at each call of a function that has one.

jaxtyping's own import hook wraps every function of a module, which doubles the time of all tests that decode.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

PURE = tuple(f"decoding.rules.{name}" for name in ("tree", "sampling", "verify"))

_ARRAY = "[Tensor,"
"""Part of the source of an annotation such as ``Float[Tensor, "rows vocab"]``."""

# An int is accepted for a float, as in ``SamplingConfig(1)``.
_checked = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))


class _Decorate(ast.NodeTransformer):
    """Decorates the functions and dataclasses that have an annotation with a shape."""

    def __init__(self) -> None:
        self.count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if _ARRAY in ast.unparse(node.args) or (node.returns and _ARRAY in ast.unparse(node.returns)):
            self._decorate(node, len(node.decorator_list))  # innermost, below the property
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        if node.decorator_list and any(_ARRAY in ast.unparse(field.annotation) for field in fields):
            self._decorate(node, 0)
        return node

    def _decorate(self, node: ast.FunctionDef | ast.ClassDef, place: int) -> None:
        node.decorator_list.insert(place, ast.copy_location(ast.Name("_checked", ast.Load()), node))
        self.count += 1


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the decorated source; bytecode that lies next to it has no checks."""
        path = self.get_filename(fullname)
        decorate = _Decorate()
        tree = ast.fix_missing_locations(decorate.visit(ast.parse(self.get_data(path), path)))
        assert decorate.count, f"{fullname} has no annotation with a shape"
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_checked"] = _checked
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in PURE:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


def enforce_shapes() -> None:
    """From now on, functions of the pure modules reject arrays whose shape or type differs from the annotation."""
    assert not set(PURE) & set(sys.modules), "a pure module was imported before its shapes could be enforced"
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]  # a finder needs no more
