"""Refuse docstrings, comments and help texts that break the prose rules; print file:line, the sentence and the rule.

Usage: scripts/check_prose.py [FILE or FOLDER ...]; without arguments the packages, the scripts, the benchmarks and the
pages that readers see. Exits with 1 if anything is found. Needs nothing but Python.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLACES = (
    "decoding",
    "trainer",
    "scripts",
    "benchmarks",
    "examples",
    "README.md",
    "CONTRIBUTING.md",
    "PAPERS.md",
    "docs",
)

_OPENER = re.compile(r"\s*(?:Of|What|Whether|Those|How|Is)\b")
_OPENER_RULE = (
    "start with a verb (function) or a noun (class, field, option), not with Of, What, Whether, Those, How, Is"
)
_SENTENCE_OPENER = re.compile(r"(?:^|(?<=[.!?:;])\s)\s*what (?:is|was|are|were)\b", re.IGNORECASE)
_SENTENCE_OPENER_RULE = "name the thing in place of 'what is', 'what was'"

# A phrase, and the remedy.
_PHRASES = tuple(
    (re.compile(rf"\b(?:{phrase})".replace(" ", r"\s+"), re.IGNORECASE), remedy)
    for phrase, remedy in (
        (r"so many\b", "call the number by the code's own name"),
        (
            r"(?<!often\s)(?<!long\s)as (?:it is|it was|they are|they were)(?= now|\s*(?:[,.;:)]|$))",
            "name the state meant",
        ),
        (r"what (?:is|was) of (?:it|them)\b", "name the thing"),
        (r"learnt\b", "trained"),
        (r"(?:by )?chances?\b", "random, or probability"),
        (r"said\b", "printed, reported or named"),
        (r"go(?:es)? by\b", "decides, or follows"),
    )
)


class Text(NamedTuple):
    """A piece of prose and the line of its file on which it starts. ``opens``: the rule on the first word applies."""

    words: str
    line: int
    opens: bool


class Finding(NamedTuple):
    """A broken rule."""

    path: Path
    line: int
    sentence: str
    rule: str

    def __str__(self) -> str:
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return f"{path}:{self.line}: {self.sentence!r}\n    {self.rule}"


def texts(path: Path) -> Iterator[Text]:
    """Yield the prose of a file: docstrings, comments and help texts of Python, everything but code of Markdown."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield Text(source, 1, opens=False)
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for literal in (*_docstrings(node), *_help_texts(node)):
            yield Text(literal.value, literal.lineno, opens=True)
    yield from _comments(source)


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string at the top of a module, class or function, and each string right below a field."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for index, statement in enumerate(node.body):
        documents = index == 0 or isinstance(node.body[index - 1], ast.Assign | ast.AnnAssign)
        if documents and isinstance(statement, ast.Expr) and _is_text(statement.value):
            yield statement.value


def _help_texts(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield ``help=`` and ``description=`` of a call."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg in ("help", "description") and _is_text(keyword.value):
                yield keyword.value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comments(source: str) -> Iterator[Text]:
    """Yield comments, those on lines of their own joined where they follow one another."""
    block: list[str] = []
    start = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        words = token.string.lstrip("#:! ")
        if block and line == last + 1 and not token.line[:column].strip():
            block.append(words)
        else:
            if block:
                yield Text("\n".join(block), start, opens=False)
            block, start = [words], line
        last = line
    if block:
        yield Text("\n".join(block), start, opens=False)


def _without_code(text: str) -> str:
    """Blank fenced blocks and spans in backticks, and keep every other character at its place."""
    fences = re.sub(r"^```.*?^```", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)[^`]*?\1", lambda found: re.sub(r"[^\n]", "_", found[0]), fences)


def broken_rules(text: Text) -> Iterator[tuple[int, str]]:
    """Yield (offset into the text, rule) of each break."""
    words = _without_code(text.words)
    if text.opens and (found := _OPENER.match(words)):
        yield found.end() - 1, _OPENER_RULE
    else:
        for found in _SENTENCE_OPENER.finditer(words):
            yield found.end() - 1, _SENTENCE_OPENER_RULE
    for pattern, remedy in _PHRASES:
        for found in pattern.finditer(words):
            yield found.start(), f"not {' '.join(found[0].split())!r}: {remedy}"


def sentence_at(words: str, offset: int) -> str:
    """Return the sentence around an offset, on one line."""
    start = max((found.end() for found in re.finditer(r"[.!?:]\s|\||\n\s*\n", words[:offset])), default=0)
    end = re.search(r"[.!?](?=\s|$)|(?=\|)|\n\s*\n", words[offset:])
    return " ".join(words[start : offset + end.end() if end else len(words)].split())


def findings(path: Path) -> list[Finding]:
    """Check one file; findings are in the order of its lines."""
    found = [
        Finding(path, text.line + text.words[:offset].count("\n"), sentence_at(text.words, offset), rule)
        for text in texts(path)
        for offset, rule in broken_rules(text)
    ]
    return sorted(found, key=lambda finding: finding.line)


def files(places: list[Path]) -> list[Path]:
    """Return the Python and Markdown files among and below these places."""
    missing = [str(place) for place in places if not place.exists()]
    if missing:
        raise ValueError(f"there is no {missing[0]}: name files or folders that exist")
    below = (sorted(place.rglob("*")) if place.is_dir() else [place] for place in places)
    return [path for paths in below for path in paths if path.suffix in (".py", ".md")]


def main(arguments: list[str]) -> int:
    """Print every finding; 1 if there is any."""
    places = [Path(name) for name in arguments] or [ROOT / place for place in PLACES]
    checked = files(places)
    found = [finding for path in checked for finding in findings(path)]
    for finding in found:
        print(finding)
    print(f"{len(found)} in {len(checked)} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
