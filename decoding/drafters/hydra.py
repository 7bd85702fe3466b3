"""Trees of sequential heads, grown depth by depth: every node has a distribution of its own (Hydra, 2402.05109)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.drafters.base import DraftRequest
from decoding.drafters.static_tree import StaticTree
from decoding.model.heads import MedusaHead, MedusaHeads
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.tree import TokenTree, TreeShape


class SequentialHeads:
    """Heads at work on one target, whose embeddings they read tokens through and whose lm_head they may share."""

    def __init__(self, heads: MedusaHeads, target: nn.Module) -> None:
        embeddings = heads.embeddings_of(target)
        assert embeddings is not None, "these heads read no tokens"
        self._embeddings = embeddings
        self._heads: list[MedusaHead] = list(heads.heads)  # type: ignore[arg-type]  # ModuleList's items
        self._like = next(heads.parameters())
        self._lm_head: nn.Module = target.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr

    def logits(
        self, hidden: Float[Tensor, "nodes hidden"], paths: Int[Tensor, "nodes tokens"]
    ) -> Float[Tensor, "nodes vocab"]:
        """What may follow each path of tokens, the root first, behind the hidden state its root was written from.

        The logits are where the head's layer to the vocabulary lies.
        """
        head = self._heads[paths.shape[1] - 1]
        logits: Tensor = head(hidden.to(self._like), self._lm_head, self._embeddings(paths).to(self._like))
        return logits


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that have children, in all trees of a batch, whose nodes are numbered in one sequence."""

    rows: Int[Tensor, " parents"]
    paths: Int[Tensor, "parents depth"]
    """The nodes from the root to each parent."""
    children: Int[Tensor, " children"]
    child_parents: Int[Tensor, " children"]
    """Of each child, its parent's place in ``paths``."""
    child_ranks: Int[Tensor, " children"]
    width: int
    """How many of a parent's best tokens stand in some tree."""


@dataclass(frozen=True)
class _Plan:
    """All that is known of the trees of a batch before there is a token: what to run, and where each token goes."""

    shapes: tuple[TreeShape, ...]
    roots: Int[Tensor, " rows"]
    levels: tuple[_Level, ...]

    @staticmethod
    def of_trees(trees: tuple[tuple[TreeShape, tuple[int, ...]], ...], device: torch.device) -> "_Plan":
        """Each tree is a shape, and every drafted node's rank among its parent's best tokens."""
        shapes = tuple(shape for shape, _ in trees)
        first = [0]
        for shape in shapes:
            first.append(first[-1] + len(shape))
        levels = [_level(trees, first, depth, device) for depth in range(max(shape.max_depth for shape in shapes))]
        return _Plan(shapes, torch.tensor(first[:-1], device=device), tuple(levels))


def _level(
    trees: Sequence[tuple[TreeShape, Sequence[int]]], first: Sequence[int], depth: int, device: torch.device
) -> _Level:
    """The parents at one depth and their children; ``first`` is the number of each tree's root."""
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
    """Trees of a fixed shape: rank r below a node is the head's r-th best token (from 0) behind that node's path."""

    def __init__(self, tree: StaticTree) -> None:
        self._tree = tree
        self._plan = lru_cache(maxsize=64)(_Plan.of_trees)

    def propose(self, requests: Sequence[DraftRequest], heads: SequentialHeads) -> list[Proposal]:
        """One pass of one head per depth, over the parents of all trees, and no transfer to the host."""
        hidden = torch.stack([request.hidden for request in requests])
        plan = self._plan(
            tuple(self._tree.cut(request.max_depth, request.max_nodes) for request in requests), hidden.device
        )
        roots = torch.tensor([request.tokens[-1] for request in requests]).to(hidden.device, non_blocking=True)
        sizes = [len(shape) for shape in plan.shapes]
        tokens = roots.new_zeros(sum(sizes))
        tokens[plan.roots] = roots
        for level in plan.levels:
            best = heads.logits(hidden[level.rows], tokens[level.paths]).topk(level.width).indices.to(tokens.device)
            tokens[level.children] = best[level.child_parents, level.child_ranks]
        trees = [TokenTree(of_row, shape) for of_row, shape in zip(tokens.split(sizes), plan.shapes, strict=True)]
        return [Proposal(tree, ProposalKind.DETERMINISTIC) for tree in trees]


