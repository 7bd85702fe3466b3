"""Check that the project stays small: lines of code (without blank lines, comments and docstrings), words of pages,
options.

Usage: python scripts/sizes.py; prints each size with its bound, and exits with 1 if a bound is exceeded.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from trainer.cli import app

BOUNDS = {
    "product": 27_310,
    "tests": 28_340,
    "benchmarks and scripts": 3_950,
    "words of README and docs": 26_000,
    "commands": 15,
    "options of all commands": 175,
    "class names used twice": 0,
}
NOT_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}


def code_lines(source: str, tree: ast.Module) -> int:
    """Count the lines that contain code; docstrings, including those of fields, are not code."""
    documented = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in node.body if isinstance(node, ast.ClassDef) else node.body[:1]:
                if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
                    documented.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def options_of(command: Any) -> Iterator[int]:
    """Yield the number of options of each command below ``command``; groups of commands are left out."""
    if hasattr(command, "commands"):
        for each in command.commands.values():
            yield from options_of(each)
    else:
        yield sum(each.param_type_name == "option" and not each.is_eager for each in command.params)


def sizes() -> dict[str, int]:
    """Measure the files that git tracks in the current folder, by the names of `BOUNDS`."""
    tracked = subprocess.check_output(["git", "ls-files"], text=True).splitlines()
    files = {name: Path(name).read_text() for name in tracked if name.endswith((".py", ".md")) and Path(name).is_file()}
    trees = {name: ast.parse(text) for name, text in files.items() if name.endswith(".py")}

    def lines(*tops: str) -> int:
        return sum(code_lines(files[name], tree) for name, tree in trees.items() if name.split("/")[0] in tops)

    classes = Counter(
        node.name
        for name, tree in trees.items()
        if name.startswith(("decoding/", "trainer/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    pages = [text for name, text in files.items() if name == "README.md" or name.startswith("docs/")]
    options = list(options_of(typer.main.get_command(app)))
    return {
        "product": lines("decoding", "trainer"),
        "tests": lines("tests"),
        "benchmarks and scripts": lines("benchmarks", "scripts"),
        "words of README and docs": sum(len(text.split()) for text in pages),
        "commands": len(options),
        "options of all commands": sum(options),
        "class names used twice": sum(number > 1 for number in classes.values()),
    }


def main() -> int:
    """Print the table; return the exit code."""
    measured = sizes()
    table = Table("", "now", "at most")
    for name, bound in BOUNDS.items():
        over = measured[name] > bound
        table.add_row(name, f"{measured[name]:,}", f"{bound:,}", style="red" if over else None)
    Console().print(table)
    exceeded = [name for name, bound in BOUNDS.items() if measured[name] > bound]
    if exceeded:
        print(f"too large: {', '.join(exceeded)}; remove as much as was added", file=sys.stderr)
    return len(exceeded) > 0


if __name__ == "__main__":
    sys.exit(main())
