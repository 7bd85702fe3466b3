"""Hook of the documentation site: turns formulas into MathML when the site is built, so that pages need no script.

As in the repository's Markdown, LaTeX is written ``$...$`` within a line and ``$$...$$`` on separate lines.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Turn the formulas that pymdownx.arithmatex marked into MathML."""

    def formula(found: re.Match[str]) -> str:
        display = "block" if found[2] == "[" else "inline"
        latex = html.unescape(found[3].strip())
        mathml = convert(latex, display=display)
        if "\\" in mathml:
            raise PluginError(f"a formula contains a command that MathML would show as text: {latex}")
        return f'<div class="formula">{mathml}</div>' if display == "block" else mathml

    return _FORMULA.sub(formula, content)
