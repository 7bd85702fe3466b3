"""Colours and pictures that the pages share: narrow SVG whose ink and colours follow the page, light or dark.

A colour is written here for paper. `svg` puts a CSS variable in its place (``--c0`` … ``--c7`` for `COLOURS`,
``currentColor`` for `INK`), which the page's style sheet sets for either scheme; `CSS` is that sheet's part.
"""

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#c8500a", "#00805c", "#a8538a", "#a97300", "#2a8c9e", "#5d5ad1", "#77751c")
"""Series on paper, after Okabe & Ito's palette for colour-blind readers, darkened to stand out from white."""
_DARK = ("#5aaeea", "#f2925a", "#3fc9a0", "#e2a0ca", "#eeb95a", "#7fd4e4", "#aaa8f5", "#d3cf5c")
"""The same series on a dark page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖")
"""`MARKERS` as text, for a legend beside the pictures."""
INK = "#1b1c1e"
GRID = "#8a8d91"

styled = matplotlib.rc_context(
    {
        "text.parse_math": False,  # a dollar sign in a name is printed, and starts no formula
        "svg.hashsalt": "headstart",  # the same figures, the same page
        "svg.fonttype": "none",  # text stays text: it takes the page's font, and readers can select it
        "font.size": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "text.color": INK,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": GRID,
        "grid.alpha": 0.3,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }
)
"""Decorator of a function that draws a picture."""


def css() -> str:
    """Return the style sheet's part for the series: ``--c0`` … for a light page and, in its media query, a dark one."""

    def variables(colours: tuple[str, ...]) -> str:
        return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(_DARK)} }} }}"
    return f":root {{ {variables(COLOURS)} }}\n{dark}"


def series(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of series ``index`` (from 0) for `Axes.plot`; neighbours differ in both."""
    dashes = ("-", "--", "-.", ":")
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": dashes[index // len(COLOURS) % len(dashes)],
    }


def swatch(index: int) -> tuple[str, str]:
    """Return series ``index`` for a legend in HTML: its CSS colour and its marker as a character."""
    return f"var(--c{index % len(COLOURS)})", GLYPHS[index % len(GLYPHS)]


def panel(width: float = 3.5, height: float = 2.5) -> tuple[Figure, Axes]:
    """Make a picture with one pair of axes, in inches; 3.5 are what a phone shows without scaling the text down.

    Call it in a function that is `styled`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def shade_below_one(axes: Axes) -> None:
    """Draw the line of speed-up 1 and shade the area under it; set the limits of the y axis before."""
    low, high = axes.get_ylim()
    axes.axhspan(low, 1, color=GRID, alpha=0.16, linewidth=0)
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(low, high)
    words = "slower than plain decoding"  # few lines end there
    axes.text(0.02, 0.02, words, transform=axes.transAxes, va="bottom", fontsize=8.5, alpha=0.8)


@styled
def svg(figure: Figure, title: str) -> str:
    """Return the picture as an SVG element for a page that has `css`; ``title`` is read out in its place."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    found = buffer.getvalue()
    found = re.sub(r'<g id="[^"]*"', "<g", found[found.index("<svg") :])  # of no use, and the same in every picture
    for index, colour in enumerate(COLOURS):
        found = found.replace(colour, f"var(--c{index})")
    found = found.replace(INK, "currentColor").replace(GRID, "var(--grid, #8a8d91)")
    return found.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
