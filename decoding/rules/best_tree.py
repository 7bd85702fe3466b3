"""The tree that is expected to have the most accepted tokens, built from measured acceptance."""

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

from decoding.errors import UserError

FITTED_RANKS = 10
"""`best_tree` receives the accuracies of this many best tokens of each head or DSpark slot."""

Paths = tuple[tuple[int, ...], ...]
"""A tree as paths of child ranks; shorter paths come first."""


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the ``nodes`` tree paths that are most likely to be accepted, shorter paths first. Paths that were never
    accepted are left out.

    ``accuracies[d][r]`` is the share of steps in which the rank-r token (from 0) of head d (from 0) was right. Heads
    are treated as independent, so the probability of a path is the product of the shares along it. This product never
    rises from parent to child or from one rank to the next, so taking the likeliest paths from a heap builds the
    optimal tree (Medusa, 2401.10774, section 2.3.3). Raises UserError if there are no nodes or no heads.
    """
    # The share of a rank is capped at the share of the previous rank, which only a small sample can exceed.
    shares = [list(accumulate(head, min)) for head in accuracies]
    if not shares or not shares[0] or nodes < 1:
        raise UserError(f"got {nodes} nodes and the accuracies {list(shares)}: use at least one node and one head")
    heap: list[tuple[float, tuple[int, ...]]] = [(-shares[0][0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < nodes:
        negated, path = heapq.heappop(heap)
        chosen.append(path)
        depth, rank = len(path) - 1, path[-1]
        parent = -negated / shares[depth][rank] if shares[depth][rank] > 0 else 0.0
        if rank + 1 < len(shares[depth]) and shares[depth][rank + 1] > 0:
            heapq.heappush(heap, (-parent * shares[depth][rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(shares) and shares[depth + 1][0] > 0:
            heapq.heappush(heap, (negated * shares[depth + 1][0], (*path, 0)))
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def expected_accepted(tree: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]) -> float:
    """Return the expected number of accepted tokens: the sum over all nodes of the product of shares along the path.

    This is F(T). The root is not counted, because the target writes the root's token.
    """
    return sum((math.prod(shares[depth][rank] for depth, rank in enumerate(path)) for path in tree), 0.0)
