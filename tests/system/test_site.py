"""The documentation site, built as `make docs` builds it: every page, link, picture and formula, offline."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_report_browser import CHROMIUM

ROOT = Path(__file__).resolve().parents[2]
_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "prefetch", "manifest"}


@dataclass
class BuiltPage(HTMLParser):
    """The content of a page: title, headings, ids, pictures, and everything that a browser loads with it."""

    path: Path
    title: str = ""
    headings: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    nav: list[str] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    formulas: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open = ""
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._open = tag
        self.formulas += tag == "math"
        if tag == "h1":
            self.headings.append("")
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "md-nav__link" in given.get("class", ""):
            self.nav.append(given["href"])
        if tag == "img":
            self.pictures.append((given.get("src", ""), given.get("alt", "")))
        if tag in _LOADING and given.get(_LOADING[tag]):
            self.loaded.append(given[_LOADING[tag]])
        if tag == "link" and set(given.get("rel", "").split()) & _LOADED_LINKS:
            self.loaded.append(given["href"])

    def handle_data(self, data: str) -> None:
        if self._open == "title":
            self.title += data.strip()
        if self.headings:
            self.headings[-1] += data if self._open != "script" else ""
        self.text += data if self._open not in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def resolved(self, link: str) -> tuple[Path, str]:
        """Return the file that a link within the site leads to, and its anchor."""
        parts = urlsplit(link)
        file = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
        return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


@dataclass(frozen=True)
class Site:
    """The built site, and everything that the build printed."""

    folder: Path
    printed: str

    @cached_property
    def pages(self) -> dict[Path, BuiltPage]:
        found = (path for path in self.folder.rglob("*.html") if path.name != "404.html")
        return {path: BuiltPage(path) for path in sorted(found)}


def build(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command of `make docs`, with further options."""
    (command,) = re.findall(r"^\tNO_MKDOCS_2_WARNING=1 \$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.M)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "mkdocs", *shlex.split(command), *options]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site").resolve()
    done = build("--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(folder, done.stdout + done.stderr)


def outside(link: str) -> bool:
    return bool(urlsplit(link).scheme)


def test_the_build_warns_of_nothing(site: Site) -> None:
    """This includes links: mkdocs.yml makes the build check every link and its anchor."""
    told = re.findall(r"^(\w+) +-", site.printed, re.MULTILINE)
    assert told and set(told) == {"INFO"}, site.printed
    assert len(site.pages) > 20


def test_every_page_of_docs_is_built_with_a_title_and_one_heading_and_stands_in_the_navigation(site: Site) -> None:
    sources = sorted((ROOT / "docs").rglob("*.md"))
    built = {site.folder / path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources}
    assert built <= site.pages.keys()
    front = site.pages[site.folder / "index.html"]
    named = {front.resolved(link)[0] for link in front.nav} | {front.path}
    assert built - named == set()
    for page in site.pages.values():
        assert page.title and len(page.headings) == 1, page.path
    assert len({page.title for page in site.pages.values()}) == len(site.pages), "two pages have one title"


def test_no_page_loads_anything_from_elsewhere(site: Site) -> None:
    for page in site.pages.values():
        assert [link for link in page.loaded if urlsplit(link).netloc or outside(link)] == [], page.path
        assert all(page.resolved(link)[0].is_file() for link in page.loaded), page.path
    for sheet in site.folder.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()) == [], sheet


def test_every_picture_is_there_and_is_described(site: Site) -> None:
    pictures = [(page, *picture) for page in site.pages.values() for picture in page.pictures]
    assert len(pictures) >= 4
    for page, source, description in pictures:
        assert page.resolved(source)[0].is_file(), source
        assert len(description) > 20, source


def test_formulas_are_markup_of_the_page(site: Site) -> None:
    explained = [page for path, page in site.pages.items() if path.parent.name == "explanation"]
    assert sum(page.formulas for page in explained) > 100
    marks = [path for path, page in site.pages.items() if re.search(r"\$\$|\\frac|arithmatex", page.path.read_text())]
    assert [path for path in marks if "repository" not in path.parts] == []


def test_the_reference_has_every_command_and_every_key_of_a_recipe(site: Site) -> None:
    from typer.main import get_command

    from decoding.drafters.registry import REGISTRY
    from trainer.cli import app

    commands = site.pages[site.folder / "reference" / "commands.html"]
    group = get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]  # typer gives groups no public type
        for below in getattr(command, "commands", None) or [""]:
            assert f"headstart-{name}-{below}".strip("-") in commands.ids
        for option in command.params:
            assert option.opts[0] in commands.text, (name, option.opts)
    for drafter, entry in REGISTRY.items():
        assert drafter in commands.text
        assert all(f"{option}={known.shown}" in commands.text for option, known in entry.options.items())
    recipes = site.pages[site.folder / "reference" / "recipes.html"].text
    assert "adamw | muon" in recipes and "\\|" not in recipes + commands.text
    for key in ("training.learning_rate", "heads.loss.forward_kl", "draft.dspark.block_size", "features.folder"):
        assert key in recipes


def test_the_reference_has_the_public_names_with_their_docstrings(site: Site) -> None:
    import decoding
    import trainer

    page = site.pages[site.folder / "reference" / "python.html"]
    names = [*decoding.__all__, *trainer.__all__]
    assert len(names) >= 7
    for name in names:
        assert any(each.endswith(f".{name}") for each in page.ids), name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install Debian's package chromium")
def test_pages_open_from_a_disk_without_a_request_or_an_error_and_fit_a_phone(site: Site) -> None:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    messages: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        every = [path for path in site.pages if "repository" not in path.parts]
        widest = [path for path in every if path.stem in ("index", "commands", "measured", "exactness")]
        for width, scheme, paths in ((390, "dark", every), (1280, "light", widest)):
            page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
            page.on("console", lambda told: messages.append(told.text) if told.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: messages.append(str(error)))
            page.on("request", lambda asked: messages.append(asked.url) if asked.url.startswith("http") else None)
            for path in paths:
                page.goto(path.as_uri())
                wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                if wider > 0:
                    messages.append(f"{path.name} is {wider} pixels wider than a screen of {width}")
            named = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
            assert named == ("slate" if scheme == "dark" else "default")
        page.locator(".md-search__input").click()
        page.locator(".md-search__input").press_sequentially("traversal")
        page.locator(".md-search-result__link").first.wait_for(timeout=30_000)
        browser.close()
    assert messages == []
