"""Take the pictures of the web demo for the documentation: a run of `headstart demo` in headless Chromium, light and
dark.

Usage: scripts/demo_pictures.py [--output docs/pictures] [--pass N] [OPTIONS OF headstart demo ...]

Without options the demo uses the embedded target and the drafters that `make demo` trained in runs/quickstart. The
pictures show the demo's first example, at the pass that kept the most nodes of the tree.
"""

import argparse
import io
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 1100
MOST_BYTES = 250_000


@contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """Start the demo on a free port; yield its address once it answers, and stop it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trainer.cli", "demo", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if "the demo is at" in line:
                break
        else:
            sys.exit(process.wait())
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


def decoded(browser: Browser, address: str, scheme: str) -> Page:
    """Open the page and let it decode its first example."""
    dark = "dark" if scheme == "dark" else "light"
    page = browser.new_page(color_scheme=dark, viewport={"width": WIDTH, "height": 900})
    page.goto(address)
    page.locator("#run").click()
    expect(page.locator(".verdict")).to_be_visible(timeout=300_000)
    return page


def show_pass(page: Page, number: int | None) -> int:
    """Move the slider to a pass (None: the pass that kept the most nodes); return its number."""
    slider = page.locator("#pass input[type=range]")
    last = int(slider.get_attribute("max") or 0)
    kept = page.locator("#tree .node.kept")
    slider.press("End")
    wait_for_pass(page, last)
    best = (kept.count(), last)
    for place in range(last - 1, 0, -1):
        slider.press("ArrowLeft")
        wait_for_pass(page, place)
        if kept.count() >= best[0]:
            best = (kept.count(), place)
    chosen = best[1] if number is None else number
    for place in range(2, chosen + 1):
        slider.press("ArrowRight")
        wait_for_pass(page, place)
    return chosen


def wait_for_pass(page: Page, number: int) -> None:
    expect(page.locator("#tree .told")).to_have_attribute("data-pass", str(number))


def save(page: Page, path: Path) -> None:
    """Write the whole page with a palette of 128 colours, which is enough for its flat areas."""
    page.mouse.move(0, 0)
    image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, but the repository allows {MOST_BYTES}: use fewer colours")
    print(f"written: {path}, {size} bytes")


def main() -> None:
    """Read the options, serve the demo, decode, and take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    parser.add_argument(
        "--pass", type=int, dest="number", help="pass to show; by default the pass with the most kept nodes"
    )
    options, others = parser.parse_known_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("Chromium is not installed: install Debian's package chromium")
    options.output.mkdir(parents=True, exist_ok=True)
    with served(others) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = decoded(browser, address, scheme)
            shown = show_pass(page, options.number)
            save(page, options.output / f"demo-{scheme}.png")
            print(f"pass {shown}: {page.locator('.verdict').inner_text()}")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
