"""The README's moving picture in headless Chromium, at chosen moments of its clock. Skipped where there is none."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_report_browser import CHROMIUM

sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))  # where the script stands
drawing = import_module("decode_picture")
REPORT = json.loads((ROOT / "benchmarks" / "results" / "amd-epyc-2-cores" / "decode.json").read_text())
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
SEEN = """
seconds => {
  for (const each of document.getAnimations()) { each.pause(); each.currentTime = seconds * 1000; }
  const shown = each => getComputedStyle(each.closest('.now') ?? each).opacity === '1';
  const boxes = [...document.querySelectorAll('svg > g:has(> .card)')];
  return boxes.map(box => ({
    tokens: [...box.querySelectorAll('g.now > text')].filter(shown).map(each => each.textContent),
    counters: [...box.querySelectorAll('text.dim')].filter(shown).map(each => each.textContent),
    outside: [...box.querySelectorAll('text')].filter(shown).filter(each => {
      const [a, b] = [each, box.querySelector('.card')].map(each => each.getBoundingClientRect());
      return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom;
    }).map(each => each.textContent),
  }));
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser: Any, narrow: bool, **preferences: Any) -> Any:
    page = browser.new_page(viewport={"width": 360 if narrow else 830, "height": 700}, **preferences)
    page.set_content(f"<style>svg {{ max-width: 100%; height: auto }}</style>{drawing.picture(REPORT, narrow)}")
    return page


def written(run: str, seconds: float) -> list[str]:
    """The tokens of a run that are there after these seconds since its first one."""
    steps, ended, left = REPORT[run]["steps"], 0.0, 0
    for step in steps:
        ended += step["seconds"]
        left += ended <= seconds
    return [mark.text for mark in drawing.laid_out(steps[:left])]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_at_each_moment_the_tokens_are_those_that_were_written_by_then(browser: Any, narrow: bool, scheme: str) -> None:
    page, clock = opened(browser, narrow, color_scheme=scheme), drawing.Clock.of(REPORT)
    slower = REPORT["plain"]["seconds"]
    for seconds in (0.001 * slower, 0.3 * slower, 0.7 * slower, 1.001 * slower):
        panels = page.evaluate(SEEN, drawing.LEAD + seconds * clock.stretch)
        for panel, run in zip(panels, drawing.RUNS, strict=True):
            assert panel["tokens"] == written(run, seconds) and panel["outside"] == []
            assert len(panel["counters"]) == 1
    assert all(panel["tokens"] == [] for panel in page.evaluate(SEEN, drawing.LEAD / 2))
    colours = page.evaluate("[...document.querySelectorAll('.page, .card')].map(each => getComputedStyle(each).fill)")
    assert len(set(colours)) == 2
    assert (colours[0] == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()


def test_readers_who_want_less_motion_see_the_finished_runs(browser: Any) -> None:
    page = opened(browser, narrow=False, reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    for panel, run in zip(page.evaluate(SEEN, 0), drawing.RUNS, strict=True):
        assert panel["tokens"] == written(run, REPORT[run]["seconds"] + 1)
        assert panel["counters"][0].startswith(f"{REPORT[run]['tokens']} tokens")
    gain = page.get_by_text(f"{REPORT['speedup']:.2f}× the speed, the same text", exact=True)
    assert gain.evaluate("each => getComputedStyle(each).opacity") == "1"
    page.close()


def test_as_a_picture_of_the_readme_it_loads_and_asks_for_nothing(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "decode.svg").write_text(drawing.picture(REPORT))
    (tmp_path / "page.html").write_text('<img src="decode.svg">')
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(Path(request.url).name))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("document.images[0].naturalWidth") > 700
    assert asked == ["page.html", "decode.svg"]
    page.close()
