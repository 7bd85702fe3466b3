"""Growth of trees, depth by depth: every node's children come from a distribution of their own."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from decoding.drafters.base import DraftRequest
from decoding.drafters.static_tree import StaticTree
from decoding.drafters.text_rows import TextRows
from decoding.model.markov import DecodingBias
from decoding.policies import Budget
from decoding.rules.drawing import draw_rows_without_replacement
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, probabilities
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
    bias: DecodingBias | None = None
    finish: Callable[[Float[Tensor, "nodes outputs"]], Float[Tensor, "nodes vocab"]] | None = None

    def logits(self, rows: Int[Tensor, " nodes"], paths: Int[Tensor, "nodes tokens"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits after each path: one look-up or product of the bias for all nodes of the call."""
        logits = self.base[paths.shape[1] - 1][rows.to(self.base.device)]
        if self.bias is not None:
            logits = self.bias.added_to(logits, paths[:, -1])
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
    """Number of tokens to choose for each parent: as many as the widest needs."""
    parents: tuple[tuple[int, ...], ...]
    """The parents in each row's tree, by their numbers there."""
    slots: Int[Tensor, "parents width"]
    """On the host: the child of each rank of each parent; node 0 where there is none."""


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
    parents: list[tuple[int, ...]] = []
    for row, (shape, ranks) in enumerate(trees):
        with_children = [node for node, found in enumerate(shape.children) if found and shape.depths[node] == depth]
        parents.append(tuple(with_children))
        for parent in with_children:
            of_parent = shape.children[parent]
            children += [first[row] + child for child in of_parent]
            child_parents += [len(paths)] * len(of_parent)
            child_ranks += [ranks[child - 1] for child in of_parent]
            rows.append(row)
            paths.append([first[row] + node for node in (0, *shape.path(parent))])
    slots = torch.zeros(len(paths), max(child_ranks) + 1, dtype=torch.long)
    slots[child_parents, child_ranks] = torch.tensor(children)
    return _Level(
        rows=torch.tensor(rows, device=device),
        paths=torch.tensor(paths, device=device),
        children=torch.tensor(children, device=device),
        child_parents=torch.tensor(child_parents, device=device),
        child_ranks=torch.tensor(child_ranks, device=device),
        width=slots.shape[1],
        parents=tuple(parents),
        slots=slots,
    )


