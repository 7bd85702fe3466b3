"""The best tree for measured acceptance: from a heap, or by a dynamic program where shares may grow with the rank."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

FITTED_RANKS = 10
"""Number of best tokens of a head, or of a parallel draft's position, whose accuracies `best_tree` is given."""

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
    _check(shares, nodes)
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


def ordered_tree(shares: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the tree of at most ``nodes`` paths with the most expected tokens, where a child needs those before it.

    ``shares[d][b]`` is the probability that child b (from 0) of a reached node at depth d (from 0) is the accepted one.
    It may grow with b: drawn children are tried in the order of their draws, so that a later one cannot stand without
    the earlier ones, whatever they are worth (Sequoia, 2402.12374, section 3.1, with shares by depth). Paths that add
    nothing are left out. Takes O(depths * ranks * nodes^2). ValueError without a node or a depth.
    """
    _check(shares, nodes)
    # value[d][b][m]: the most tokens of at most m nodes that are the children b, b + 1, … of a reached node at depth d,
    # and what is below them; taken[d][b][m]: those of the m nodes that child b and its subtree have, 0 without it.
    taken = [[[0] * (nodes + 1) for _ in depth] for depth in shares]
    below = [0.0] * (nodes + 1)
    for depth in reversed(range(len(shares))):
        after = [0.0] * (nodes + 1)
        for rank in reversed(range(len(shares[depth]))):
            own = [0.0] * (nodes + 1)
            for room in range(1, nodes + 1):
                for size in range(1, room + 1):
                    worth = shares[depth][rank] * (1 + below[size - 1]) + after[room - size]
                    if worth > own[room] + 1e-12:  # rounding must not add nodes that are worth nothing
                        own[room], taken[depth][rank][room] = worth, size
            after = own
        below = after
    return tuple(sorted(_unfold(taken, (), nodes), key=lambda path: (len(path), path)))


def _unfold(taken: Sequence[Sequence[Sequence[int]]], parent: tuple[int, ...], room: int) -> list[tuple[int, ...]]:
    """Return the paths of the best at most ``room`` nodes below ``parent``."""
    depth, found = len(parent), []
    for rank in range(len(taken[depth]) if depth < len(taken) else 0):
        size = taken[depth][rank][room]
        if not size:
            break
        path = (*parent, rank)
        found += [path, *_unfold(taken, path, size - 1)]
        room -= size
    return found


def grows(shares: Sequence[Sequence[float]]) -> bool:
    """Return True if any depth's share grows with the rank, so that `ordered_tree` is needed for ordered children."""
    return any(later > earlier for depth in shares for earlier, later in pairwise(depth))


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


def _check(shares: Sequence[Sequence[float]], nodes: int) -> None:
    if not shares or not shares[0] or nodes < 1:
        raise ValueError(f"a tree needs at least one node and one head's accuracies; got {nodes} and {list(shares)}")


def _non_increasing(shares: Sequence[float]) -> list[float]:
    """Cap each rank's share at that of the rank before it, which only a small sample exceeds."""
    capped: list[float] = []
    for share in shares:
        capped.append(min(share, capped[-1]) if capped else share)
    return capped
