"""Escaping of text from other sources: control characters are removed, and Markdown's markup is escaped."""

import re
from typing import Any

_SPECIAL = re.compile(r"[\\`*_\[\]<>&|~$!#]")
_LINKED = re.compile(r"(?i)(?<=[a-z])(:)(?=//)|(?<=\bwww)(\.)|(@)|(?<=mailto)(:)|(?<=xmpp)(:)")
"""Characters in bare addresses that some renderers turn into links."""
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed: they colour or rewrite a terminal
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls, which reorder the text around them
    r"\ud800-\udfff\ufffe\uffff]"  # not characters: invalid in UTF-8 or XML
)


def one_line(value: Any) -> str:
    """Return the text on one line, without the characters that `visible` removes."""
    return " ".join(visible(word) for word in str(value).split())


def visible(value: Any) -> str:
    """Return the text without control and bidirectional characters; line feeds, tabs and joiners stay."""
    return _CONTROLS.sub("", str(value))


def text(value: Any) -> str:
    """Escape the text for a Markdown paragraph or table cell."""
    escaped = _SPECIAL.sub(lambda match: f"\\{match.group()}", one_line(value))
    return _LINKED.sub(lambda match: f"\\{match.group()}", escaped)


def code(value: Any) -> str:
    """Write a code span. Do not use code spans in tables, because a bar in the code would end the cell."""
    line = one_line(value)
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else text("–")


def fenced(value: str, language: str) -> str:
    """Write a block of code with a fence longer than any fence in it."""
    fence = "`" * max(3, _longest_run(value) + 1)
    return f"{fence}{language}\n{value}\n{fence}"


def _longest_run(value: str) -> int:
    """Return the length of the longest run of backticks."""
    return max((len(run) for run in re.findall("`+", value)), default=0)
