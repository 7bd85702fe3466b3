"""How recipes are read from YAML, with ``a.b=c`` overrides. Every mistake is reported in one sentence."""

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from yaml.constructor import ConstructorError

from decoding.errors import UserError, check_once
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe

AnyRecipe = MedusaRecipe | DraftRecipe
Recipe = Annotated[AnyRecipe, Field(discriminator="kind")]
"""`AnyRecipe`, discriminated by ``kind`` for pydantic."""
_ADAPTER: TypeAdapter[AnyRecipe] = TypeAdapter(Recipe)
_KINDS: dict[str, type[AnyRecipe]] = {
    get_args(recipe.model_fields["kind"].annotation)[0]: recipe for recipe in get_args(AnyRecipe)
}
"""Maps values of the field ``kind`` to classes of recipes."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe and apply ``section.key=value`` overrides. A mistake raises a UserError of one sentence."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"recipe {path} does not exist: use a YAML file, such as recipes/quickstart/medusa1.yaml")
    above = _parsed(overrides)
    files = _with_bases(path)
    try:
        content = reduce(laid_over, [*files, *(nested(key, read_yaml(value)) for key, value in above)])
        left_open = sorted(open_keys(content))
    except ValueError as error:
        raise _unreadable(path, error) from error
    recipe = parse_recipe(content, str(path))  # parsed first, so that a misspelt override is reported as such
    if left_open:
        raise UserError(f"{path} needs values for {', '.join(left_open)}: add {left_open[0]}=... after the recipe")
    return recipe


def overridden(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's plain values with ``section.key=value`` overrides applied."""
    return reduce(laid_over, [content, *(nested(key, read_yaml(value)) for key, value in _parsed(overrides))])


def _parsed(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Split overrides into keys and values; raise UserError for an override without '=', and for a repeated key."""
    if wrong := [override for override in overrides if "=" not in override]:
        raise UserError(f"override {wrong[0]!r} lacks '=': write section.key=value")
    given = [override.partition("=") for override in overrides]
    check_once("the override", (key for key, _, _ in given))
    return [(key, value) for key, _, value in given]


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[dict[Any, Any]]:
    """Return the contents of a file and its bases, the lowest base first; a path in ``base`` is relative to the folder
    of its file.
    """
    if path.resolve() in above:
        raise UserError(f"the bases of {path} lead back to this recipe, through {len(above)} recipes: use another base")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        raise _unreadable(path, error) from error
    if content is None or isinstance(content, str):  # an empty file, or one word without keys
        content = {}
    if not isinstance(content, dict):
        raise _unreadable(path, "it contains a list or a number, not sections with keys")
    base = content.pop("base", None)
    if base is None:
        return [content]
    if not (path.parent / str(base)).is_file():
        raise UserError(f"{path}: the base {base!r} does not exist: use the path of a recipe from {path.parent}")
    return [*_with_bases(path.parent / str(base), (*above, path.resolve())), content]


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(f"{path} is not a readable recipe: {reason}")


def parse_recipe(content: Any, source: str = "recipe") -> AnyRecipe:
    """Return the recipe for plain values; a UserError names the first mistake and ``source``."""
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    # A misspelt key can also make the correct key look missing, so report the misspelling.
    first = next((mistake for mistake in error.errors() if mistake["type"] == "extra_forbidden"), error.errors()[0])
    location = [str(part) for part in first["loc"][1:]]  # the first part is the recipe's kind
    name = ".".join(location)
    if first["type"] == "extra_forbidden":
        if others := [other for other, recipe in _KINDS.items() if not location[1:] and name in recipe.model_fields]:
            kind = first["loc"][0]
            return f"{name!r} is for recipes of kind {' or '.join(others)}, but this is a {kind} recipe: omit this key"
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
        (model,) = [part for part in get_args(annotation) or (annotation,) if part is not NoneType]
        assert issubclass(model, BaseModel)
    return sorted(model.model_fields)


# --- YAML -------------------------------------------------------------------------------------------------------------

OPEN = "???"
"""Value of a key that the user must set."""
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML reader that leaves dates as text, reads 1e-3 as a number (YAML 1.2) and rejects repeated keys.

    A key next to ``<<: *anchor`` replaces the same key of the anchor's mapping.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
            raise ConstructorError(None, None, f"the key {twice[0]!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Return the value that a YAML text describes; raise UserError if it is not YAML."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number without digits, such as 0b_
        raise UserError(" ".join(str(error).split())) from error


def laid_over(base: Any, above: Any, name: str = "") -> Any:
    """Return ``base`` updated by ``above``: mappings are merged key by key, and anything else is replaced."""
    if isinstance(base, dict) and isinstance(above, dict):
        merged = {key: laid_over(base[key], above[key], f"{name}{key}.") for key in base.keys() & above.keys()}
        return {**base, **above, **merged}
    if isinstance(base, list) and isinstance(above, dict):
        raise UserError(f"{name.removesuffix('.')} is a list: write the whole list, as in [first,second]")
    return above


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return nested mappings with ``value`` at the dotted ``key``."""
    first, dot, rest = key.partition(".")
    return {first: nested(rest, value) if dot else value}


def open_keys(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted keys whose value is `OPEN`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from open_keys(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str) and value == OPEN:
        yield name