class DynamicGrowth:
    """The likeliest trees at this position: of so many nodes, those with the largest product of probabilities.

    No other tree has a larger sum: a depth runs every node that may still have a child among the best.
    """

    def __init__(self, largest: Budget) -> None:
        self._largest = largest

    def _bounds(self, request: DraftRequest) -> Budget:
        nodes = max(1, min(self._largest.nodes, request.max_nodes))
        return Budget(min(self._largest.depth, request.max_depth, nodes - 1), nodes)

    def propose(self, requests: Sequence[DraftRequest], heads: SequentialHeads) -> list[Proposal]:
        """One pass of one head per depth, over all trees, and a transfer to the host."""
        hidden = torch.stack([request.hidden for request in requests])
        trees = [_GrowingTree(request.tokens[-1], self._bounds(request)) for request in requests]
        ranks = self._largest.nodes - 1
        while any(tree.level for tree in trees):
            rows = [row for row, tree in enumerate(trees) for _ in tree.level]
            paths = [tree.tokens_to(path) for tree in trees for path in tree.level]
            logits = heads.logits(hidden[rows], torch.tensor(paths, device=hidden.device)).float()
            children = iter(_best_children(logits, ranks))
            for tree in trees:
                tree.grow(list(islice(children, len(tree.level))))
        return [Proposal(tree.best(hidden.device), ProposalKind.DETERMINISTIC) for tree in trees]


def _best_children(logits: Float[Tensor, "nodes vocab"], ranks: int) -> list[list[tuple[int, float]]]:
    """Token and probability of each node's best children, best first."""
    best, tokens = logits.topk(min(ranks, logits.shape[-1]))
    shares = (best - logits.logsumexp(-1, keepdim=True)).exp()
    # fp32 holds every id below 2^24, so that both come to the host together.
    token_lists, share_lists = torch.stack([tokens.float(), shares]).tolist()
    return [
        [(int(token), min(share, 1.0)) for token, share in zip(*node, strict=True) if share > 0]
        for node in zip(token_lists, share_lists, strict=True)
    ]


class _GrowingTree:
    """A row's tree in the making. Its nodes are paths of ranks, () the root; a child's rank is 0 for the best."""

    def __init__(self, root: int, bounds: Budget) -> None:
        self._bounds = bounds
        self._tokens: dict[tuple[int, ...], int] = {(): root}
        self._shares: dict[tuple[int, ...], float] = {(): 1.0}
        self._depth = 0
        self.level: list[tuple[int, ...]] = [()] if bounds.depth > 0 else []
        """The nodes to be run next."""

    def tokens_to(self, path: tuple[int, ...]) -> list[int]:
        """The tokens from the root to a node."""
        return [self._tokens[path[:length]] for length in range(len(path) + 1)]

    def grow(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Give each node of the level its children, tokens with probabilities, and choose the next level."""
        for path, of_path in zip(self.level, children, strict=True):
            for rank, (token, share) in enumerate(of_path):
                self._tokens[*path, rank] = token
                self._shares[*path, rank] = self._shares[path] * share
        self._depth += 1
        # Products fall along a path: what is not among the best already cannot have a child that will be.
        fresh = [path for path in self._best() if len(path) == self._depth]
        self.level = fresh if self._depth < self._bounds.depth else []

    def _best(self) -> list[tuple[int, ...]]:
        """The nodes that would be drafted now; of equals the one met first, so parents before children."""
        return heapq.nlargest(self._bounds.nodes, self._shares, key=self._shares.__getitem__)

    def best(self, device: torch.device) -> TokenTree:
        """The tree to propose."""
        shape, ranks = TreeShape.from_paths(self._best())
        paths = [tuple(ranks[node - 1] for node in shape.path(last)) for last in range(len(shape))]
        return TokenTree.of_list([self._tokens[path] for path in paths], shape, device)