class _Filling:
    """The tokens of all trees of a batch, one tree after the other, while they are chosen depth by depth."""

    def __init__(self, plan: _Plan, requests: Sequence[DraftRequest]) -> None:
        device = requests[0].hidden.device
        roots = torch.tensor([request.tokens[-1] for request in requests]).to(device, non_blocking=True)
        self._sizes = [len(shape) for shape in plan.shapes]
        self.tokens = roots.new_zeros(sum(self._sizes))
        self.tokens[plan.roots] = roots

    def fill(self, level: _Level, chosen: Int[Tensor, "parents width"]) -> None:
        """Give each child its token, the one of its rank among those chosen for its parent."""
        self.tokens[level.children] = chosen.to(self.tokens.device)[level.child_parents, level.child_ranks]

    def by_row(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor with an entry for each node into those of each tree."""
        parts: tuple[Tensor, ...] = values.split(self._sizes)
        return parts


class StaticGrowth:
    """Growth to a fixed shape: a node's child of rank r holds the r-th best token (from 0) after its path."""

    def __init__(self, tree: StaticTree) -> None:
        self._tree = tree
        self._plan = lru_cache(maxsize=64)(_Plan.of_trees)

    def propose(self, requests: Sequence[DraftRequest], paths: PathLogits) -> list[Proposal]:
        """Draft with one call of ``paths`` per depth, for the parents of all trees, without a transfer to the host."""
        cuts = tuple(self._tree.cut(request.max_depth, request.max_nodes) for request in requests)
        plan = self._plan(cuts, requests[0].hidden.device)
        filling = _Filling(plan, requests)
        for level in plan.levels:
            logits = paths.logits(level.rows, filling.tokens[level.paths])
            filling.fill(level, logits.topk(level.width).indices)
        rows = zip(filling.by_row(filling.tokens), plan.shapes, strict=True)
        return [Proposal(TokenTree(tokens, shape), ProposalKind.DETERMINISTIC) for tokens, shape in rows]


class SampledGrowth:
    """Growth to a fixed shape by draws: a node's children are drawn without replacement from q after its path.

    q is the distribution after every sampling control. Where it has fewer tokens than the shape has children, the
    children that are left over are not drafted, nor what would follow them. A shape is cut to a request before anything
    is drawn: the drawn tokens themselves never decide what is kept, which would not be lossless.
    """

    def __init__(self, tree: StaticTree) -> None:
        self._tree = tree
        self._plan = lru_cache(maxsize=64)(_Plan.of_trees)
        self._kind = ProposalKind.SAMPLED if tree.is_chain else ProposalKind.SAMPLED_WITHOUT_REPLACEMENT

    @property
    def kind(self) -> ProposalKind:
        """Kind of all its proposals; with and without replacement are one for the single children of a chain."""
        return self._kind

    def propose(self, requests: Sequence[DraftRequest], paths: PathLogits, texts: TextRows) -> list[Proposal]:
        """Draft with one call of ``paths`` per depth, for the parents of all trees, and one transfer to the host.

        Controls that read the history cost one more transfer per depth. Each node takes one number of its row's source,
        so that the draws of a row do not depend on the rows beside it.
        """
        shapes = [self._tree.cut(request.max_depth, request.max_nodes)[0] for request in requests]
        plan = self._plan(tuple((shape, _draw_order(shape)) for shape in shapes), requests[0].hidden.device)
        if not plan.levels:
            return [Proposal.root_only(request.tokens[-1], texts.device) for request in requests]
        filling = _Filling(plan, requests)
        uniforms = _uniforms(shapes, texts)
        q = torch.zeros(0)
        for level in plan.levels:
            known = filling.tokens.clamp(max=texts.vocab_size - 1)  # a valid id where nothing was drawn: never read
            logits = paths.logits(level.rows, known[level.paths]).to(texts.device)
            weights = probabilities(logits, texts.sampling, self._history(requests, plan, level, known, texts))
            filling.fill(level, draw_rows_without_replacement(weights, uniforms[level.slots]))
            q = q if len(q) else weights.new_zeros(len(known), texts.vocab_size)
            q[level.paths[:, -1].to(q.device)] = weights
        drawn: list[int] = filling.tokens.tolist()
        nodes = iter(drawn)
        return [
            self._proposal(shape, list(islice(nodes, len(shape))), of_row, texts)
            for shape, of_row in zip(shapes, filling.by_row(q), strict=True)
        ]

    def _history(
        self,
        requests: Sequence[DraftRequest],
        plan: _Plan,
        level: _Level,
        known: Int[Tensor, " nodes"],
        texts: TextRows,
    ) -> HistoryRows | None:
        """Return the history before the children of each parent of the level; None if no control reads it."""
        if not texts.sampling.needs_history:
            return None
        nodes = iter(known.tolist())
        parts = []
        for row, (request, shape) in enumerate(zip(requests, plan.shapes, strict=True)):
            tree = TokenTree.of_list(list(islice(nodes, len(shape))), shape)
            parts.append(texts.history_at(row, request.tokens, tree, level.parents[row]))
        return HistoryRows.cat(parts)

    def _proposal(
        self, shape: TreeShape, tokens: Sequence[int], q: Float[Tensor, "nodes vocab"], texts: TextRows
    ) -> Proposal:
        """Return a row's proposal, without the nodes that were not drawn and those below them."""
        if max(tokens) >= texts.vocab_size:
            kept = [0]
            for node, parent in enumerate(shape.parents[1:], start=1):
                if tokens[node] < texts.vocab_size and parent in kept:
                    kept.append(node)
            shape, tokens, q = shape.keep(kept), [tokens[node] for node in kept], q[kept]
        if len(shape) == 1:
            return Proposal.root_only(tokens[0], texts.device)
        last_parent = max(shape.parents)
        return Proposal(TokenTree.of_list(tokens, shape, texts.device), self._kind, q[: last_parent + 1])


def _draw_order(shape: TreeShape) -> tuple[int, ...]:
    """Return each drafted node's place among its siblings, in the order in which they are drawn."""
    places = [0] * len(shape)
    for children in shape.children:
        for place, child in enumerate(children):
            places[child] = place
    return tuple(places[1:])


def _uniforms(shapes: Sequence[TreeShape], texts: TextRows) -> Float64[Tensor, " nodes"]:
    """Take a number in [0, 1) from its row's source for every drafted node of all trees; roots have 0."""
    drawn = [texts.sources[row].uniforms(len(shape) - 1) for row, shape in enumerate(shapes)]
    return torch.cat([F.pad(of_row, (1, 0)) for of_row in drawn])


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
