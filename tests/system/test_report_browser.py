"""The report's page in headless Chromium: at three widths, light and dark, with every part folded and unfolded.

Skipped where there is no Chromium.
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

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 768, 1280)
SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of the colour schemes."""
READ = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const pixels = new Map();
function pixel(colour) {
  if (!pixels.has(colour)) pixels.set(colour, painted(colour));
  return pixels.get(colour);
}
function painted(colour) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function luminance(colour) {
  const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(view, element) {
  let under = element;
  while (under && pixel(view.getComputedStyle(under).backgroundColor)[3] < 255) under = under.parentElement;
  const back = view.getComputedStyle(under || view.document.body).backgroundColor;
  const [a, b] = [view.getComputedStyle(element).color, back].map(pixel).map(luminance).sort();
  return (b + 0.05) / (a + 0.05);
}
function crossing(texts) {
  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]), found = [];
  boxes.forEach(([first, a], i) => boxes.slice(i + 1).forEach(([second, b]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
      found.push(`${first} | ${second}`);
  }));
  return found;
}
function measured(frame) {
  const view = frame.contentWindow, page = view.document;
  const unfold = open => page.querySelectorAll("details").forEach(each => each.open = open);
  unfold(false);
  const folded = page.documentElement.scrollWidth;
  unfold(true);
  const every = [...page.body.querySelectorAll("*")], inside = view.innerWidth + 1;
  const written = every.filter(each => !each.closest("svg, .track") && each.offsetParent
    && [...each.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
  const pictures = [...page.querySelectorAll("svg")];
  const sizes = pictures.flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
    parseFloat(view.getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width));
  const faint = written.map(each => [contrast(view, each), each.className + ": " + each.textContent.slice(0, 40)]);
  return {
    page: frame.dataset.page, width: frame.clientWidth, inner: view.innerWidth, folded,
    unfolded: page.documentElement.scrollWidth,
    outside: every.filter(each => !each.closest(".wide, svg") && each.getBoundingClientRect().right > inside)
      .map(each => each.tagName + "." + each.className).slice(0, 5),
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    pictures: pictures.length, smallest: Math.min(...sizes), overlapping: pictures.flatMap(svg =>
      crossing([...svg.querySelectorAll("text")])),
    background: luminance(pixel(view.getComputedStyle(page.body).backgroundColor)),
    faintest: faint.sort((a, b) => a[0] - b[0])[0],
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
    """Serve the folder on the loopback; frames of one origin may be read by the page around them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def looked_at(folder: Path, scheme: str, pages: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Open the pages at all widths; return what was measured of each, and the lines of the browser's console."""
    frames = "".join(
        f'<iframe data-page="{page}" src="{page}" style="border: 0; height: 900px; width: {width}px"></iframe>'
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
    """A folder with the page of a report that has every part, and the same with names that have nowhere to break."""
    folder = tmp_path_factory.mktemp("pages")
    write_html(full_report(), folder / "report.html")
    write_html(renamed(full_report(), "a-name-that-nobody-would-give-" + "x" * 60), folder / "long.html")
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_fits_every_width_and_can_be_read(pages: Path, scheme: str) -> None:
    found, console = looked_at(pages, scheme, ["report.html", "long.html"])
    assert console == [] and len(found) == 2 * len(WIDTHS)
    for page in found:
        assert page["inner"] == page["width"] and page["folded"] <= page["inner"], page
        assert page["unfolded"] <= page["inner"] and page["outside"] == [], page
        assert page["requests"] == []
        assert page["pictures"] >= 10 and page["smallest"] >= 9 and page["overlapping"] == [], page
        assert page["faintest"][0] >= 4.5, "the contrast that WCAG 2.2 asks of text"
        assert (page["background"] > 0.5) == (scheme == "light")


def test_a_page_with_faults_is_caught(tmp_path: Path) -> None:
    """The measurements above fail a page that is too wide, too faint, overprinted, or asks for something."""
    faults = (
        '<p style="width: 2000px; color: #ccc">wide and faint</p><script>console.error("loud")</script>'
        '<img src="/missing.png"><svg viewBox="0 0 100 100" width="50"><text x="1" y="50" font-size="10">one</text>'
        '<text x="2" y="50" font-size="10">two</text></svg>'
    )
    (tmp_path / "faulty.html").write_text(f'<!doctype html><body style="background: #fff">{faults}')
    found, console = looked_at(tmp_path, "dark", ["faulty.html"])
    assert any("loud" in line for line in console)
    for page in found:
        assert page["unfolded"] > page["inner"] and page["outside"] and page["requests"]
        assert page["faintest"][0] < 4.5 and page["smallest"] < 9 and page["overlapping"] == ["one | two"]
        assert page["background"] > 0.5, "it does not follow the scheme"
