"""Help of the commands as text: one screen by ``--help``, every option in full by ``--help-all``.

An option with a ``rich_help_panel`` is a rare one: one screen has its name only, the full help lists it under that
heading. One screen shows of every other option, and of every command in a list, the first clause of its help.
"""

import inspect
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.terminal.console import standard_output
from trainer.terminal.exit_codes import exit_code_line

SCREEN = 37
"""Greatest number of lines of a help of one screen, at 80 columns."""
WIDTH = 80
WIDEST = 100
"""Columns of the full help on a wider terminal; longer lines are hard to read."""

TRAIN, RUN, MEASURE, SHIP, LOOK = PURPOSES = ("Train", "Run and watch", "Measure", "Ship", "Look")
"""Headings of the commands, in the order of `headstart --help`."""

TARGET = "Target"
PROMPTS = "Prompts"
DRAFTING = "Drafting"
SAMPLING = "Sampling"
MEASURING = "Measuring"
TRAINING = "Training"
SERVER = "Server"
OUTPUT = "Output"

_TERM = 24  # columns of an option's name in one screen
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def first_clause(text: str) -> str:
    """Return the text up to its first "; " or ". ", without the mark; its short form wherever there is one line."""
    return re.split(r"[;.](?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


def examples(epilog: str | None) -> list[str]:
    """Return the commands of the lines "Example: COMMAND" of an epilog."""
    lines = inspect.cleandoc(epilog or "").splitlines()
    return [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]


# --- options ----------------------------------------------------------------------------------------------------------


def _is_required(option: Any) -> bool:
    return bool(option.required)


def _is_rare(option: Any) -> bool:
    return option.rich_help_panel is not None and not option.required


def shown(command: Any, context: Any) -> list[Any]:
    """Return what a page shows: the arguments, then the options, each in the order of the command."""
    options = [option for option in command.get_params(context) if not option.hidden]
    return sorted(options, key=lambda option: option.param_type_name != "argument")


def metavar(option: Any) -> str:
    """Return the placeholder of an option's value: ``N``, ``PATH``, ...; empty for a flag."""
    if option.param_type_name == "argument":
        name = str(option.metavar or option.name).upper()
        name = name if option.required else f"[{name}]"
        return f"{name}..." if option.nargs == -1 else name
    if option.is_flag:
        return ""
    declared = option.type_descriptor.annotation
    value_type = declared.__args__[0] if hasattr(declared, "__args__") else declared
    return str(option.metavar or _METAVARS.get(value_type, "TEXT"))


def term(option: Any) -> str:
    """Return an option as users write it: ``--limit N``, ``--[no-]chat``, ``RECIPE``."""
    if option.param_type_name == "argument":
        return metavar(option)
    return " ".join(filter(None, [_name(option), metavar(option)]))


def _name(option: Any) -> str:
    on, off = option.opts[0], (option.secondary_opts or [""])[0]
    if off != on.replace("--", "--no-"):
        return f"{on}/{off}" if off else str(on)
    return str(on) if option.default is False else on.replace("--", "--[no-]")


def _default(option: Any) -> str | None:
    """Return the default as users would write it; None where there is none to tell."""
    value = option.default
    if value is None or value == "" or option.required:
        return None
    if isinstance(value, bool):
        on = option.opts if value else option.secondary_opts
        return on[0] if on and (value or not _name(option).startswith(option.opts[0])) else None
    return f"{value:g}" if isinstance(value, float) else str(value)


def short_line(option: Any) -> str:
    """Return an option's help in one screen: its first clause, and its default."""
    default = _default(option)
    return first_clause(option.help or "") + (f" (default {default})" if default else "")


def _bounds(option: Any) -> str | None:
    least, most = option.min, option.max
    if most is not None:
        return f"from {least:g} to {most:g}" if least is not None else f"at most {most:g}"
    return f"at least {least:g}" if least is not None else None


def facts(option: Any) -> str:
    """Return what is known of an option beside its help: its default, its bounds, "required", "may be repeated"."""
    default = _default(option)
    known = ["required" if option.required else None, f"default {default}" if default else None, _bounds(option)]
    if option.param_type_name == "option" and option.multiple:
        known.append("may be repeated")
    return "; ".join(filter(None, known))


def by_group(options: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the options under their headings: the required ones, the common ones, then each group of rare ones."""
    groups: dict[str, list[Any]] = {"Required": [], "Options": []}
    for option in options:
        heading = "Required" if _is_required(option) else option.rich_help_panel or "Options"
        groups.setdefault(heading, []).append(option)
    return {heading: chosen for heading, chosen in groups.items() if chosen}


# --- pages ------------------------------------------------------------------------------------------------------------


def short_page(command: Any, context: Any, width: int = WIDTH) -> Text:
    """Return a command's help of one screen."""
    options = shown(command, context)
    parts = [
        _wrapped(Text.assemble(("Usage: ", "bold"), usage(options, context)), width, indent=7),
        _wrapped(_first_paragraph(command.help or ""), width),
    ]
    parts += _example_parts(command, width)
    for heading, chosen in (
        ("Required", [option for option in options if _is_required(option)]),
        ("Options", [option for option in options if not _is_required(option) and not _is_rare(option)]),
    ):
        if chosen:
            parts.append(_rows(heading, [(term(option), short_line(option)) for option in chosen], width))
    rare = [option.opts[0] for option in options if _is_rare(option)]
    if rare:
        more = Text.assemble(("More: ", "bold"), ", ".join(rare))
        parts.append(_wrapped(more, width, indent=2))
    return _joined(parts)


def full_page(command: Any, context: Any, width: int = WIDTH) -> Text:
    """Return a command's whole help: every option, under the heading of its group."""
    options = shown(command, context)
    parts = [_wrapped(Text.assemble(("Usage: ", "bold"), usage(options, context)), width, indent=7)]
    parts += [_wrapped(paragraph, width) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]
    parts += _example_parts(command, width)
    parts += [_entries(heading, chosen, width) for heading, chosen in by_group(options).items()]
    return _joined(parts)


def list_page(group: Any, context: Any, width: int = WIDTH) -> Text:
    """Return the help of a group of commands: one line for each command, under the heading of its purpose."""
    path = context.command_path
    words = Text.assemble(("Usage: ", "bold"), f"{path} COMMAND [OPTIONS], {path} COMMAND --help")
    panels: dict[str, list[tuple[str, str]]] = {purpose: [] for purpose in PURPOSES}
    for name, command in _commands(group):
        panels.setdefault(command.rich_help_panel or "Commands", []).append((name, first_clause(command.help or "")))
    column = max(len(name) for rows in panels.values() for name, _ in rows)
    listed = [_rows(heading, rows, width, column) for heading, rows in panels.items() if rows]
    listed.append(_rows("Options", [(term(option), short_line(option)) for option in shown(group, context)], width))
    if context.parent is None:
        listed.append(_wrapped(Text.assemble(("Exit codes: ", "bold"), f"{exit_code_line()}."), width, indent=2))
    return _joined(
        [
            _wrapped(words, width, indent=7),
            _wrapped(group.help or "", width),
            *_example_parts(group, width),
            Text("\n").join(listed),
        ]
    )


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield f"{prefix}{name}", command


def usage(options: Sequence[Any], context: Any) -> str:
    """Return a command's usage: what it requires, and the arguments that it takes beside."""
    needed = [term(option) for option in options if _is_required(option)]
    arguments = [term(option) for option in options if option.param_type_name == "argument" and not option.required]
    return " ".join([context.command_path, *needed, *arguments, "[OPTIONS]"])


def _first_paragraph(text: str) -> str:
    return inspect.cleandoc(text).split("\n\n", maxsplit=1)[0]


def _example_parts(command: Any, width: int) -> list[Text]:
    found = examples(command.epilog)
    if not found:
        return []
    lines = [Text("Example:" if len(found) == 1 else "Examples:", style="bold")]
    lines += [Text(line, style="green") for example in found for line in _continued(example, width)]
    return [Text("\n").join(lines)]


def _continued(example: str, width: int) -> Iterator[str]:
    """Yield a command's lines, with a backslash where it goes on; options stay with their values."""
    lexer = shlex.shlex(example, posix=False, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters = True, ""
    pieces: list[str] = []
    for word in lexer:
        value = pieces and pieces[-1].startswith("-") and " " not in pieces[-1] and not word.startswith("-")
        pieces[-1:] = [f"{pieces[-1]} {word}"] if value else [*pieces[-1:], word]
    line = " "
    for piece in pieces:
        if len(line) + 1 + len(piece) > width - 2 and line.strip():
            yield f"{line} \\"
            line = "   "
        line += f" {piece}"
    yield line


def _rows(heading: str, rows: Iterable[tuple[str, str]], width: int, column: int = _TERM) -> Text:
    lines = [Text(f"{heading}:", style="bold")]
    for name, text in rows:
        body = _lines(text, width - column - 4)
        first = Text.assemble("  ", (f"{name:{column}}", "cyan"), "  ")
        if len(name) > column:
            first.rstrip()
            lines.append(first)
            first = Text(" " * (column + 4))
        lines.append(first + body[0])
        lines += [Text(" " * (column + 4)) + line for line in body[1:]]
    return Text("\n").join(lines)


def _entries(heading: str, options: Iterable[Any], width: int) -> Text:
    lines = [Text(f"{heading}:", style="bold")]
    for option in options:
        known = facts(option)
        lines.append(Text.assemble("  ", (term(option), "cyan"), (f"  ({known})" if known else "", "dim")))
        lines += [Text(" " * 6) + line for line in _lines(" ".join((option.help or "").split()), width - 6)]
    return Text("\n").join(lines)


def _lines(text: str | Text, width: int) -> list[Text]:
    """Return the text's lines, none with blanks at its end."""
    lines = list((text if isinstance(text, Text) else Text(text)).wrap(_PLAIN, width)) or [Text()]
    for line in lines:
        line.rstrip()
    return lines


_PLAIN = Console(width=WIDTH, color_system=None)  # measures characters, prints nothing


def _wrapped(text: str | Text, width: int, indent: int = 0) -> Text:
    first, *rest = _lines(text if isinstance(text, Text) else " ".join(text.split()), width - indent)
    return Text("\n").join([first, *(Text(" " * indent) + line for line in rest)])


def _joined(parts: Iterable[Text]) -> Text:
    return Text("\n\n").join(part for part in parts if part.plain)


def rendered(page: Text) -> str:
    """Return a page as standard output takes it: with colours on a terminal, unless NO_COLOR is set."""
    console = standard_output()
    with console.capture() as captured:
        console.print(page, soft_wrap=True)
    return captured.get().rstrip("\n")


def columns() -> int:
    """Return the columns of a page: the terminal's, from 60 to `WIDEST`; `WIDTH` where there is no terminal."""
    return max(60, min(standard_output().width, WIDEST))
