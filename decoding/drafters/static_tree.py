"""A tree with the same shape at every step, and its cuts to smaller budgets."""

from collections.abc import Sequence
from functools import lru_cache

from decoding.policies import Budget
from decoding.rules.tree import TreeShape


class StaticTree:
    """A tree of ranks and its cuts: to a depth, and to the nodes whose paths use only the best ``width`` ranks.

    A cut never depends on the drafted tokens.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        """Take ``paths`` of ranks as `TreeShape.from_paths` does; ValueError if there are none."""
        shape, ranks = TreeShape.from_paths(paths)
        if shape.max_depth < 1:
            raise ValueError("the tree is empty: give it at least the path [0]")
        self._shape = shape
        self._ranks = (0, *ranks)
        widest = [0]  # the largest rank on the path to each node
        for node, parent in enumerate(shape.parents[1:], start=1):
            widest.append(max(widest[parent], self._ranks[node]))
        self._widest = tuple(widest)
        self._cuts = lru_cache(maxsize=None)(self._cut)
        self.budgets = self._sizes()

    def cut(self, depth: int, nodes: int) -> tuple[TreeShape, tuple[int, ...]]:
        """Return the widest cut within the bounds, and each drafted node's rank among its parent's best tokens."""
        return self._cuts(min(depth, self._shape.max_depth), min(nodes, len(self._shape)))

    @property
    def ranks(self) -> int:
        """Number of a node's best tokens that the tree may hold."""
        return max(self._ranks) + 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return self._shape.max_depth

    def _sizes(self) -> tuple[Budget, ...]:
        """List the budgets: all ranks and rank 0 alone, each to every depth, and 1, 2, 4, ... ranks to full depth."""
        deepest, widths = self._shape.max_depth, [1]
        while 2 * widths[-1] <= max(self._ranks):
            widths.append(2 * widths[-1])
        cuts = [self._nodes(depth, width) for depth in range(1, deepest + 1) for width in (1, max(self._ranks) + 1)]
        cuts += [self._nodes(deepest, width) for width in widths]
        # By size: a deeper draft costs one more head, a larger one a wider target pass.
        sizes = {(len(nodes), max(self._shape.depths[node] for node in nodes)) for nodes in cuts}
        return tuple(Budget(depth, nodes) for nodes, depth in sorted(sizes) if nodes > 1)

    def _nodes(self, depth: int, width: int) -> tuple[int, ...]:
        return tuple(node for node in self._shape.nodes_up_to(depth) if self._widest[node] < width)

    def _cut(self, depth: int, nodes: int) -> tuple[TreeShape, tuple[int, ...]]:
        fitting = [cut for width in range(1, max(self._ranks) + 2) if len(cut := self._nodes(depth, width)) <= nodes]
        kept = fitting[-1] if fitting else self._nodes(depth, 1)[: max(nodes, 1)]
        return self._shape.keep(kept), tuple(self._ranks[node] for node in kept[1:])
