"""The drawing of a candidate tree: a box for each node, the kept path lit, all text escaped."""

import re
from xml.etree import ElementTree

import pytest

from decoding.generate import Step
from decoding.rules.tree import TokenTree, TreeShape
from trainer.demo.tree import draw_tree, label_of, tree_of

WORDS = {1: "root", 2: "the", 3: " a", 4: "cat", 5: "dog", 6: "sat", 7: "<script>alert(1)</script>"}
#        1 ── 2 ── 4 ── 6
#        │    └─── 5
#        └─── 3
TREE = TokenTree.of_list([1, 2, 3, 4, 5, 6], TreeShape((-1, 0, 0, 1, 1, 3)))
SVG = "{http://www.w3.org/2000/svg}"


def drawn(tree: TokenTree, path: tuple[int, ...], written: int | None) -> ElementTree.Element:
    svg = draw_tree(tree, path, written, WORDS.__getitem__)
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def nodes(svg: ElementTree.Element) -> dict[str, list[str]]:
    """The labels of the nodes, by their class, in the order of the tree."""
    found: dict[str, list[str]] = {"root": [], "kept": [], "dropped": [], "written": []}
    for group in svg.iter(f"{SVG}g"):
        found[group.attrib["class"].removeprefix("node ")].append(group.findtext(f"{SVG}text") or "")
    return found


def boxes(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    rects = [rect.attrib for rect in svg.iter(f"{SVG}rect")]
    return [tuple(float(rect[side]) for side in ("x", "y", "width", "height")) for rect in rects]  # type: ignore[misc]


def test_every_node_is_drawn_once_and_the_kept_path_is_lit() -> None:
    svg = drawn(TREE, (1, 3), written=5)
    assert nodes(svg) == {"root": ["root"], "kept": ["the", "cat"], "dropped": ["·a", "dog", "sat"], "written": ["dog"]}
    edges = [edge.attrib["class"] for edge in svg.iter(f"{SVG}path")]
    assert len(edges) == len(TREE) and edges.count("edge kept") == 2 and edges.count("edge written") == 1
    assert edges[-2:] == ["edge kept", "edge kept"], "above the others"
    assert svg.attrib["aria-label"] == "candidate tree of 5 drafted tokens, 2 of them accepted"


@pytest.mark.parametrize(("path", "written"), [((), 7), ((1, 3, 5), None), ((2,), 2)])
def test_the_targets_token_follows_the_last_kept_node_where_there_is_one(
    path: tuple[int, ...], written: int | None
) -> None:
    svg = drawn(TREE, path, written)
    assert len(nodes(svg)["kept"]) == len(path) and len(nodes(svg)["written"]) == (written is not None)
    if written is not None:
        parent, own = boxes(svg)[path[-1] if path else 0], boxes(svg)[-1]
        assert own[0] > parent[0] + parent[2], "to the right of its parent"


def test_boxes_do_not_overlap_and_lie_inside_the_picture() -> None:
    svg = drawn(TREE, (1,), written=7)
    found, width, height = boxes(svg), float(svg.attrib["width"]), float(svg.attrib["height"])
    assert len(found) == len(TREE) + 1
    for place, (x, y, wide, high) in enumerate(found):
        assert x >= 0 and y >= 0 and x + wide <= width and y + high <= height
        for left, top, other, tall in found[place + 1 :]:
            assert x + wide < left or left + other < x or y + high < top or top + tall < y
    for node, parent in enumerate(TREE.shape.parents[1:], start=1):
        assert found[node][0] > found[parent][0] + found[parent][2], "children stand to the right of their parent"


def test_children_stand_in_draft_order_from_the_top() -> None:
    tops = [top for _, top, *_ in boxes(drawn(TREE, (), None))]
    assert tops[1] < tops[2] and tops[3] < tops[4]


def test_a_models_text_is_never_markup() -> None:
    svg = draw_tree(TokenTree.of_list([1, 7], TreeShape((-1, 0))), (1,), 7, WORDS.__getitem__)
    assert "<script" not in svg and svg.count("&lt;script&gt;") == 4, "in two labels and two titles"
    assert re.search(r"<title>'&lt;script|<title>&#x27;&lt;script", svg)


def test_a_long_chain_is_drawn_without_recursion() -> None:
    svg = draw_tree(TokenTree.chain([1] * 2000), (1,), None, WORDS.__getitem__)
    assert svg.count('class="node') == 2000


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("cat", "cat"),
        (" cat", "·cat"),
        ("  ", "··"),
        ("        x", "·×8x"),
        ("\n\n    ", "↵↵·×4"),
        ("\tif", "⇥if"),
        ("\x1b[0m", "\\x1b[0m"),
        ("", ""),
        ("x" * 40, "x" * 15 + "…"),
    ],
)
def test_white_space_and_control_characters_have_signs(text: str, label: str) -> None:
    assert label_of(text) == label


def test_a_step_without_a_draft_has_no_drawing() -> None:
    assert tree_of(Step((4,), 0, 0, 0), WORDS.__getitem__) is None
    ended = Step((2, 4), 2, 2, 5, tree=TREE, path=(1, 3))
    assert 'class="node written"' not in (tree_of(ended, WORDS.__getitem__) or ""), "the text ended in the draft"
    went_on = ended._replace(tokens=(2, 4, 5))
    assert 'class="node written"' in (tree_of(went_on, WORDS.__getitem__) or "")
