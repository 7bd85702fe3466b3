"""Growth of trees, depth by depth: every node's children come from a distribution of their own."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.drafters.base import DraftRequest
from decoding.drafters.static_tree import StaticTree
from decoding.model.markov import MarkovBias
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.tree import TokenTree, TreeShape


class PathLogits(Protocol):
    """Logits at every node of the trees of one step: a function of a node's row and of the tokens on its path."""

    def logits(self, rows: Int[Tensor, " nodes"], paths: Int[Tensor, "nodes tokens"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of the token after each path, over the target's vocabulary.

        ``rows``: the row of each node's text in the batch. ``paths``: the tokens from the root to the node, both
        included; all nodes of a call have the same depth. The logits may be on another device than the paths.
        """


@dataclass(frozen=True)
class ConditionalLogits:
    """Logits that were computed for all depths at once, with a bias by the token before.

    ``base[d - 1]`` predicts the nodes at depth d (from 1) of every row. ``bias`` None: they are conditional on nothing.
    ``finish`` maps them to the target's vocabulary; None if they are over it already.
    """

    base: Float[Tensor, "depths rows outputs"]
    bias: MarkovBias | None = None
    finish: Callable[[Float[Tensor, "nodes outputs"]], Float[Tensor, "nodes vocab"]] | None = None

    def logits(self, rows: Int[Tensor, " nodes"], paths: Int[Tensor, "nodes tokens"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits after each path: one product of the bias for all nodes of the call."""
        logits = self.base[paths.shape[1] - 1][rows.to(self.base.device)]
        if self.bias is not None:
            # A token that only the target knows is read as the last one known: q is poorer, but any q is lossless.
            known = paths[:, -1].clamp(max=self.bias.embedding.num_embeddings - 1)
            logits = self.bias.added_to(logits, known)
        return logits if self.finish is None else self.finish(logits)


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that have children, in all trees of a batch; node numbers run on from tree to tree."""

    rows: Int[Tensor, " parents"]
    paths: Int[Tensor, "parents depth"]
    """Nodes from the root to each parent, both included."""
    children: Int[Tensor, " children"]
    child_parents: Int[Tensor, " children"]
    """Index in ``paths`` of each child's parent."""
    child_ranks: Int[Tensor, " children"]
    width: int
    """Number of a parent's best tokens that some tree holds."""


@dataclass(frozen=True)
class _Plan:
    """A plan for the trees of a batch, from their shapes alone: the nodes to run, and the place of each token."""

    shapes: tuple[TreeShape, ...]
    roots: Int[Tensor, " rows"]
    levels: tuple[_Level, ...]

    @staticmethod
    def of_trees(trees: tuple[tuple[TreeShape, tuple[int, ...]], ...], device: torch.device) -> "_Plan":
        """Plan the ``trees``: each is a shape, and every drafted node's rank among its parent's best tokens."""
        shapes = tuple(shape for shape, _ in trees)
        first = [0]
        for shape in shapes:
            first.append(first[-1] + len(shape))
        levels = [_level(trees, first, depth, device) for depth in range(max(shape.max_depth for shape in shapes))]
        return _Plan(shapes, torch.tensor(first[:-1], device=device), tuple(levels))


def _level(
    trees: Sequence[tuple[TreeShape, Sequence[int]]], first: Sequence[int], depth: int, device: torch.device
) -> _Level:
    """Collect the parents at one depth and their children; ``first`` holds the number of each tree's root."""
    rows: list[int] = []
    paths: list[list[int]] = []
    children: list[int] = []
    child_parents: list[int] = []
    child_ranks: list[int] = []
    for row, (shape, ranks) in enumerate(trees):
        for parent, of_parent in enumerate(shape.children):
            if shape.depths[parent] != depth or not of_parent:
                continue
            children += [first[row] + child for child in of_parent]
            child_parents += [len(paths)] * len(of_parent)
            child_ranks += [ranks[child - 1] for child in of_parent]
            rows.append(row)
            paths.append([first[row] + node for node in (0, *shape.path(parent))])
    return _Level(
        rows=torch.tensor(rows, device=device),
        paths=torch.tensor(paths, device=device),
        children=torch.tensor(children, device=device),
        child_parents=torch.tensor(child_parents, device=device),
        child_ranks=torch.tensor(child_ranks, device=device),
        width=max(child_ranks) + 1,
    )


class StaticGrowth:
    """Growth to a fixed shape: a node's child of rank r holds the r-th best token (from 0) after its path."""

    def __init__(self, tree: StaticTree) -> None:
        self._tree = tree
        self._plan = lru_cache(maxsize=64)(_Plan.of_trees)

    def propose(self, requests: Sequence[DraftRequest], paths: PathLogits) -> list[Proposal]:
        """Draft with one call of ``paths`` per depth, for the parents of all trees, without a transfer to the host."""
        device = requests[0].hidden.device
        plan = self._plan(tuple(self._tree.cut(request.max_depth, request.max_nodes) for request in requests), device)
        roots = torch.tensor([request.tokens[-1] for request in requests]).to(device, non_blocking=True)
        sizes = [len(shape) for shape in plan.shapes]
        tokens = roots.new_zeros(sum(sizes))
        tokens[plan.roots] = roots
        for level in plan.levels:
            best = paths.logits(level.rows, tokens[level.paths]).topk(level.width).indices.to(device)
            tokens[level.children] = best[level.child_parents, level.child_ranks]
        trees = [TokenTree(of_row, shape) for of_row, shape in zip(tokens.split(sizes), plan.shapes, strict=True)]
        return [Proposal(tree, ProposalKind.DETERMINISTIC) for tree in trees]


class DynamicGrowth:
    """Growth to the likeliest tree at this position: the nodes with the largest products of probabilities.

    No other tree of this size has a larger sum: each depth runs every node that can still have a child among the best.
    """

    def __init__(self, largest: Budget) -> None:
        self._largest = largest

    def _bounds(self, request: DraftRequest) -> Budget:
        nodes = max(1, min(self._largest.nodes, request.max_nodes))
        return Budget(min(self._largest.depth, request.max_depth, nodes - 1), nodes)

    def propose(self, requests: Sequence[DraftRequest], paths: PathLogits) -> list[Proposal]:
        """Draft with one call of ``paths`` per depth, for all trees, and one transfer to the host after each."""
        device = requests[0].hidden.device
        trees = [_GrowingTree(request.tokens[-1], self._bounds(request)) for request in requests]
        ranks = self._largest.nodes - 1
        while any(tree.level for tree in trees):
            rows = [row for row, tree in enumerate(trees) for _ in tree.level]
            texts = [tree.tokens_to(path) for tree in trees for path in tree.level]
            logits = paths.logits(torch.tensor(rows, device=device), torch.tensor(texts, device=device)).float()
            children = iter(_best_children(logits, ranks))
            for tree in trees:
                tree.grow(list(islice(children, len(tree.level))))
        return [Proposal(tree.best(device), ProposalKind.DETERMINISTIC) for tree in trees]


def _best_children(logits: Float[Tensor, "nodes vocab"], ranks: int) -> list[list[tuple[int, float]]]:
    """Return token and probability of each node's best children, best first."""
    best, tokens = logits.topk(min(ranks, logits.shape[-1]))
    shares = (best - logits.logsumexp(-1, keepdim=True)).exp()
    # fp32 holds every id below 2^24, so ids and shares come to the host in one transfer.
    token_lists, share_lists = torch.stack([tokens.float(), shares]).tolist()
    return [
        [(int(token), min(share, 1.0)) for token, share in zip(*node, strict=True) if share > 0]
        for node in zip(token_lists, share_lists, strict=True)
    ]


class _GrowingTree:
    """A row's tree under construction. Its nodes are paths of ranks: () is the root, rank 0 the best child."""

    def __init__(self, root: int, bounds: Budget) -> None:
        self._bounds = bounds
        self._tokens: dict[tuple[int, ...], int] = {(): root}
        self._shares: dict[tuple[int, ...], float] = {(): 1.0}
        self._depth = 0
        self.level: list[tuple[int, ...]] = [()] if bounds.depth > 0 else []
        """Nodes to run next."""

    def tokens_to(self, path: tuple[int, ...]) -> list[int]:
        """Return the tokens from the root to a node."""
        return [self._tokens[path[:length]] for length in range(len(path) + 1)]

    def grow(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Give each node of the level its children, tokens with probabilities, and choose the next level."""
        for path, of_path in zip(self.level, children, strict=True):
            for rank, (token, share) in enumerate(of_path):
                self._tokens[*path, rank] = token
                self._shares[*path, rank] = self._shares[path] * share
        self._depth += 1
        # Products never rise along a path: a node outside the best cannot get a child among them.
        fresh = [path for path in self._best() if len(path) == self._depth]
        self.level = fresh if self._depth < self._bounds.depth else []

    def _best(self) -> list[tuple[int, ...]]:
        """Return the best nodes so far; among equals the one met first, so parents come before children."""
        return heapq.nlargest(self._bounds.nodes, self._shares, key=self._shares.__getitem__)

    def best(self, device: torch.device) -> TokenTree:
        """Return the tree to propose."""
        shape, ranks = TreeShape.from_paths(self._best())
        paths = [tuple(ranks[node - 1] for node in shape.path(last)) for last in range(len(shape))]
        return TokenTree.of_list([self._tokens[path] for path in paths], shape, device)
