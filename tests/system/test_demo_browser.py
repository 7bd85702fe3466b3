"""The web demo in headless Chromium, with a separate server process: the actions of one visitor and of several at once.

Skipped without Chromium, Playwright or Gradio. HEADSTART_SCREENSHOTS=FOLDER keeps the pictures.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_report_browser import CHROMIUM
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from trainer.terminal.exit_codes import ExitCode

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install Debian's package chromium"),
    pytest.mark.skipif(find_spec("gradio") is None, reason="the demo needs Gradio"),
]

from playwright.sync_api import Browser, BrowserContext, Page, expect  # noqa: E402  # after the skip

LONG = 1900  # tokens: seconds of decoding
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(each =>
  !each.closest(".drawing, .options") && each.checkVisibility() && each.getBoundingClientRect().width
  && each.getBoundingClientRect().right > innerWidth + 1).map(each => each.tagName + "." + each.className)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a demo of a tiny target, with the target itself and a lookup as drafters; yield the address."""
    target = tmp_path_factory.mktemp("demo") / "target"
    tiny_model(vocab=128, max_position_embeddings=4096).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    drafters = ["--drafter", f"draft-tree:{target},depth=4,width=2,nodes=12", "--drafter", "lookup"]
    options = ["--target", str(target), *drafters, "--dtype", "fp32", "--port", str(port)]
    command = [sys.executable, "-m", "trainer.cli", "demo", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while "the demo is at" not in told:
            line = process.stderr.readline()
            assert line, f"the server ended: {told}"
            told += line
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            assert process.wait(timeout=60) == ExitCode.STOPPED and "Traceback" not in rest, rest


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A separate browser window that shows the demo: its page, the addresses that it requested, and the errors in its
    console.
    """

    def __init__(self, browser: Browser, server: str, scheme: str = "light", size: str = "wide") -> None:
        self.server, (width, height) = server, SIZES[size]
        self.context: BrowserContext = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": height}
        )
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(server)
        expect(self.page.locator("#run")).to_be_visible()

    def fill(self, field: str, value: str) -> None:
        box = self.page.locator(f"#{field} textarea, #{field} input").first
        box.fill(value)
        box.press("Tab")

    def run(self, prompt: str, tokens: int) -> None:
        self.fill("prompt", prompt)
        self.fill("most", str(tokens))
        self.page.locator("#run").click()

    def choose(self, field: str, option: str) -> None:
        self.page.locator(f"#{field} input").click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def text(self, side: str) -> str:
        return self.page.locator(f"#{side} .text").text_content() or ""

    def ends(self, verdict: str = "equal") -> None:
        expect(self.page.locator(".verdict")).to_have_attribute("data-verdict", verdict, timeout=30_000)

    def has_begun(self) -> None:
        for side in ("plain", "speculative"):
            expect(self.page.locator(f"#{side} .text")).to_have_text(re.compile("..", re.DOTALL), timeout=30_000)

    def close(self) -> None:
        """Close the window; check that all requests went to the server and that there were no errors."""
        self.context.close()
        inside = [url for url in self.asked if url.startswith((self.server, "data:", "blob:"))]
        assert len(inside) > 10 and self.asked == inside
        assert self.errors == []


@pytest.mark.parametrize(("scheme", "size"), [("light", "wide"), ("dark", "phone")])
def test_a_prompt_is_decoded_twice_to_equal_texts_and_each_tree_can_be_seen(
    server: str, browser: Browser, tmp_path: Path, scheme: str, size: str
) -> None:
    visit = Visit(browser, server, scheme, size)
    page = visit.page
    visit.run("abcabcabc", 96)
    visit.ends()
    assert visit.text("plain") == visit.text("speculative") and len(visit.text("plain")) > 20
    assert page.locator("#plain .drafted").count() == 0 and page.locator("#speculative .drafted").count() > 5
    assert "all 96 tokens are equal" in page.locator(".verdict").inner_text()

    expect(page.locator("#tree .text")).to_have_text(visit.text("speculative"), use_inner_text=False)
    tree, slider = page.locator("#tree .tree"), page.locator("#pass input[type=range]")
    last = int(slider.input_value())
    assert last == int(slider.get_attribute("max") or 0) > 5 and tree.locator(".node.kept").count() >= 1
    told = page.locator("#tree .told")
    slider.press("Home")
    expect(told).to_contain_text("The prefill")
    slider.press("ArrowRight")
    expect(told).to_have_attribute("data-pass", "1")
    assert tree.locator(".node.kept").count() >= 1
    drafted = re.search(r"Pass 1 of \d+: (\d+) tokens drafted", told.inner_text())
    assert drafted and tree.locator(".node").count() == 1 + int(drafted[1]) + tree.locator(".node.written").count()
    first = page.locator("#tree .text").text_content() or ""
    slider.press("ArrowRight")
    expect(told).to_have_attribute("data-pass", "2")
    second, marked = page.locator("#tree .text").text_content() or "", page.locator("#tree .now").all_text_contents()
    assert visit.text("speculative").startswith(second) and second == first + "".join(marked) != first

    assert page.locator("#charts .columns li").count() >= 4 and page.locator("#charts .part.draft").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.evaluate(OUTSIDE) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 380) == (scheme == "light")
    shots = Path(os.environ.get("HEADSTART_SCREENSHOTS", tmp_path))
    page.screenshot(path=shots / f"demo-{scheme}-{size}.png", full_page=True)
    visit.close()


def test_texts_stream_and_stop_where_they_are(server: str, browser: Browser) -> None:
    visit = Visit(browser, server)
    visit.run("abc", LONG)
    visit.has_begun()
    slider, told = visit.page.locator("#pass input[type=range]"), visit.page.locator("#tree .told")
    slider.press("Home")
    expect(told).to_have_attribute("data-pass", "0")
    grown = "length => document.querySelector('#plain .text').textContent.length > length"
    visit.page.wait_for_function(grown, arg=len(visit.text("plain")) + 50)
    assert told.get_attribute("data-pass") == slider.input_value() == "0", "the texts grow, the view stays"
    visit.page.locator("#stop").click()
    visit.ends("stopped")
    stopped = visit.text("plain")
    assert 0 < len(stopped) < LONG, "shown before its end"
    slider.press("End")
    expect(visit.page.locator("#tree .node").nth(1)).to_be_visible()
    visit.close()
