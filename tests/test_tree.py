"""Token trees: topology, masks, paths."""

from collections.abc import Sequence

import pytest
import torch
from jaxtyping import TypeCheckError
from pydantic import ValidationError

from decoding.rules.tree import MOST_NODES, TokenTree, TreeShape, common_length, fetch_tokens
from trainer.recipe.heads import HeadsSection

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
    with pytest.raises(ValueError, match=r"tree path \[0, 1\] has no parent: add \[0\]"):
        TreeShape.from_paths([[1], [0, 1]])


def test_following_a_text_stops_where_the_tree_does_not_have_it() -> None:
    tree = TokenTree(torch.tensor([9, 1, 2, 3, 4, 5, 6]), SHAPE)
    assert tree.follow([2, 5, 6, 7]) == (2, 5, 6)
    assert tree.follow([2, 4]) == (2, 4)
    assert tree.follow([2, 3]) == (2,)
    assert tree.follow([7]) == () and tree.follow([]) == ()


def test_a_tree_whose_tokens_the_host_knows_costs_no_transfer() -> None:
    shape = TreeShape((-1, 0, 0))
    known, unknown = TokenTree.of_list([4, 5, 6], shape), TokenTree(torch.tensor([4, 5, 6]), shape)
    assert known.on_host and known.tokens.tolist() == [4, 5, 6] and known.shape is shape
    assert not unknown.on_host
    assert fetch_tokens([known, unknown], [torch.tensor([7, 8])]) == [[7, 8]]
    assert unknown.on_host and known.token_list == unknown.token_list == [4, 5, 6]


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 4, 5], (1, 2, 3, 5), 2), ([3], [1], 0)],
)
def test_how_many_tokens_two_texts_begin_with_in_common(
    first: Sequence[int], second: Sequence[int], length: int
) -> None:
    assert common_length(first, second) == common_length(second, first) == length


def test_the_shape_annotations_are_enforced_here() -> None:
    with pytest.raises(TypeCheckError):
        TokenTree(torch.tensor([[1, 2]]), TreeShape.chain(1))
    with pytest.raises(TypeCheckError):
        TokenTree(torch.tensor([1.0, 2.0]), TreeShape.chain(1))


def test_a_recipe_asks_for_no_more_nodes_than_a_file_may_hold() -> None:
    assert HeadsSection(tree_nodes=MOST_NODES).tree_nodes == MOST_NODES
    with pytest.raises(ValidationError, match=f"less than or equal to {MOST_NODES}"):
        HeadsSection(tree_nodes=MOST_NODES + 1)
