"""Pictures of docs/explanation, drawn from the numbers in `explained.py`.

Each picture is a card as wide as a phone's screen; wide pages show two cards next to each other.
"""

from collections.abc import Callable, Mapping, Sequence

import explained
from explained import EXAMPLES, TOKENS, P, Q
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture_card import Pen, card, draw_tree, place_tree

from decoding.metrics import expected_tokens
from decoding.rules.tree import TokenTree
from decoding.text import Step

# Lengths in points.
WIDTH, EDGE = 255.0, 14.0
ROW, BAR = 34.0, 15.0

Colours = Mapping[str, str]


def number(value: float) -> str:
    """Write a probability with two to four digits, as many as it needs."""
    return f"{value:.4f}".rstrip("0").ljust(4, "0")


def heading(pen: Pen, top: float, title: str, below: str) -> None:
    pen.words(EDGE, top - 17, title, 9.5, weight="bold")
    pen.words(EDGE, top - 31, below, 8.5, "muted")


def segments(pen: Pen, x: float, y: float, parts: Sequence[tuple[float, str]], scale: float, height: float) -> None:
    """Draw a bar of (probability, role) parts, end to end; a part with enough room contains its number."""
    for value, role in parts:
        width = value * scale
        if width < 0.5:
            continue
        dashes = {"linestyle": (0, (3, 2))} if role == "dropped" else {}
        radius = min(2.5, width / 2.5)
        pen.box(x, y, width, height, role, f"{role} edge", linewidth=0.9, radius=radius, zorder=3, **dashes)
        text = number(value)
        if width > 4.9 * len(text) and height > 8:
            pen.words(x + min(width / 2, 16), y - 0.5, text, 7.5, ha="center", zorder=4)
        x += width


def mark(pen: Pen, x: float, y: float, height: float) -> None:
    """Draw the line at which a bar must end."""
    pen.axes.plot([x, x], [y - height / 2, y + height / 2], color=pen.colours["ink"], linewidth=1.6, zorder=5)


