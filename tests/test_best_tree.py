"""The best tree for measured shares, compared with all possible trees."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.rules.best_tree import best_tree

Path = tuple[int, ...]


def value(tree: Sequence[Path], accuracies: Sequence[Sequence[float]]) -> float:
    """Return the mean number of accepted drafted tokens: the sum over nodes of the product of the shares along the
    path.
    """
    total = 0.0
    for path in tree:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= accuracies[depth][rank]
        total += product
    return total


def all_trees(ranks: Sequence[int], nodes: int) -> set[frozenset[Path]]:
    """Return every prefix-closed set of ``nodes`` paths, if head d offers ``ranks[d]`` ranks."""
    trees: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in ((), *tree)
            if len(parent) < len(ranks)
            for rank in range(ranks[len(parent)])
            if (*parent, rank) not in tree
        }
    return trees


def is_prefix_closed(tree: Sequence[Path]) -> bool:
    return all(len(path) == 1 or path[:-1] in tree for path in tree)


def falling(heads: int, ranks: int) -> st.SearchStrategy[list[list[float]]]:
    head = st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks)
    return st.lists(head.map(lambda shares: sorted(shares, reverse=True)), min_size=heads, max_size=heads)


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_the_best_tree_accepts_as_much_as_the_best_of_all_trees(heads: int, ranks: int, nodes: int) -> None:
    trees = all_trees([ranks] * heads, nodes)

    @given(falling(heads, ranks))
    def check(accuracies: list[list[float]]) -> None:
        tree = best_tree(accuracies, nodes)
        assert len(set(tree)) == nodes and is_prefix_closed(tree)
        most = max(value(tuple(other), accuracies) for other in trees)
        assert value(tree, accuracies) == pytest.approx(most, abs=1e-12)

    check()


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 30))
def test_a_tree_is_prefix_closed_without_gaps_in_rank_whatever_the_shares(
    accuracies: list[list[float]], nodes: int
) -> None:
    tree = best_tree(accuracies, nodes)
    assert 1 <= len(tree) <= nodes and len(set(tree)) == len(tree) and is_prefix_closed(tree)
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree for path in tree)


def test_a_rank_counted_more_often_than_the_one_before_it_is_capped_by_it() -> None:
    """In a small sample rank 1 is better than rank 0. Both then count .2, and the tree has no gaps."""
    assert best_tree([[0.2, 0.5, 0.4], [0.1]], 3) == ((0,), (1,), (2,))
    assert best_tree([[0.2, 0.5, 0.4], [0.9]], 4) == best_tree([[0.2, 0.2, 0.2], [0.9]], 4)


def test_paths_that_are_never_right_are_left_out() -> None:
    assert best_tree([[0.5, 0.0], [0.5, 0.0]], 10) == ((0,), (0, 0))
    assert best_tree([[0.0, 0.0]], 10) == ((0,),)  # a tree has at least one node
