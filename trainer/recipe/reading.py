"""Recipes from YAML, overridden by ``a.b=c``. Unknown keys are errors, and every mistake is one sentence."""

import difflib
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from decoding.errors import check_once
from trainer.recipe.layers import laid_over, nested, open_keys, read_yaml, resolved
from trainer.recipe.recipe import AnyRecipe, Recipe

_ADAPTER: TypeAdapter[AnyRecipe] = TypeAdapter(Recipe)
_KINDS: dict[str, type[AnyRecipe]] = {
    get_args(recipe.model_fields["kind"].annotation)[0]: recipe for recipe in get_args(AnyRecipe)
}
"""Value of the field ``kind`` -> the class of its recipes."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe and apply ``section.key=value`` overrides; every mistake is one sentence in a ValueError."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no recipe {path}: give a YAML file, such as recipes/quickstart/medusa1.yaml")
    wrong = [override for override in overrides if "=" not in override]
    if wrong:
        raise ValueError(f"override {wrong[0]!r} has no '=': write section.key=value")
    given = [override.partition("=") for override in overrides]
    check_once("the override", (key for key, _, _ in given))
    files = _with_bases(path)
    try:
        content = reduce(laid_over, [*files, *(nested(key, read_yaml(value)) for key, _, value in given)])
        left_open = sorted(open_keys(content))
        content = resolved(content, content)
    except ValueError as error:
        raise _unreadable(path, error) from error
    except RecursionError as error:
        raise _unreadable(path, "a value holds itself") from error
    recipe = parse_recipe(content, str(path))  # first, so that a misspelt override is named as one
    if left_open:
        raise ValueError(f"{path} leaves {', '.join(left_open)} to you: give {left_open[0]}=... behind the recipe")
    return recipe


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[dict[Any, Any]]:
    """Return the contents of a file and of its bases, the lowest first; ``base`` is a path from the file's folder."""
    if path.resolve() in above:
        raise ValueError(f"{path} is its own base, by way of {len(above)} recipes: name another")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise _unreadable(path, error) from error
    if content is None or isinstance(content, str):  # an empty file, or a word: no keys
        content = {}
    if not isinstance(content, dict):
        raise _unreadable(path, "it is a list or a number, not sections with keys")
    base = content.pop("base", None)
    if base is None:
        return [content]
    if not (path.parent / str(base)).is_file():
        raise ValueError(f"{path}: its base {base!r} is not there: give the path of a recipe from {path.parent}")
    return [*_with_bases(path.parent / str(base), (*above, path.resolve())), content]


def _unreadable(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path} is not a readable recipe: {reason}")


def parse_recipe(content: Any, source: str = "recipe") -> AnyRecipe:
    """Return the recipe of plain values; ValueError names the first mistake, and ``source`` as its place."""
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    """Return the first mistake as a sentence, with the value and the nearest valid name."""
    # A misspelt key may leave its right name missing too: the misspelling is what to say.
    first = next((each for each in error.errors() if each["type"] == "extra_forbidden"), error.errors()[0])
    location = [str(part) for part in first["loc"][1:]]  # the first part is the recipe's kind
    name = ".".join(location)
    if first["type"] == "extra_forbidden":
        if others := [other for other, recipe in _KINDS.items() if not location[1:] and name in recipe.model_fields]:
            kind = first["loc"][0]
            return f"{name!r} is for recipes of kind {' or '.join(others)}, and this recipe's is {kind}: leave it out"
        valid = _valid_keys(str(first["loc"][0]), location[:-1])
        nearest = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.4)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else f"valid keys are {', '.join(valid)}"
        return f"unknown key {name!r}; {remedy}"
    if first["type"] == "missing":
        return f"{name!r} is missing"
    if first["type"].startswith("union_tag"):
        *others, last = _KINDS
        return f"'kind' must be {', '.join(others)} or {last}"
    value = first.get("input")
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool | None) else ""
    return f"{name + ': ' if name else ''}{first['msg'].removeprefix('Value error, ')}{shown}"


def _valid_keys(kind: str, sections: Sequence[str]) -> list[str]:
    model: type[BaseModel] = _KINDS[kind]
    for section in sections:
        annotation = model.model_fields[section].annotation
        (model,) = [each for each in get_args(annotation) or (annotation,) if each is not NoneType]
        assert issubclass(model, BaseModel)
    return sorted(model.model_fields)
