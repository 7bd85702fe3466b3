"""The drawing of one step's candidate tree as inline SVG: root, kept path, dropped nodes, and the target's own token.

Colours are classes of the page's style sheet, which follows its light or dark scheme.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from decoding.generate import Step
from decoding.rules.tree import TokenTree

_LETTER = 7.25  # width of a letter of 12 pixels in a monospaced font
_PAD, _GAP, _HEIGHT, _ROW, _EDGE = 9, 30, 24, 31, 8
_LONGEST = 16  # letters of a label
_SPACES = 2  # spaces in a row that are drawn one by one


@dataclass(frozen=True)
class _Node:
    """A drawn token. ``kind`` is its class: root, kept, dropped or written; ``depth`` its column."""

    token: str
    kind: str
    parent: int
    depth: int


def label_of(text: str) -> str:
    """Return a token's text with its white space as signs, cut to a length that a node can hold."""
    label, spaces = "", 0
    for letter in f"{text}\0":
        if letter == " ":
            spaces += 1
            continue
        label += "·" * spaces if spaces <= _SPACES else f"·×{spaces}"
        spaces = 0
        if letter != "\0":
            label += {"\n": "↵", "\t": "⇥"}.get(letter) or (letter if letter.isprintable() else repr(letter)[1:-1])
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def draw_tree(tree: TokenTree, path: Sequence[int], written: int | None, text_of: Callable[[int], str]) -> str:
    """Return the tree as SVG, its root on the left, each node's children in the order in which they were drafted.

    ``path``: the accepted nodes; ``written``: the token that the target wrote after them, None if the text ended
    before; ``text_of``: the text of a token.
    """
    nodes = _nodes(tree, path, written, text_of)
    rows = _rows(nodes)
    lefts, width = _columns(nodes)
    height = (max(rows) + 1) * _ROW + 2 * _EDGE - (_ROW - _HEIGHT)
    middle = [_EDGE + row * _ROW + _HEIGHT / 2 for row in rows]
    edges, boxes = [], []
    for place, node in enumerate(nodes):
        label = label_of(node.token)
        left, wide = lefts[node.depth], _width(label)
        if place:
            start = lefts[nodes[node.parent].depth] + _width(label_of(nodes[node.parent].token))
            edges.append((node.kind == "kept", _edge(start, middle[node.parent], left, middle[place], node.kind)))
        boxes.append(
            f'<g class="node {node.kind}"><title>{escape(f"{node.token!r}, {_TOLD[node.kind]}")}</title>'
            f'<rect x="{left:g}" y="{middle[place] - _HEIGHT / 2:g}" width="{wide:g}" height="{_HEIGHT}" rx="6"/>'
            f'<text x="{left + wide / 2:g}" y="{middle[place] + 4:g}">{escape(label)}</text></g>'
        )
    drawn = "".join(edge for _, edge in sorted(edges, key=lambda pair: pair[0]))  # kept edges lie above the others
    told = f"candidate tree of {len(tree) - 1} drafted tokens, {len(path)} of them accepted"
    return (
        f'<svg class="tree" role="img" aria-label="{told}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">{drawn}{"".join(boxes)}</svg>'
    )


_TOLD = {
    "root": "the last token of the text",
    "kept": "drafted and accepted",
    "dropped": "drafted and dropped",
    "written": "written by the target",
}


def tree_of(step: Step, text_of: Callable[[int], str]) -> str | None:
    """Return the drawing of a step's tree; None where nothing was drafted."""
    if step.tree is None:
        return None
    written = step.tokens[step.accepted] if len(step.tokens) > step.accepted else None
    return draw_tree(step.tree, step.path, written, text_of)


def _nodes(tree: TokenTree, path: Sequence[int], written: int | None, text_of: Callable[[int], str]) -> list[_Node]:
    """Return the tree's nodes in its order, and the target's own token behind them."""
    kept = set(path)
    nodes = [
        _Node(text_of(token), "root" if parent < 0 else "kept" if place in kept else "dropped", parent, depth)
        for place, (token, parent, depth) in enumerate(
            zip(tree.token_list, tree.shape.parents, tree.shape.depths, strict=True)
        )
    ]
    if written is not None:
        parent = path[-1] if path else 0
        nodes.append(_Node(text_of(written), "written", parent, nodes[parent].depth + 1))
    return nodes


def _rows(nodes: Sequence[_Node]) -> list[float]:
    """Return each node's row: leaves one below the other, a parent half-way between its first and last child."""
    children: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes[1:], start=1):
        children[node.parent].append(place)
    order, waiting = [], [0]
    while waiting:  # depth first, without recursion: a chain may be long
        order.append(place := waiting.pop())
        waiting += reversed(children[place])
    rows, leaves = [0.0] * len(nodes), 0
    for place in order:
        if not children[place]:
            rows[place] = leaves
            leaves += 1
    for place in reversed(order):
        if below := children[place]:
            rows[place] = (rows[below[0]] + rows[below[-1]]) / 2
    return rows


def _columns(nodes: Sequence[_Node]) -> tuple[list[float], float]:
    """Return the left edge of each depth's column, wide enough for its longest label, and the width of all."""
    widest = [0.0] * (1 + max(node.depth for node in nodes))
    for node in nodes:
        widest[node.depth] = max(widest[node.depth], _width(label_of(node.token)))
    lefts, left = [], float(_EDGE)
    for wide in widest:
        lefts.append(left)
        left += wide + _GAP
    return lefts, left - _GAP + _EDGE


def _width(label: str) -> float:
    return max(1, len(label)) * _LETTER + 2 * _PAD


def _edge(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    bend = min(_GAP, to_x - x) / 2
    turn = to_x - 2 * bend  # straight to the column's gap, so that no edge crosses a box of its own column
    return (
        f'<path class="edge {kind}" d="M{x:g} {y:g}H{turn:g}'
        f'C{turn + bend:g} {y:g} {turn + bend:g} {to_y:g} {to_x:g} {to_y:g}"/>'
    )
