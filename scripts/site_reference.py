"""Hook of the documentation site: writes reference pages from the code when the site is built.

Commands come from the typer application, drafters from their registry, and recipe keys from their classes. In the
repository, a page contains a sentence that says where the generated text is. The hook replaces this sentence.
"""

# ruff: noqa: E402  # the repository is added to the path before its packages are imported
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.main import get_command

from decoding.drafters.registry import REGISTRY
from trainer.cli import app
from trainer.recipe.reading import AnyRecipe

PROGRAM = "headstart"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace each mark by its generated text."""
    for mark, write in (
        ("*`make docs` lists every command in site/reference/commands.html.*", commands),
        ("*`make docs` lists every drafter in site/reference/commands.html.*", drafters),
        ("*`make docs` lists every key in site/reference/recipes.html.*", recipes),
    ):
        if mark in markdown:
            markdown = markdown.replace(mark, write())
    return markdown


def commands() -> str:
    """Return a section per command: its description, example, arguments and options."""
    group: Any = get_command(app)
    return "\n\n".join(_command(path, command) for path, command in _commands_of(PROGRAM, group))


def drafters() -> str:
    """Return a table of the drafters, in which an option without a default is written ``name=``."""
    rows = []
    for name, entry in REGISTRY.items():
        options = ", ".join(f"{option}={known.shown}" for option, known in entry.options.items())
        rows.append(
            f"| {_code(f'{name}:PATH' if entry.weights else name)} | {_code(_cell(options))} | {entry.summary} |"
        )
    return "| drafter | options, with their defaults | what it drafts |\n|---|---|---|\n" + "\n".join(rows)


def _commands_of(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, each in below.items():
        yield from _commands_of(f"{path} {name}", each)


def _command(path: str, command: Any) -> str:
    """Return a command's section."""
    context = command.make_context(path, [], resilient_parsing=True)
    parts = [f"## {path}", _prose(command.help), f"```text\n{command.get_usage(context)}\n```"]
    parts.append("```sh\n" + "\n".join(examples(command.epilog)) + "\n```")
    options = command.get_params(context)
    for heading, chosen in (
        ("arguments", [each for each in options if each.param_type_name == "argument"]),
        ("options", [each for each in options if each.param_type_name == "option" and not each.hidden]),
        ("more options", [each for each in options if each.hidden]),
    ):
        rows = [f"| {_code(_cell(term))} | {_cell(_prose(help))} |" for term, help in map(_record(context), chosen)]
        if rows:
            parts.append(f"| {heading} | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _record(context: Any) -> Callable[[Any], tuple[str, str]]:
    """Return a function that reads an option's name and meaning from the help text, even if the option is hidden."""

    def record(option: Any) -> tuple[str, str]:
        option.hidden = False
        found: tuple[str, str] = option.get_help_record(context)
        return found

    return record


def examples(epilog: str) -> list[str]:
    """Return the command lines in a help text's epilog."""
    return re.findall(r"^ *(headstart .*)$", re.sub(r"\\\n *", "", epilog), re.MULTILINE)


def recipes() -> str:
    """Return a section per kind of recipe: every key with its type, default and meaning."""
    parts = []
    shown: set[tuple[type[BaseModel], str]] = set()
    for recipe in AnyRecipe.__args__:
        kind = recipe.model_fields["kind"].annotation.__args__[0]
        parts.append(f"## kind: {kind}\n\n{_prose(recipe.__doc__)}\n\n{_keys(recipe, '', shown)}")
    return "\n\n".join(parts)


def _keys(section: type[BaseModel], prefix: str, shown: set[tuple[type[BaseModel], str]]) -> str:
    """Return the tables of a section and its subsections; a section that was shown before is only linked."""
    rows, below = [], []
    for name, field in section.model_fields.items():
        if name == "kind":
            continue
        inner = _section_in(field.annotation)
        if inner is not None:
            below.append((f"{prefix}{name}", inner, field))
            continue
        default = "**required**" if field.default is PydanticUndefined else _code(json.dumps(field.default).strip('"'))
        written, meaning = _attribute(section, name)
        rows.append(f"| `{prefix}{name}` | {_code(written)} | {default} | {_cell(_prose(meaning))} |")
    parts = ["| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)] if rows else []
    for path, inner, field in below:
        if (inner, path) in shown:
            parts.append(f"**{path}**: as [above](#{path.replace('.', '')}).")
            continue
        shown.add((inner, path))
        parts.append(f"### {path}")
        left_out = " This section is not used unless it is set." if field.default is None else ""
        parts += [f"{_prose(inner.__doc__)}{left_out}", _keys(inner, f"{path}.", shown)]
    return "\n\n".join(parts)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation, alone or in a union with None."""
    for each in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


@cache
def _module(name: str) -> Any:
    """Return a module parsed by griffe, without importing it."""
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return griffe.visit(name, path, path.read_text())


def _attribute(section: type[BaseModel], name: str) -> tuple[str, str]:
    """Return a key's docstring, and its type as written in the source but without the wrapper that sets bounds."""
    for owner in section.__mro__:
        if name in inspect.get_annotations(owner):
            module = _module(owner.__module__)
            attribute = module[owner.__name__][name]
            meaning = attribute.docstring.value if attribute.docstring else ""
            return _type(_spelled_out(str(attribute.annotation), module)), meaning
    raise AssertionError(f"{section} has no {name}")


def _spelled_out(written: str, module: Any) -> str:
    """Replace the names of types from recipe modules with the definitions of these types."""
    for name in re.findall(r"\b[A-Z]\w+", written):
        found = module.members.get(name)
        if found is not None and found.is_alias:
            home, _, known = found.target_path.rpartition(".")
            found = _module(home).members.get(known) if home.startswith("trainer.") else None
        if found is not None and found.is_attribute:
            written = re.sub(rf"\b{name}\b", _spelled_out(str(found.value), found.module), written)
    return written


def _type(written: str) -> str:
    """Return an annotation for readers: bounds with signs, and choices without ``Literal``."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

    def bounded(found: re.Match[str]) -> str:
        bounds = (each.split("=") for each in re.findall(r"\w+=[^,]+", found[2]))
        return f"{found[1]} " + ", ".join(f"{signs[name]} {value.strip()}" for name, value in bounds)

    written = re.sub(r"Annotated\[(\w+), Field\(([^()]*)\)\]", bounded, written)
    return re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace("'", "").replace(", ", " | "), written)


def _prose(text: str | None) -> str:
    """Return a docstring as Markdown: code in single backticks, other Markdown and HTML escaped."""
    single = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text or ""))
    return re.sub(r"(`[^`]*`)|([\[<*])", lambda found: found[1] or f"\\{found[2]}", single)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