def legend(pen: Pen, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Draw roles and their names from left to right; role "ink" is the line drawn by `mark`."""
    x = EDGE
    for role, name in entries:
        if role == "ink":
            mark(pen, x + 3, y, 11)
        else:
            dashes = {"linestyle": (0, (3, 2))} if role == "dropped" else {}
            pen.box(x, y, 9, 8, role, f"{role} edge", linewidth=0.9, radius=2, **dashes)
        x += 8 if role == "ink" else 13
        pen.words(x, y - 0.5, name, 7.5, "muted")
        x += 4.1 * len(name) + 9


def draw_rule(name: str, colours: Colours) -> Figure:
    """Draw, for the first token that a rule writes, each token's probability, split by the token's origin. Also draw p
    and the draft's q.
    """
    rows, goal = explained.split(name), explained.wanted(EXAMPLES[name].rule)
    kept = sum(sum(row[:-1]) for row in rows)
    height = ROW * len(rows) + 72
    figure, pen = card(WIDTH, height, colours)
    heading(pen, height, EXAMPLES[name].title, f"kept {number(kept)}, written by the target {number(1 - kept)}")
    left = EDGE + 14
    scale = (WIDTH - EDGE - left) / max(*goal, *Q, *(sum(row) for row in rows))
    for place, (token, row) in enumerate(zip(TOKENS, rows, strict=True)):
        y = height - 52 - ROW * place
        pen.words(EDGE, y, token, 10, family="monospace", weight="bold")
        parts = [*((value, "kept") for value in row[:-1]), (row[-1], "own")]
        segments(pen, left, y, parts, scale, BAR)
        segments(pen, left, y - BAR / 2 - 4.5, [(Q[place], "dropped")], scale, 4)
        mark(pen, left + goal[place] * scale, y, BAR + 5)
    legend(pen, 14, (("kept", "drafted, kept"), ("own", "by the target"), ("ink", "p"), ("dropped", "q")))
    return figure


def draw_pairs(rule: str, title: str, colours: Colours) -> Figure:
    """Draw the probability of each text of two tokens, split by how many tokens of a drafted chain of two are kept."""
    rows = explained.pairs(rule)
    step = 18.0
    height = step * len(rows) + 66
    figure, pen = card(WIDTH, height, colours)
    kept = sum(count * row[count] for row in rows.values() for count in (1, 2))
    heading(pen, height, title, f"keeps {number(kept)} of two drafted tokens")
    left = EDGE + 20
    scale = (WIDTH - EDGE - left) / max(P[first] * P[second] for first, second in rows)
    for place, (text, (none, one, both)) in enumerate(rows.items()):
        y = height - 50 - step * place
        pen.words(EDGE, y, "".join(TOKENS[token] for token in text), 9, family="monospace", weight="bold")
        segments(pen, left, y, [(both, "kept"), (one, "own"), (none, "dropped")], scale, 12)
        mark(pen, left + P[text[0]] * P[text[1]] * scale, y, 16)
    legend(pen, 13, (("kept", "both kept"), ("own", "one"), ("dropped", "none"), ("ink", "p(x) p(y)")))
    return figure


# --- curves -----------------------------------------------------------------------------------------------------------


def plot(height: float, title: str, below: str, colours: Colours) -> tuple[Figure, Axes]:
    """Make a card with a heading and room for curves."""
    figure, pen = card(WIDTH, height, colours)
    heading(pen, height, title, below)
    axes = figure.add_axes((32 / WIDTH, 32 / height, (WIDTH - 48) / WIDTH, (height - 78) / height))
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["dropped edge"])
    axes.tick_params(colors=colours["dropped edge"], labelcolor=colours["muted"], labelsize=8, length=3)
    axes.xaxis.label.set(color=colours["muted"], size=8)
    return figure, axes


def name_curve(axes: Axes, x: float, y: float, text: str, colour: str, **more: object) -> None:
    axes.text(x, y, text, **{"color": colour, "fontsize": 8, "va": "center", "weight": "bold", **more})  # type: ignore[arg-type]


def draw_expected(colours: Colours) -> Figure:
    """Plot the expected tokens per target pass against per-position acceptance, for chains of several depths."""
    figure, axes = plot(210, "Tokens per target pass", "plotted against per-position acceptance", colours)
    for depth, role in zip(explained.DEPTHS, ("dropped edge", "own edge", "kept edge", "ink"), strict=True):
        values = [expected_tokens(rate, depth) for rate in explained.RATES]
        axes.plot(explained.RATES, values, color=colours[role], linewidth=1.8, label=f"K = {depth}")
        name_curve(axes, 1.015, values[-1], f"{depth}", colours[role])
    axes.set(
        xlim=(0, 1.09),
        ylim=(0, 9.4),
        yticks=range(1, 10, 2),
        xlabel="per-position acceptance (lines: K drafted tokens)",
    )
    return figure


def draw_speedup(colours: Colours) -> Figure:
    """Draw the speed-up against per-position acceptance, for several costs of a drafted token and two depths."""
    figure, axes = plot(
        210, "Speed-up, if all passes cost the same", "c: a drafted token's cost, in target passes", colours
    )
    for cost, role in zip(explained.DRAFT_COSTS, ("ink", "kept edge", "own edge"), strict=True):
        for depth, style in ((4, "-"), (8, (0, (4, 2)))):
            values = [explained.speedup(rate, depth, cost) for rate in explained.RATES]
            label = f"c = {cost:g}" if depth == 4 else None
            axes.plot(explained.RATES, values, color=colours[role], linewidth=1.6, linestyle=style, label=label)
    axes.axhline(1, color=colours["dropped edge"], linewidth=0.8)
    axes.plot([], [], color=colours["muted"], linewidth=1.4, label="K = 4")
    axes.plot([], [], color=colours["muted"], linewidth=1.4, linestyle=(0, (4, 2)), label="K = 8")
    axes.legend(frameon=False, fontsize=8, labelcolor=colours["ink"], loc="upper left")
    axes.set(xlim=(0, 1), ylim=(0, 5.2), yticks=range(6), xlabel="per-position acceptance")
    return figure


def draw_costs(colours: Colours) -> Figure:
    """Draw the measured cost of a target pass by number of new tokens, and for comparison a cost proportional to the
    tokens.
    """
    figure, axes = plot(
        210, "Cost of a target pass, measured", "in passes over one token, 135M parameters on a CPU", colours
    )
    curve = explained.measured_costs()
    axes.plot(list(curve), list(curve.values()), "o-", color=colours["kept edge"], linewidth=1.8, markersize=3.5)
    axes.plot([1, 3], [1, 3], color=colours["dropped edge"], linewidth=1.2, linestyle=(0, (4, 2)))
    name_curve(axes, 3.3, 2.75, "token by token", colours["muted"], weight="normal")
    axes.set(xlim=(0, 33), ylim=(0, 3), xticks=(1, 4, 8, 16, 32), yticks=range(4), xlabel="new tokens in the pass")
    return figure


# --- a tree -----------------------------------------------------------------------------------------------------------

KEPT = (1, 5)
"""Nodes kept in the pictured pass."""


def draw_example_tree(colours: Colours) -> Figure:
    """Draw the example's tree: its numbered nodes, the kept path, and the token that the target writes next."""
    shape, _, _ = explained.example_tree()
    tree = TokenTree.of_list(list(range(len(shape))), shape)
    step = Step((*KEPT, 0), len(KEPT), shape.max_depth, len(shape) - 1, tree=tree, path=KEPT)
    names = [*map(str, range(len(shape))), "t"]
    nodes = place_tree(step, names, EDGE + 22, WIDTH - EDGE - 6)
    depth = -min(node.y for node in nodes)
    height = depth + 96
    figure, pen = card(WIDTH, height, colours)
    heading(
        pen, height, f"A tree of {len(shape) - 1} drafted tokens", "0: the text's last token; t: the target's token"
    )
    placed = [node._replace(y=node.y + height - 56) for node in nodes]
    level = next(node.y for node in placed if node.parent < 0 and node.role != "dropped")
    end = pen.token(EDGE, level, "0", "own", 10.5)
    draw_tree(pen, placed, (EDGE + end, level))
    legend(pen, 14, (("kept", "kept"), ("dropped", "dropped"), ("own", "written by the target")))
    return figure


def draw_mask(colours: Colours) -> Figure:
    """Draw the ancestor mask of the example's tree after the text: column j of row i is filled if i attends to j."""
    shape, _, _ = explained.example_tree()
    mask = shape.ancestor_mask.tolist()
    size, prefix = 17.0, 40.0
    height = size * len(shape) + 76
    figure, pen = card(WIDTH, height, colours)
    heading(pen, height, "The ancestor mask of the tree", "each row reads the filled columns")
    left, top = EDGE + 16, height - 58
    pen.words(left + prefix / 2, top + 11, "text", 8, "muted", ha="center")
    for row in range(len(shape)):
        y = top - size * row - 4
        role = "kept" if row in (0, *KEPT) else "own"
        pen.words(left - 6, y, str(row), 8, ha="right", family="monospace")
        pen.words(left + prefix + size * (row + 0.5), top + 11, str(row), 8, ha="center", family="monospace")
        pen.box(left, y, prefix - 3, size - 3, role, f"{role} edge", linewidth=0.9, radius=2)
        for column, reads in enumerate(mask[row]):
            fill = role if reads else "band"
            edge = f"{role} edge" if reads else "frame"
            pen.box(left + prefix + size * column + 1, y, size - 3, size - 3, fill, edge, linewidth=0.9, radius=2)
    legend(pen, 13, (("kept", "rows of the kept path"), ("own", "other rows")))
    return figure


def draw_cache(colours: Colours) -> Figure:
    """Draw the cache's positions after the text, before and after the commit of the kept path."""
    shape, _, _ = explained.example_tree()
    height, size, prefix = 118.0, 19.0, 42.0
    figure, pen = card(WIDTH, height, colours)
    heading(pen, height, "The cache, before and after the commit", "keys and values of the dropped nodes are gone")
    for y, nodes in ((height - 52, range(len(shape))), (height - 84, (0, *KEPT))):
        pen.box(EDGE, y, prefix, 16, "band", "dropped edge", linewidth=0.9, radius=3)
        pen.words(EDGE + prefix / 2, y - 0.5, "text", 8, "muted", ha="center")
        for place, node in enumerate(nodes):
            role = "kept" if node in (0, *KEPT) else "dropped"
            x = EDGE + prefix + 6 + size * place
            pen.box(x, y, size - 4, 16, role, f"{role} edge", linewidth=0.9, radius=3)
            pen.words(x + size / 2 - 2, y - 0.5, str(node), 8, "muted" if role == "dropped" else "ink", ha="center")
    pen.words(EDGE, 14, "t joins the text and is the next tree's root", 8, "muted")
    return figure


PICTURES: dict[str, Callable[[Colours], Figure]] = {
    **{f"rule-{name}": lambda colours, name=name: draw_rule(name, colours) for name in EXAMPLES},
    "pairs-token": lambda colours: draw_pairs("token", "token rejection of a chain", colours),
    "pairs-block": lambda colours: draw_pairs("block", "block verification of a chain", colours),
    "expected": draw_expected,
    "speedup": draw_speedup,
    "costs": draw_costs,
    "tree": draw_example_tree,
    "mask": draw_mask,
    "cache": draw_cache,
}
"""Maps names of pictures in docs/explanation to functions that draw them in the colours of one scheme."""
