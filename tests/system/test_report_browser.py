"""The page of a report in headless Chromium: at three widths, light and dark, with every part folded and unfolded.

Skipped without Chromium.
"""

import contextlib
import functools
import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from full_report import full_report, renamed

from decoding.measure.report.page import write_html
from decoding.measure.results import report_from_json

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 768, 1280)
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers for the colour schemes."""
READ = """
function measured(frame) {
  const view = frame.contentWindow, page = view.document;
  page.querySelectorAll("details").forEach(each => each.open = true);
  const every = [...page.body.querySelectorAll("*")], inside = view.innerWidth + 1;
  const sizes = [...page.querySelectorAll("svg")].flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
    parseFloat(view.getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width));
  return {
    inner: view.innerWidth, unfolded: page.documentElement.scrollWidth,
    outside: every.filter(each => !each.closest(".wide, svg") && each.getBoundingClientRect().right > inside)
      .map(each => each.tagName + "." + each.className).slice(0, 5),
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    smallest: Math.min(...sizes), background: view.getComputedStyle(page.body).backgroundColor,
  };
}
window.onload = () => {
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measured));
};
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install Debian's package chromium")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder on the loopback, so that a page can read frames of the same origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def looked_at(folder: Path, scheme: str, pages: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Open the pages at all widths; return the measurements of each, and the lines in the browser's console."""
    frames = "".join(
        f'<iframe src="{page}" style="border: 0; height: 900px; width: {width}px"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    (folder / "frames.html").write_text(f'<body>{frames}<pre id="found"></pre><script>{READ}</script>')
    with served(folder) as address:
        command = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1400,1000",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=20000", "--dump-dom",
            f"{address}/frames.html",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found and found.group(1), done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found.group(1))), console


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the page of a report that has every part, and the same page with long names without spaces."""
    folder = tmp_path_factory.mktemp("pages")
    write_html(report_from_json(full_report()), folder / "report.html")
    write_html(
        report_from_json(renamed(full_report(), "a-name-that-nobody-would-give-" + "x" * 60)), folder / "long.html"
    )
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_fits_every_width_and_asks_for_nothing(pages: Path, scheme: str) -> None:
    found, console = looked_at(pages, scheme, ["report.html", "long.html"])
    assert console == [] and len(found) == 2 * len(WIDTHS)
    for page in found:
        assert page["unfolded"] <= page["inner"] and page["outside"] == [] and page["requests"] == [], page
        assert page["smallest"] >= 9 and (page["background"] == "rgb(247, 247, 245)") == (scheme == "light")


def test_a_page_with_faults_is_caught(tmp_path: Path) -> None:
    """The measurements above reject a page that is too wide, too small, or requests other files."""
    faults = (
        '<p style="width: 2000px">wide</p><script>console.error("loud")</script><img src="/missing.png">'
        '<svg viewBox="0 0 100 100" width="50"><text x="1" y="50" font-size="10">one</text></svg>'
    )
    (tmp_path / "faulty.html").write_text(f"<!doctype html><body>{faults}")
    found, console = looked_at(tmp_path, "dark", ["faulty.html"])
    assert any("loud" in line for line in console)
    for page in found:
        assert page["unfolded"] > page["inner"] and page["outside"] and page["requests"] and page["smallest"] < 9
