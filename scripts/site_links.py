"""Hook of the documentation site: makes links to repository files lead to pages that show these files.

Links in the sources work within the repository: ``../../PAPERS.md``. A linked file outside docs/ is added to the site:
Markdown becomes a page, JSON and pictures are copied unchanged, and other text becomes a listing. The site thus shows
the files of its own commit and needs no repository address.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository/"
"""Folder of the site with the files from outside docs/."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=(?:#[^)\s]*)?\))")
_CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1|(`+)(?!`).*?(?<!`)\2(?!`)", re.DOTALL | re.MULTILINE)
_UNCHANGED = (".json", ".svg", ".png", ".gif")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def on_config(config: MkDocsConfig) -> None:
    """Link each page to its source if the repository's address is known."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside docs/ that is in the nav or linked from a page, and the files to which such files link."""
    in_nav = {uri.removeprefix(FOLDER) for uri in _uris(config.nav) if uri.startswith(FOLDER)}
    found = set(in_nav)
    for page in files.documentation_pages():
        found |= set(_outside(f"docs/{page.src_uri}", page.content_string))
    added: set[str] = set()
    while found - added:
        path = (found - added).pop()
        added.add(path)
        if path.endswith(".md"):
            found |= set(_outside(path, (ROOT / path).read_text()))
    for path in sorted(added):
        level = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
        file = File.generated(config, uri_of(path), content=_content(path), inclusion=level)
        file.edit_uri = f"../{path}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/, and links inside such files, into links within the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(FOLDER) if uri.startswith(FOLDER) else f"docs/{uri}"
    folder = posixpath.dirname(uri)
    return _outside_code(
        markdown,
        lambda text: _LINK.sub(lambda link: posixpath.relpath(uri_of(_resolved(path, link[0])), folder or "."), text),
    )


def uri_of(path: str) -> str:
    """Return the site's path of a repository file; paths have slashes."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}{path}" if path.endswith((".md", *_UNCHANGED)) else f"{FOLDER}{path}.md"


def _outside(path: str, text: str) -> Iterator[str]:
    """Yield the files outside docs/ that a file's text links to; raise PluginError if a linked file does not exist."""
    links: list[str] = []
    _outside_code(text, lambda prose: links.extend(_LINK.findall(prose)) or prose)
    for link in links:
        target = _resolved(path, link)
        if not target.startswith("docs/"):
            if not (ROOT / target).is_file():
                raise PluginError(f"{path} links to {link}, but {target} does not exist")
            yield target


def _resolved(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _content(path: str) -> str | bytes:
    if path.endswith(_UNCHANGED):
        return (ROOT / path).read_bytes()
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to the text outside fenced blocks and code spans."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _uris(nav: Any) -> Iterator[str]:
    """Yield the pages of a nav."""
    if isinstance(nav, str):
        yield nav
    elif nav:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(each)
