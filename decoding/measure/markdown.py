"""Markdown escapes for foreign text, which then shows as written and makes no link, image, tag or table column."""

import re
import unicodedata
from typing import Any

_SPECIAL = re.compile(r"[\\`*_\[\]<>&|~$!#]")
_LINKED = re.compile(r"(?i)(?<=[a-z])(:)(?=//)|(?<=\bwww)(\.)|(@)|(?<=mailto)(:)|(?<=xmpp)(:)")
"""Characters by which some renderers turn a bare address into a link."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")
"""Unicode categories of invisible characters."""


def one_line(value: Any) -> str:
    """Return the text on one line, without invisible characters, some of which colour or rewrite a terminal."""
    return " ".join(visible(word) for word in str(value).split())


def visible(value: Any) -> str:
    """Return the text without invisible characters, but with its line feeds and tabs."""
    return "".join(c for c in str(value) if c in "\n\t" or unicodedata.category(c) not in _HIDDEN)


def text(value: Any) -> str:
    """Escape the text, for a paragraph or a table's cell."""
    escaped = _SPECIAL.sub(lambda found: f"\\{found.group()}", one_line(value))
    return _LINKED.sub(lambda found: f"\\{found.group()}", escaped)


def code(value: Any) -> str:
    """Write a code span; not for tables, where a bar inside it would end the cell."""
    line = one_line(value)
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else text("–")


def fenced(value: str, language: str) -> str:
    """Write a block of code of several lines; its fence is longer than any inside it."""
    fence = "`" * max(3, _longest_run(value) + 1)
    return f"{fence}{language}\n{value}\n{fence}"


def _longest_run(value: str) -> int:
    """Return the length of the longest run of backticks."""
    return max((len(run) for run in re.findall("`+", value)), default=0)
