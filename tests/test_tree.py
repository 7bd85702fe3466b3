"""Token trees: shapes, masks and paths."""

import pytest
import torch

from decoding.rules.tree import TokenTree, TreeShape

# Root 0 -> {1, 2}, 1 -> {3}, 2 -> {4, 5}, 5 -> {6}
SHAPE = TreeShape((-1, 0, 0, 1, 2, 2, 5))


def test_a_shape_knows_its_depths_children_and_paths() -> None:
    assert SHAPE.depths == (0, 1, 1, 2, 2, 2, 3)
    assert SHAPE.depth_tensor.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert SHAPE.max_depth == 3
    assert SHAPE.children == ((1, 2), (3,), (4, 5), (), (), (6,), ())
    assert SHAPE.path(6) == (2, 5, 6)
    assert SHAPE.path(0) == ()
    assert len(SHAPE) == 7 and not SHAPE.is_chain


def test_a_node_attends_to_itself_and_its_ancestors_only() -> None:
    assert SHAPE.ancestor_mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 2), (-1, -1), (-1, 0, 3, 0)])
def test_a_parent_that_does_not_come_first_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parent"):
        TreeShape(parents)


def test_paths_of_ranks_become_nodes_by_depth_with_the_best_sibling_first() -> None:
    shape, ranks = TreeShape.from_paths([[1], [0, 2], [0], [0, 0], [1, 0], [0, 0, 0]])
    #  nodes: 1 = (0), 2 = (1), 3 = (0, 0), 4 = (0, 2), 5 = (1, 0), 6 = (0, 0, 0)
    assert shape.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert ranks == (0, 1, 0, 2, 0, 0)


def test_a_path_without_its_parent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tree path \[0, 1\] lacks its parent: add \[0\]"):
        TreeShape.from_paths([[1], [0, 1]])


def test_following_a_text_stops_where_the_tree_does_not_have_it() -> None:
    tree = TokenTree(torch.tensor([9, 1, 2, 3, 4, 5, 6]), SHAPE)
    assert tree.follow([2, 5, 6, 7]) == (2, 5, 6)
    assert tree.follow([2, 4]) == (2, 4)
    assert tree.follow([2, 3]) == (2,)
    assert tree.follow([7]) == () and tree.follow([]) == ()
