"""The picture of the loop: the tree it draws is the one that was verified, in the colours of either scheme."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from decoding.generate import Step
from decoding.rules.tree import TokenTree, TreeShape

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))  # where the two scripts stand
picture, decode = import_module("loop_picture"), import_module("draw_loop")

# The root 7 has the children 1 and 2; 2 has the child 3. The step kept 2 and 3, and the target wrote 9.
TREE = TokenTree.of_list([7, 1, 2, 3], TreeShape((-1, 0, 0, 2)))
STEP = Step((2, 3, 9), 2, 2, 3, tree=TREE, path=(2, 3))
PREFILL = Step((7,), 0, 0, 0, is_prefill=True)


def test_kept_nodes_stand_in_line_with_the_targets_own_token_and_dropped_ones_beside_it() -> None:
    nodes = picture.place_tree(STEP, ["7", "1", "2", "3", "9"], 0.0, 400.0)
    assert [(node.text, node.role, node.parent) for node in nodes] == [
        ("1", "dropped", -1),
        ("2", "kept", -1),
        ("3", "kept", 1),
        ("9", "own", 2),
    ]
    assert nodes[0].y == 0 and [node.y for node in nodes[1:]] == [-picture.LEAF] * 3
    assert nodes[0].x == nodes[1].x < nodes[2].x < nodes[3].x


def test_the_step_with_the_most_kept_letters_is_drawn_and_a_step_that_dropped_nothing_never() -> None:
    chain = TokenTree.chain([7, 2])
    whole = Step((2, 9), 1, 1, 1, tree=chain, path=(1,))
    assert decode.chosen([PREFILL, whole, STEP], [["a"], ["kept", "b"], ["c", "d", "e"]]) == 2
    assert decode.chosen([PREFILL, STEP, STEP], [["a"], ["c", "d", "e"], ["cost", "of", "e"]]) == 2
    with pytest.raises(ValueError, match="give another prompt"):
        decode.chosen([PREFILL, whole], [["a"], ["kept", "b"]])
