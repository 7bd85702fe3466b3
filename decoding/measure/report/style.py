"""Shared style of plots: colours and SVG that follow the light or dark scheme of the page.

`svg` replaces the colours of this module by CSS variables: ``--c0`` … ``--c7`` for `COLOURS`, ``currentColor`` for
`INK`. `css` defines these variables for both schemes.
"""

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#c8500a", "#00805c", "#a8538a", "#a97300", "#2a8c9e", "#5d5ad1", "#77751c")
"""Series colours on a light page: Okabe & Ito's palette for colour-blind readers, darkened for contrast."""
_DARK = ("#5aaeea", "#f2925a", "#3fc9a0", "#e2a0ca", "#eeb95a", "#7fd4e4", "#aaa8f5", "#d3cf5c")
"""Colours of the same series on a dark page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖")
"""`MARKERS` as text, for legends in HTML."""
INK = "#1b1c1e"
GRID = "#8a8d91"

styled = matplotlib.rc_context(
    {
        "text.parse_math": False,  # dollar signs in names are printed
        "svg.hashsalt": "headstart",  # equal figures make equal pages
        "svg.fonttype": "none",  # keep text selectable and in the page's font
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
"""Decorator for functions that draw pictures."""


def css() -> str:
    """Return the style sheet's variables ``--c0`` …, for light pages and, in a media query, for dark pages."""

    def variables(colours: tuple[str, ...]) -> str:
        return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(_DARK)} }} }}"
    return f":root {{ {variables(COLOURS)} }}\n{dark}"


def series(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of series ``index`` (from 0) for `Axes.plot`."""
    dashes = ("-", "--", "-.", ":")
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": dashes[index // len(COLOURS) % len(dashes)],
    }


def swatch(index: int) -> tuple[str, str]:
    """Return the CSS colour and marker character of series ``index``, for a legend in HTML."""
    return f"var(--c{index % len(COLOURS)})", GLYPHS[index % len(GLYPHS)]


def panel(width: float = 3.5, height: float = 2.5) -> tuple[Figure, Axes]:
    """Make a picture with one pair of axes, of this size in inches.

    A phone shows 3.5 inches unscaled. Call this in a `styled` function.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def shade_below_one(axes: Axes) -> None:
    """Draw a line at speed-up 1 and shade the area below it. Set the y limits before the call."""
    low, high = axes.get_ylim()
    axes.axhspan(low, 1, color=GRID, alpha=0.16, linewidth=0)
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(low, high)
    words = "slower than plain decoding"  # placed in a corner that few lines reach
    axes.text(0.02, 0.02, words, transform=axes.transAxes, va="bottom", fontsize=8.5, alpha=0.8)


@styled
def svg(figure: Figure, title: str) -> str:
    """Return the picture as an SVG element for a page with `css`; screen readers read out ``title``."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # unused ids, repeated in every picture
    for index, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--c{index})")
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid, #8a8d91)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
