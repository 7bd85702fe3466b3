"""Completion of a command line by TAB: typer's own, but for bash, which cuts words at ``:`` and ``=``.

bash hands ``--drafter heads:runs/he`` over as ``--drafter``, ``heads``, ``:`` and ``runs/he``, and replaces the last
piece alone. So pieces are joined here, and the replies are cut where bash cut the word. The script also leaves out the
blank behind a reply that goes on (``heads:``, ``tokens=``, ``runs/``, ``training.``).
"""

import os
import re
import shlex
from importlib import import_module
from typing import Any, NamedTuple

from trainer.commands.help import first_clause

BASH = r"""
%(complete_func)s() {
    local IFS=$'\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" \
                   COMP_CWORD=$COMP_CWORD \
                   %(autocomplete_var)s=complete_bash $1 ) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:=/.] ]]; then compopt -o nospace; fi
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
"""The script of bash. typer puts the names in."""


class Line(NamedTuple):
    """A command line up to the cursor: the words before it, the word at it, and the piece that bash replaces."""

    words: list[str]
    incomplete: str
    piece: str


def read_line(pieces: list[str], current: int) -> Line:
    """Join the pieces into which bash cuts a line; ``pieces[current]`` is the one at the cursor."""
    words: list[str] = []
    joins = False
    for piece in pieces[: current + 1]:
        breaks = bool(re.fullmatch("[:=]+", piece))
        if words and (breaks or joins):
            words[-1] += _unquoted(piece)
        else:
            words.append(_unquoted(piece))
        joins = breaks
    piece = _unquoted(pieces[current]) if current < len(pieces) else ""
    if current >= len(pieces):
        words.append("")
    return Line(words[1:-1], words[-1], "" if re.fullmatch("[:=]+", piece) else piece)


def cut(reply: str, line: Line) -> str:
    """Return the part of a reply that takes the place of bash's piece."""
    value = line.incomplete
    if value.startswith("-") and "=" in value:  # --option=value: the reply is the value
        value = value.partition("=")[2]
    return reply[len(value) - len(line.piece) :]


def _unquoted(piece: str) -> str:
    try:
        return "".join(shlex.split(piece))
    except ValueError:  # a quote that is still open
        return piece.lstrip("\"'")


def prepare() -> None:
    """Put this module's bash in place of typer's, which offers no other way to; nothing where typer has changed."""
    try:
        import_module("typer.completion").completion_init()
        shells: Any = import_module("typer.completion").shell_completion
        scripts: Any = import_module("typer._completion_shared")._completion_scripts
    except (ImportError, AttributeError):
        return
    typers: Any = shells.get_completion_class("bash")

    class Bash(typers):  # type: ignore[misc]  # typer's class is known at this point only
        def get_completion_args(self) -> tuple[list[str], str]:
            self._line = read_line(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
            return self._line.words, self._line.incomplete

        def format_completion(self, item: Any) -> str:
            return cut(str(item.value), self._line)

    scripts["bash"] = BASH
    shells.add_completion_class(Bash, "bash")


def shortened(items: list[Any]) -> list[Any]:
    """Cut the helps beside replies, which zsh and fish show, to their first clauses."""
    for item in items:
        item.help = first_clause(item.help or "") or None
    return items
