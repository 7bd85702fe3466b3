"""The best tree for measured acceptance."""

import heapq
from collections.abc import Sequence

FITTED_RANKS = 10
"""Number of best tokens of a head, or of a DSpark draft's slot, whose accuracies `best_tree` is given."""

Paths = tuple[tuple[int, ...], ...]
"""A tree as paths of child ranks, shorter paths first."""


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the ``nodes`` tree paths most likely to be accepted, shorter paths first; fewer if the others never are.

    ``accuracies[d][r]`` is the share of steps in which the rank-r token (from 0) of head d (from 0) was right. Heads
    count as independent, so the probability of a path is the product of the shares along it. That product never rises
    from parent to child, nor from one rank to the next; the most probable paths, popped from a heap, therefore form
    the optimal tree (Medusa, 2401.10774, section 2.3.3). ValueError without a node or a head.
    """
    shares = [list(_non_increasing(head)) for head in accuracies]
    if not shares or not shares[0] or nodes < 1:
        raise ValueError(f"a tree needs at least one node and one head's accuracies; got {nodes} and {list(shares)}")
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
    """Return the expected accepted tokens of a tree: the sum over its nodes of the product of shares along the path.

    F(T) without the root, whose token the target itself writes.
    """
    total = 0.0
    for path in tree:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= shares[depth][rank]
        total += product
    return total


def _non_increasing(shares: Sequence[float]) -> list[float]:
    """Cap each rank's share at that of the rank before it, which only a small sample exceeds."""
    capped: list[float] = []
    for share in shares:
        capped.append(min(share, capped[-1]) if capped else share)
    return capped
