"""Recipes as plain values: read from YAML, laid over one another, with references and values left open.

Errors are ValueErrors that say what is wrong in one line; the caller names the recipe.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError

OPEN = "???"
"""Value of a key that the recipe leaves to its user."""
_MERGE = "tag:yaml.org,2002:merge"
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


class _Loader(yaml.SafeLoader):
    """Reads YAML without dates, with 1e-3 as a number as in YAML 1.2, and without keys that stand twice.

    A key beside ``<<: *anchor`` replaces the same key of the mapping that is merged in.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        if twice := [key for place, key in enumerate(keys) if key in keys[:place]]:
            raise ConstructorError(None, None, f"the key {twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text; ValueError where it is none."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number without digits, such as 0b_
        raise ValueError(" ".join(str(error).split())) from error


def laid_over(base: Any, above: Any, name: str = "") -> Any:
    """Return ``above`` over ``base``: mappings are merged key by key, anything else replaces what was there."""
    if isinstance(base, dict) and isinstance(above, dict):
        merged = {key: laid_over(base[key], above[key], f"{name}{key}.") for key in base.keys() & above.keys()}
        return {**base, **above, **merged}
    if isinstance(base, list) and isinstance(above, dict):
        raise ValueError(f"{name.removesuffix('.')} is a list, which is given as a whole: write [first,second]")
    return above


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return ``value`` under the dotted ``key`` as mappings in mappings."""
    first, dot, rest = key.partition(".")
    return {first: nested(rest, value) if dot else value}


def open_keys(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values that are left open."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from open_keys(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str) and value == OPEN:
        yield name


def resolved(value: Any, content: dict[Any, Any], seen: tuple[str, ...] = ()) -> Any:
    """Return ``value`` with each reference ``${section.key}`` replaced by the content's value of that key."""
    if isinstance(value, dict):
        return {key: resolved(inner, content, seen) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolved(inner, content, seen) for inner in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return _referred(whole[1], content, seen)
    return _REFERENCE.sub(lambda found: str(_referred(found[1], content, seen)), value)


def _referred(key: str, content: dict[Any, Any], seen: tuple[str, ...]) -> Any:
    if key in seen:
        raise ValueError(f"{key} refers to itself")
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"Interpolation key {key!r} not found: the recipe has no such key")
        value = value[part]
    return resolved(value, content, (*seen, key))
