"""The pages for readers: figures equal the figures in the JSON files, and every file and name that a page mentions
exists.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "PAPERS.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def _publisher() -> ModuleType:
    if str(ROOT / "scripts") not in sys.path:  # as when the script is run
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("publish_results", ROOT / "scripts" / "publish_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COUNTS = {"spec_bench": 1, "curve": 1, "crossover": 1, "policies": 1, "equal_budget": 1, "experimental": 1}
COUNTS |= {"quickstart": 1, "served": 1, "verified": 1, "accepted": 2, "smollm2": 2, "one_gpu": 4, "self_written": 1}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_the_figures_of_the_pages_are_those_of_one_committed_report(name: str, count: int) -> None:
    publisher = _publisher()
    assert publisher.PAGES.keys() == COUNTS.keys()
    blocks = [(page, mark, write) for page, marked in publisher.PAGES[name].items() for mark, write in marked]
    assert len(blocks) == count
    found = sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}.json"))
    reports = [json.loads(path.read_text()) for path in found]
    assert any(
        all(publisher.block(mark, write(report)) in (ROOT / page).read_text() for page, mark, write in blocks)
        for report in reports
    )


def test_every_test_that_the_page_of_methods_names_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "methods.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text(), (file, test)


def test_figures_of_other_trainers_have_their_source_and_a_date() -> None:
    publisher = _publisher()
    report = json.loads((ROOT / "benchmarks" / "results" / "computed" / "one_gpu.json").read_text())
    rows = [row for row in publisher.stored_by_token(report).splitlines() if "](http" in row]
    assert [re.findall(r"[\d,/ ]+(?= \|$)", row)[-1].strip() for row in rows] == ["32,768 / 16,396", "49,158"]
    assert all(re.search(r"/blob/[0-9a-f]{40}/", row) for row in rows) and "0.9.0 of 2026-10-16" in rows[0]
    assert all(
        "read on 2026-11-26" in write(report) for write in (publisher.stored_by_token, publisher.stored_sentence)
    )


def test_the_readme_names_every_machine_that_figures_come_from_and_says_which_are_missing() -> None:
    folders = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert folders == {"amd-epyc-2-cores", "computed"}, "figures of another machine: the README's limits must name it"
    assert "two CPU cores (AMD EPYC)" in README and "No GPU has been measured yet." in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_name_that_a_page_points_to_exists(page: Path) -> None:
    text = page.read_text()
    assert [found for found in pointed_to(page) if not found.exists()] == []
    dotted = re.findall(r"(?:`|^::: )((?:decoding|trainer)(?:\.\w+)+)(?:`|$)", text, re.M)
    assert [name for name in dotted if not _exists(name)] == []


def test_every_page_of_the_docs_begins_with_what_it_shows_its_reader() -> None:
    first = {page: page.read_text().split("\n\n")[1].strip("*") for page in PAGES if "docs" in page.parts}
    assert len(first) >= 15
    assert [
        page for page, text in first.items() if not re.match(r"(This (page|tutorial) shows|Here you can)\b", text)
    ] == []


def test_the_pages_point_to_files() -> None:
    assert len(pointed_to(PAGES[0])) >= 20
    assert sum(len(pointed_to(page)) for page in PAGES) > 80


def pointed_to(page: Path) -> list[Path]:
    """Return the files to which a page links or which it names by a path."""
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", text)]
    links += [page.parent / link for link in re.findall(r'(?:src|srcset)="(?!http)([^"]+)"', text)]
    named = re.findall(r"`((?:decoding|trainer|scripts|recipes|docs|examples)/[\w./-]*)`", text)
    return links + [ROOT / found for found in named]


def _exists(dotted: str) -> bool:
    """Return True for a module, and for a name that the file of a module defines."""
    *parents, name = dotted.split(".")
    for module in (ROOT.joinpath(*parents, name), ROOT.joinpath(*parents)):
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                own = module.name == name
                return own or re.search(rf"^(?:def|class) {name}\b|^{name}\b.*=", file.read_text(), re.M) is not None
    return False
