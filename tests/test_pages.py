"""The pages that readers see: figures held against their JSON, and every file and name that they point to exists."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "PAPERS.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
CHOOSING = "docs/how-to/choosing.md"
"""Page that stands on one report alone, and is not there before it."""


def _publisher() -> ModuleType:
    if str(ROOT / "scripts") not in sys.path:  # as where the script is run
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("publish_results", ROOT / "scripts" / "publish_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COUNTS = {
    "quickstart": 3,
    "spec_bench": 1,
    "spec_bench_sampled": 1,
    "crossover": 1,
    "planned": 2,
    "speed": 2,
    "served": 1,
    "long_texts": 1,
    "accepted": 6,
    **dict.fromkeys(("data_scale", "launchers", "elastic", "train_stored", "heldout", "endpoints", "overhead"), 1),
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_the_figures_of_the_pages_are_those_of_one_committed_report(name: str, count: int) -> None:
    publisher = _publisher()
    assert publisher.PLACES.keys() == COUNTS.keys()
    blocks = [(page, mark, write) for page, marked in publisher.PLACES[name].items() for mark, write in marked]
    assert len(blocks) == count
    found = sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}.json"))
    reports = [json.loads(path.read_text()) for path in found]
    assert len(reports) >= (name == "quickstart")
    if not reports:
        assert all(
            publisher.block(mark, publisher.UNPUBLISHED) in (ROOT / page).read_text() for page, mark, _ in blocks
        )
        return
    assert any(
        all(publisher.block(mark, write(report)) in (ROOT / page).read_text() for page, mark, write in blocks)
        for report in reports
    )


def test_the_table_of_drafters_holds_every_row_with_its_figures() -> None:
    publisher = _publisher()
    figure = {"value": 2.0, "low": 1.5, "high": 2.5, "observations": 3}
    told = {"hardware": {"processor": "P", "cores": 2, "threads": 2}, "commit": "c", "dtype": "float32"}
    told |= {"parameters": 7_000_000, "prompts": 3, "rounds": 1, "max_new_tokens": 8}
    peer = {"setting": "greedy", "method": "peer", "tokens_per_pass": None, "speedup": {"median": 1.25}}
    drafter = {"setting": "T=1", "method": "lookup", "tokens_per_pass": figure, "speedup": {"median": 3.0}}
    written = publisher.drafters_table({"targets": {"t": {"drafters": {"rows": [peer, drafter], "questions": 4}}}})
    assert "| | t, greedy | t, T=1 |" in written
    assert "| peer | 1.25× | – |" in written and "| lookup | – | 3.00× · 2.00 |" in written


def test_the_tables_of_arms_have_a_column_for_each_prompt_set_and_setting() -> None:
    publisher = _publisher()
    figure = {"value": 2.0, "low": 1.5, "high": 2.5, "observations": 3}
    row = {"arm": "A", "drafting": "chain", "set": "s", "setting": "T=1", "tokens_per_pass": figure}
    row |= {"over_baseline": None, "speed": {"t": {"over_plain": figure, "over_assisted": None}}}
    timed = {**row, "setting": "greedy", "tokens_per_pass": None}
    arms = {"A": {"recipe": "draft", "overrides": ["a=1"], "seeds": {"0": {"tokens": 1000}, "1": {"tokens": 1200}}}}
    arms["A"]["after"] = None
    arms["B"] = {"recipe": "draft", "overrides": [], "seeds": {"0": {"tokens": 500}}, "after": "A"}
    report = {"rows": [row, timed], "arms": arms, "settings": {"steps": 5, "max_new_tokens": 8}, "commits": ["c"]}
    report["hardware"] = {"processor": "P", "cores": 2}
    fewer = {**row, "drafting": "tree", "tokens_per_pass": {**figure, "observations": 2}}
    assert publisher.accepted_table({**report, "rows": [row, timed, fewer]}).splitlines() == [
        "| arm | drafted | s, T=1 |",
        "|---|---|---:|",
        "| A | chain | 2.00 [1.50, 2.50] |",
        "| A | tree | 2.00 [1.50, 2.50] of 2 |",
        "",
        "Prompts: 3 of s; fewer where a figure ends in their number.",
    ]
    assert len(publisher.compared_table(report).splitlines()) == 2, "an arm without a baseline has no row"
    gained = publisher.gained_tables(report).splitlines()
    assert gained[0] == "**t**" and gained[2] == "| arm | drafted | s, greedy | s, T=1 |"
    assert gained[4] == "| A | chain | 2.00× [1.50, 2.50] (–) | 2.00× [1.50, 2.50] (–) |"
    assert "| A | draft | `a=1` | 2 | 1,000 to 1,200 |" in publisher.trained_table(report)
    assert "| B | draft, from A | – | 1 | 500 |" in publisher.trained_table(report), "its own tokens alone"


def test_the_leading_table_lets_methods_of_the_most_prompts_compete_and_names_the_way_at_each_temperature() -> None:
    publisher = _publisher()

    def row(
        drafting: str, setting: str, value: float, prompts: int, target: str = "t", arm: str = "A"
    ) -> dict[str, Any]:
        gain = {"value": value, "low": value, "high": value, "observations": prompts}
        speed = {target: {"over_plain": gain, "over_assisted": None}}
        return {"arm": arm, "drafting": drafting, "set": "s", "setting": setting, "speed": speed}

    rows = [row("tree", "greedy", 2.0, 100), row("tree", "greedy", 3.0, 37, arm="B"), row("tree", "T=1", 1.1, 100)]
    rows += [row("drawn tree", "T=1", 1.5, 100), row("tree", "T=1", 1.4, 40, "w")]
    rows += [row("tree", "greedy", 2.0, 40, "v"), row("tree", "T=1", 1.0, 30, "v")]
    lines = publisher.lead_table({"rows": rows}).splitlines()
    assert lines[2] == "| t | *A*, tree | **2.00× [2.00, 2.00]** (–) | **1.50× [1.50, 1.50]** (–), drawn tree | 100 |"
    assert lines[3].endswith("| 40 and 30 |"), "prompts of the greedy figure, then of the other where it has fewer"
    assert lines[4] == "", "a target without a greedy figure has no row"
    assert publisher.lead_table({"rows": [{**row("tree", "greedy", 1.0, 9), "speed": {}}]}).startswith("| target |")


def test_the_page_of_choices_names_the_fastest_and_those_that_may_be_as_fast() -> None:
    publisher = _publisher()

    def row(arm: str, drafting: str, value: float, high: float, setting: str = "greedy") -> dict[str, object]:
        gain = {"value": value, "low": value - 0.1, "high": high, "observations": 9}
        return {"arm": arm, "drafting": drafting, "set": "s", "setting": setting, "speed": {"t": {"over_plain": gain}}}

    arms = {
        "M": {"recipe": "medusa1", "overrides": []},
        "D": {"recipe": "draft", "overrides": []},
        "P": {"recipe": "draft", "overrides": ["draft.parallel={tokens: 6}"]},
        "L": {"recipe": None, "overrides": []},
    }
    rows = [row("M", "chain", 1.5, 1.6), row("M", "tree", 1.8, 1.9), row("P", "6 tokens", 2.0, 2.2)]
    rows += [row("D", "4 tokens", 1.9, 2.05), row("D", "with lookup", 1.2, 1.3), row("L", "10 tokens", 0.9, 1.0)]
    rows += [row("L", "10 tokens", 0.8, 0.9, "T=1")]
    page = publisher.choosing_page({"arms": arms, "rows": rows})
    assert (
        "| s | greedy | 1.80× (M, tree; 9 prompts) | 2.00× (P, 6 tokens; 9 prompts) | 1.90× (D, 4 tokens; 9 prompts) "
        in page
    )
    assert "| 0.90× (L, 10 tokens; 9 prompts) | 1.20× (D, with lookup; 9 prompts) | parallel draft or draft |" in page
    assert "| s | T=1 | – | – | – | 0.80× (L, 10 tokens; 9 prompts) | – | plain decoding |" in page
    assert "- **Parallel draft**: the fastest on s (greedy).\n" in page
    assert "- **Heads**: the fastest on none.\n" in page
    assert "slower than plain decoding on s (greedy), s (T=1)." in page


def test_the_page_of_choices_is_that_of_the_report() -> None:
    publisher = _publisher()
    reports = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*/accepted.json")]
    assert (ROOT / CHOOSING).exists() == bool(reports)
    assert not reports or any((ROOT / CHOOSING).read_text() == publisher.choosing_page(each) for each in reports)


def test_the_readme_names_every_machine_that_figures_come_from_and_says_which_are_missing() -> None:
    folders = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert folders == {"amd-epyc-2-cores"}, "figures of another machine: the README's limits must name it"
    assert "two CPU cores (AMD EPYC)" in README and "No GPU has been measured yet." in README


def test_publishing_renews_a_marked_block_and_refuses_a_page_without_it() -> None:
    publisher = _publisher()
    page = f"above\n{publisher.block('table', 'old')}\nbelow\n"
    assert publisher.renewed(page, "table", "new") == f"above\n{publisher.block('table', 'new')}\nbelow\n"
    with pytest.raises(ValueError, match="has 0 blocks between the marks of 'headline': give it one"):
        publisher.renewed(page, "headline", "new")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_name_that_a_page_points_to_exists(page: Path) -> None:
    text = page.read_text()
    assert [found for found in pointed_to(page) if not found.exists()] == []
    dotted = re.findall(r"`((?:decoding|trainer)(?:\.\w+)+)`", text)
    assert [name for name in dotted if not _exists(name)] == []


def test_the_pages_point_to_files() -> None:
    assert len(pointed_to(PAGES[0])) >= 20
    assert sum(len(pointed_to(page)) for page in PAGES) > 80


def pointed_to(page: Path) -> list[Path]:
    """Return the files that a page links to or names by their path."""
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", text)]
    links += [page.parent / link for link in re.findall(r'(?:src|srcset)="(?!http)([^"]+)"', text)]
    named = re.findall(r"`((?:decoding|trainer|scripts|recipes|docs|examples)/[\w./-]*)`", text)
    return links + [ROOT / found for found in named]


def _exists(dotted: str) -> bool:
    """True for a module, and for a name that a module's file defines."""
    *parents, name = dotted.split(".")
    for module in (ROOT.joinpath(*parents, name), ROOT.joinpath(*parents)):
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                own = module.name == name
                return own or re.search(rf"^(?:def|class) {name}\b|^{name}\b.*=", file.read_text(), re.M) is not None
    return False
