"""Completion of a recipe's keys: ``training.steps=``, and the values of keys that take one of a few."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer


def override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete ``section.key=value``, of the kind of the recipe that the line names; of all kinds where it has none."""
    from trainer.recipe.recipe import AnyRecipe  # pydantic, which no other completion needs

    path, equals, _ = incomplete.partition("=")
    *sections, name = path.split(".")
    prefix = "".join(f"{section}." for section in sections)
    found: dict[str, None] = {}  # a set in order
    for kind in _of_kind(get_args(AnyRecipe), ctx.params.get("recipe") or ctx.params.get("source")):
        for key, annotation in _fields(kind, sections):
            if equals and key == name:
                found |= dict.fromkeys(f"{path}={value}" for value in _choices(annotation))
            elif not equals and key != "kind":
                found[f"{prefix}{key}{'.' if _section(annotation) else '='}"] = None
    return [text for text in found if text.startswith(incomplete)]


def _of_kind(kinds: tuple[Any, ...], recipe: object) -> Iterator[Any]:
    try:
        text = Path(str(recipe)).read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    named = re.search(r"^kind:\s*(\w+)", text, re.MULTILINE)
    for kind in kinds:
        if named is None or named[1] in _choices(kind.model_fields["kind"].annotation):
            yield kind


def _fields(section: Any, path: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the section at ``path`` with their types; nothing where there is none."""
    for name in path:
        field = section.model_fields.get(name)
        section = field and _section(field.annotation)
        if section is None:
            return
    for name, field in section.model_fields.items():
        yield name, field.annotation


def _section(annotation: Any) -> Any:
    """Return the section that an annotation stands for, alone or beside None; None for a value."""
    return next((each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields")), None)


def _choices(annotation: Any) -> list[str]:
    """Return the values of an annotation that takes one of a few, as a recipe writes them."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is NoneType:
        return ["null"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    parts = [_choices(part) for part in get_args(annotation)] if get_origin(annotation) is not list else []
    return [value for part in parts for value in part] if all(parts) else []
