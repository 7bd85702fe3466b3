"""Drawing for docs/explanation: cards, a pen that draws on them, and trees with kept and dropped nodes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

from decoding.text import Step

COLOURS = {  # role: its colour in the light scheme, and in the dark scheme
    "card": ("#ffffff", "#0d1117"),
    "frame": ("#d1d9e0", "#30363d"),
    "band": ("#f3f5f8", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "kept": ("#d3f5dc", "#12361f"),
    "kept edge": ("#1a7f37", "#3fb950"),
    "own": ("#d8ebff", "#11294a"),
    "own edge": ("#0969da", "#58a6ff"),
    "dropped": ("#fafbfc", "#12171e"),
    "dropped edge": ("#a3adb8", "#5b646e"),
}
LIGHT, DARK = ({role: pair[scheme] for role, pair in COLOURS.items()} for scheme in (0, 1))
# Lengths in points.
GLYPH = 0.602  # width of a DejaVu Sans Mono character at size 1
TREE_SIZE = 10.5
LEAF, BOX = 25.0, 18.0
GAPS = 26.0, 96.0  # least and greatest distance between two columns


@dataclass
class Pen:
    """Pen for boxes, words and curves in the colours of one scheme. Coordinates are in points, y upwards."""

    axes: Axes
    colours: Mapping[str, str]

    def words(self, x: float, y: float, text: str, size: float = 10, colour: str = "ink", **more: object) -> None:
        self.axes.text(x, y, text, fontsize=size, color=self.colours[colour], **{"va": "center", **more})  # type: ignore[arg-type]

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str, **more: object) -> None:
        """Draw a rounded box with its left edge at x and its middle at y."""
        style = "round,pad=0,rounding_size=" + str(more.pop("radius", 4))
        patch = FancyBboxPatch((x, y - height / 2), width, height, boxstyle=style, **more)  # type: ignore[arg-type]
        patch.set(facecolor=self.colours[fill], edgecolor=self.colours[edge])
        self.axes.add_patch(patch)

    def token(self, x: float, y: float, text: str, role: str, size: float, height: float = BOX) -> float:
        """Draw a token in its box; return the box's width."""
        width = token_width(text, size)
        dashes = {"linestyle": (0, (3, 2))} if role == "dropped" else {}
        self.box(x, y, width, height, role, f"{role} edge", linewidth=1.1, zorder=3, **dashes)
        colour = "muted" if role == "dropped" else "ink"
        self.words(x + width / 2, y - 0.5, text, size, colour, ha="center", family="monospace", zorder=4)
        return width

    def curve(self, start: tuple[float, float], end: tuple[float, float], role: str) -> None:
        middle = (start[0] + end[0]) / 2
        path = Curve([start, (middle, start[1]), (middle, end[1]), end], [1, 4, 4, 4])
        width = 1.1 if role == "dropped" else 2.0
        self.axes.add_patch(
            PathPatch(path, fill=False, edgecolor=self.colours[f"{role} edge"], linewidth=width, zorder=2)
        )


def token_width(text: str, size: float) -> float:
    return len(text) * GLYPH * size + 11


class Placed(NamedTuple):
    """A node of a drawn tree: its text, its role, its place, and the index of its parent in the list of nodes (-1: the
    parent is the root).
    """

    text: str
    role: str
    x: float
    y: float
    parent: int


def place_tree(step: Step, texts: Sequence[str], left: float, right: float) -> list[Placed]:
    """Place the nodes below the root between ``left`` and ``right``; the first leaf is at height 0, and the others are
    below. ``texts``: the texts of the tree's nodes, followed by the text of the token that the target wrote after the
    last kept node. A node is level with its kept child or, if it has none, with its first child.
    """
    assert step.tree is not None
    shape, path = step.tree.shape, (0, *step.path)
    own = len(shape)
    kept = {*path, own}
    parents = (*shape.parents, path[-1])
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(own + 1)]
    columns = _columns([*shape.depths, len(path)], texts, left, right)
    heights = _heights(children, kept)
    roles = ["own" if node == own else "kept" if node in kept else "dropped" for node in range(own + 1)]
    return [
        Placed(texts[node], roles[node], columns[node], heights[node], parents[node] - 1) for node in range(1, own + 1)
    ]


def _columns(depths: Sequence[int], texts: Sequence[str], left: float, right: float) -> list[float]:
    """Return the left edge of each node; nodes of equal depth are aligned."""
    widths = [0.0] * (max(depths) + 1)
    for depth, text in zip(depths[1:], texts[1:], strict=True):
        widths[depth] = max(widths[depth], token_width(text, TREE_SIZE))
    gap = min(GAPS[1], max(GAPS[0], (right - left - sum(widths)) / max(depths)))
    return [left + sum(widths[:depth]) + gap * depth for depth in depths]


def _heights(children: Sequence[Sequence[int]], kept: Collection[int]) -> dict[int, float]:
    """Return the height of each node: leaves are below one another, and every parent is level with one child."""
    heights: dict[int, float] = {}

    def visit(node: int, leaves: int) -> int:
        """Place a node's subtree under the ``leaves`` leaves that already have a height; return their new number."""
        for child in children[node]:
            leaves = visit(child, leaves)
        level = next((child for child in children[node] if child in kept), next(iter(children[node]), None))
        heights[node] = -leaves * LEAF if level is None else heights[level]
        return leaves + (level is None)

    visit(0, 0)
    return heights


def draw_tree(pen: Pen, nodes: Sequence[Placed], root: tuple[float, float]) -> None:
    for node in nodes:
        if node.parent >= 0:
            parent = nodes[node.parent]
            start = (parent.x + token_width(parent.text, TREE_SIZE), parent.y)
        else:
            start = root
        pen.curve(start, (node.x, node.y), node.role)
        pen.token(node.x, node.y, node.text, node.role, TREE_SIZE)


def card(width: float, height: float, colours: Mapping[str, str]) -> tuple[Figure, Pen]:
    """Make an empty picture, which is a framed card of this size in points, and a pen that draws on it."""
    figure = plt.figure(figsize=(width / 72, height / 72), dpi=144, facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    pen = Pen(axes, colours)
    pen.box(1, height / 2, width - 2, height - 2, "card", "frame", radius=10, linewidth=1)
    return figure, pen


def with_schemes(svg: str) -> str:
    """Let a light picture switch to dark colours if the reader's scheme is dark."""
    rules = [
        f'[style*="{name}: {LIGHT[role]}"] {{ {name}: {DARK[role]} !important }}'
        for role in LIGHT
        for name in ("fill", "stroke")
    ]
    style = "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>\n"
    begin = svg.index("<defs>")
    return svg[:begin] + style + svg[begin:]


def save(figure: Figure, output: Path, source: str) -> None:
    """Write an .svg in light colours, with dark colours for dark schemes; its metadata names ``source``."""
    plt.rcParams["svg.hashsalt"] = "loop"  # equal pictures make equal files
    figure.savefig(output, metadata={"Date": None, "Source": source})
    lines = with_schemes(output.read_text()).splitlines()
    output.write_text("\n".join(line.rstrip() for line in lines) + "\n")
