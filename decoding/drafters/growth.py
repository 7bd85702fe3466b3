"""Grows trees of a fixed shape, one depth after another. Each node has a separate distribution of children."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from decoding.drafters.base import Drafter, DraftRequest, TextRows
from decoding.errors import UserError
from decoding.model.markov import BlockBias, MarkovBias
from decoding.model.vocabulary import over_vocabulary
from decoding.policies import Budget
from decoding.rules.drawing import draw_rows_without_replacement
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, best_tokens, probabilities
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape

Cut = tuple[TreeShape, tuple[int, ...]]
"""A shape, and the rank of every drafted node among its parent's best tokens (from 0)."""


class ChildLogits(NamedTuple):
    """Logits of the children of some nodes; several nodes may share a row of logits."""

    logits: Float[Tensor, "some outputs"]
    row: Int[Tensor, " nodes"]
    """Each node's row in ``logits``."""
    tokens: Int[Tensor, " outputs"] | None = None
    """The token that each output stands for, in increasing order; None if the outputs are the target's vocabulary."""

    def to(self, device: torch.device) -> "ChildLogits":
        tokens = None if self.tokens is None else self.tokens.to(device)
        return ChildLogits(self.logits.to(device), self.row.to(device), tokens)

    def of_nodes(self) -> "ChildLogits":
        """Return the same logits with a separate row for each node."""
        return ChildLogits(self.logits[self.row], torch.arange(len(self.row), device=self.row.device), self.tokens)


NodeLogits = Callable[[int, Int[Tensor, " nodes"], Int[Tensor, " nodes"]], ChildLogits]
"""Function that returns the logits of the children of nodes at one depth (0: the root). Each node is given by its row
in the batch and its token."""


class StaticTree:
    """A tree of ranks, which can be cut to a smaller depth, or to the nodes whose paths use only the best ``width``
    ranks.

    A cut never depends on the drafted tokens.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        """``paths`` are paths of ranks, as in `TreeShape.from_paths`. Raises UserError if the list is empty."""
        self._shape, ranks = TreeShape.from_paths(paths)
        self.max_depth = self._shape.max_depth
        if self.max_depth < 1:
            raise UserError("the tree is empty: use at least the path [0]")
        self._ranks = (0, *ranks)
        self.ranks = max(self._ranks) + 1
        self.is_chain = self._shape.is_chain
        widest = [0]  # the largest rank on the path to each node
        for node, parent in enumerate(self._shape.parents[1:], start=1):
            widest.append(max(widest[parent], self._ranks[node]))
        self._widest = tuple(widest)
        self._cuts = lru_cache(maxsize=None)(self._cut)
        self.budgets = self._sizes()

    @staticmethod
    def chain(length: int) -> "StaticTree":
        """Make a chain of ``length`` tokens, each of which is the draft's best token."""
        return StaticTree([(0,) * depth for depth in range(1, length + 1)])

    def cut(self, request: DraftRequest) -> Cut:
        """Return the widest cut within the request's bounds."""
        return self._cuts(min(request.max_depth, self.max_depth), min(request.max_nodes, len(self._shape)))

    @property
    def chains(self) -> tuple[Budget, ...]:
        """Budgets under which the tree is cut to a chain."""
        return tuple(budget for budget in self.budgets if budget.nodes == budget.depth + 1)

    def _sizes(self) -> tuple[Budget, ...]:
        """List the budgets: the sizes to which the tree can be cut.

        Every depth has a budget with all ranks and a budget with only rank 0; the full depth also has budgets with 2,
        4, ... ranks.
        """
        widths = [1]
        while 2 * widths[-1] < self.ranks:
            widths.append(2 * widths[-1])
        cuts = [self._nodes(depth, width) for depth in range(1, self.max_depth + 1) for width in (1, self.ranks)]
        cuts += [self._nodes(self.max_depth, width) for width in widths]
        # Sorted by size: each further depth costs one more head, and each further node makes the target pass wider.
        sizes = {(len(nodes), max(self._shape.depths[node] for node in nodes)) for nodes in cuts}
        return tuple(Budget(depth, nodes) for nodes, depth in sorted(sizes) if nodes > 1)

    def _nodes(self, depth: int, width: int) -> tuple[int, ...]:
        depths = self._shape.depths
        return tuple(node for node in range(len(depths)) if depths[node] <= depth and self._widest[node] < width)

    def _cut(self, depth: int, nodes: int) -> Cut:
        fitting = [cut for width in range(1, self.ranks + 1) if len(cut := self._nodes(depth, width)) <= nodes]
        kept = fitting[-1] if fitting else self._nodes(depth, 1)[: max(nodes, 1)]
        return self._shape.keep(kept), tuple(self._ranks[node] for node in kept[1:])


class ConditionalLogits:
    """A `NodeLogits` that has the logits of all depths from the start, and adds a bias for the previous token.

    ``base[d]`` predicts the children of the nodes at depth d of every row. If ``bias`` is None, the logits do not
    depend on drafted tokens. ``output_tokens``: the target's token for each output, in increasing order; None if output
    i is token i. ``block`` computes the vector that the bias's output layer reads; None means the embedding of the
    previous token.
    """

    def __init__(
        self,
        base: Float[Tensor, "depths rows outputs"],
        bias: MarkovBias | None,
        output_tokens: Int[Tensor, " outputs"] | None = None,
        block: BlockBias | None = None,
    ) -> None:
        self._base, self._bias, self._output_tokens, self._block = base, bias, output_tokens, block

    def __call__(self, depth: int, rows: Tensor, tokens: Tensor) -> ChildLogits:
        below = ChildLogits(self._base[depth], rows.to(self._base.device), self._output_tokens)
        if self._bias is None:
            return below
        below = below.of_nodes()
        factor = None if self._block is None else self._block.factor(depth, rows, tokens)
        return below._replace(logits=self._bias.added_to(below.logits, tokens, factor))


class _Level(NamedTuple):
    """The nodes at one depth that have children, in all trees of a batch. Nodes are numbered across all trees."""

    rows: Int[Tensor, " parents"]
    parents: Int[Tensor, " parents"]
    children: Int[Tensor, " children"]
    choice: tuple[Int[Tensor, " children"], Int[Tensor, " children"]]
    """For each child the index of its parent in ``parents``, and the rank of the child."""
    child: Int[Tensor, "parents width"]
    """The child of each parent at each rank, or node 0 if there is none. This tensor is on the host."""
    parents_by_row: tuple[tuple[int, ...], ...]
    """The parents in each row, by their numbers in the tree of that row."""
    q_rows: Int[Tensor, " parents"]
    """The parents' numbers among the nodes with children; these numbers also run across all trees."""


def _levels(cuts: tuple[Cut, ...], device: torch.device) -> list[_Level]:
    """List the levels of a batch of trees from their shapes alone."""
    first = [0, *accumulate(len(shape) for shape, _ in cuts)]
    first_q = [0, *accumulate(len(shape.inner) for shape, _ in cuts)]
    levels = []
    for depth in range(max(shape.max_depth for shape, _ in cuts)):
        rows: list[int] = []
        parents: list[int] = []
        children: list[int] = []
        owners: list[int] = []
        ranks: list[int] = []
        q_rows: list[int] = []
        by_row: list[tuple[int, ...]] = []
        for row, (shape, ranks_of) in enumerate(cuts):
            own = tuple(node for node in shape.inner if shape.depths[node] == depth)
            by_row.append(own)
            for parent in own:
                owners += [len(parents)] * len(shape.children[parent])
                rows.append(row)
                parents.append(first[row] + parent)
                q_rows.append(first_q[row] + shape.inner[parent])
                children += [first[row] + child for child in shape.children[parent]]
                ranks += [ranks_of[child - 1] for child in shape.children[parent]]
        child = torch.zeros(len(parents), max(ranks) + 1, dtype=torch.long)
        child[owners, ranks] = torch.tensor(children)

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values).to(device, non_blocking=True)

        choice = on_device(owners), on_device(ranks)
        nodes = on_device(rows), on_device(parents), on_device(children)
        levels.append(_Level(*nodes, choice, child, tuple(by_row), on_device(q_rows)))
    return levels


class Growth:
    """The growth of a tree of fixed shape, in all rows of a batch at the same time.

    If the tree is sampled (``sampled``, above temperature 0), a node's children are drawn without replacement from q:
    the draft's distribution of the token that follows the node's path, with every sampling control applied. If q has
    fewer tokens than the shape has children, the other children and their subtrees are not drafted. The shape is cut to
    the request before anything is drawn, because decoding would not be lossless if drawn tokens decided which nodes are
    kept. Each node takes one random number from the source of its row, so rows do not affect one another.

    If the tree is not sampled, a node's child of rank r is the r-th best token (from 0) after the path, with penalties
    and processors applied.
    """

    def __init__(self, tree: StaticTree, sampled: bool) -> None:
        self.tree = tree
        self.sampled = sampled
        self._levels = lru_cache(maxsize=64)(_levels)

    def kind(self, sampling: SamplingConfig) -> ProposalKind:
        """Return the kind that all proposals have under these controls."""
        if not self.sampled or sampling.greedy:
            return ProposalKind.DETERMINISTIC
        # The single children of a chain are the same with and without replacement.
        return ProposalKind.SAMPLED if self.tree.is_chain else ProposalKind.SAMPLED_WITHOUT_REPLACEMENT

    def propose(self, requests: Sequence[DraftRequest], nodes: NodeLogits, texts: TextRows) -> list[Proposal]:
        """Draft with one call of ``nodes`` per depth, for the parents of all trees together.

        If the tree is drawn, and if it has branches or the controls include processors, the method waits for the device
        once. Controls that read the history cost one more transfer to the host per depth.
        """
        sampling, device = texts.sampling, texts.device
        kind = self.kind(sampling)
        cuts = tuple(self.tree.cut(request) for request in requests)
        shapes = [shape for shape, _ in cuts]
        if drawn := kind.has_q:
            cuts = tuple((shape, _draw_order(shape)) for shape in shapes)
        sizes, inner = [len(shape) for shape in shapes], [len(shape.inner) for shape in shapes]
        tokens = torch.cat(
            [F.pad(torch.tensor([r.tokens[-1]]), (0, n - 1)) for r, n in zip(requests, sizes, strict=True)]
        )
        tokens = tokens.to(device, non_blocking=True)
        uniforms = torch.zeros(0)
        if drawn:  # 0 for the roots
            taken = [texts.sources[row].uniforms(size - 1) for row, size in enumerate(sizes)]
            uniforms = torch.cat([F.pad(of_row, (1, 0)) for of_row in taken])
        q = torch.zeros(0)
        for depth, level in enumerate(self._levels(cuts, device)):
            known = tokens.clamp(max=texts.vocab_size - 1) if drawn else tokens  # a node without a draw is never read
            below = nodes(depth, level.rows, known[level.parents]).to(device)
            if sampling.processors:  # processors read the logits of all tokens
                below = ChildLogits(over_vocabulary(below.logits, below.tokens, texts.vocab_size), below.row)
            history = None
            if sampling.needs_history:
                history = _history(requests, shapes, level, known, texts)
                below = below.of_nodes()
                if history.seen is not None and below.tokens is not None:
                    history = history._replace(seen=history.seen[:, below.tokens])
            own = below.tokens
            if drawn:
                weights = probabilities(below.logits, sampling, history)[below.row]
                chosen = draw_rows_without_replacement(weights, uniforms[level.child])
                q = q if len(q) else weights.new_zeros(sum(inner), texts.vocab_size)
                if own is None:
                    q[level.q_rows] = weights
                else:
                    q[level.q_rows[:, None], own] = weights
                    # The additional id stands for a draw that found no weight left.
                    own = F.pad(own, (0, 1), value=texts.vocab_size)
            else:
                adjusted, width = adjusted_logits(below.logits, sampling, history), level.child.shape[1]
                best = best_tokens(adjusted)[:, None] if width == 1 else adjusted.topk(width).indices
                chosen = best[below.row]
            chosen = chosen if own is None else own[chosen]
            tokens[level.children] = chosen[level.choice]
        trees = [TokenTree(of_row, shape) for of_row, shape in zip(tokens.split(sizes), shapes, strict=True)]
        if not drawn:
            return [Proposal(tree, kind) for tree in trees]
        if not len(q):
            return [Proposal.root_only(request.tokens[-1], device) for request in requests]
        if sampling.processors or not self.tree.is_chain:  # in a plain chain every token was drawn
            lists = torch.split(tokens.cpu(), sizes)
            trees = [TokenTree.of_list(row.tolist(), shape, device) for row, shape in zip(lists, shapes, strict=True)]
        pairs = zip(trees, q.split(inner), strict=True)
        return [_drawn(tree, of_row, kind, texts.vocab_size) for tree, of_row in pairs]


class GrownDrafter(Drafter):
    """Base of drafters whose trees have a fixed shape."""

    growth: Growth

    def _grow(self, tree: StaticTree, sampled: bool, noun: str | None = None) -> None:
        """Set the shape of the trees and the drafter's label.

        The label states the number of tokens, or, if ``noun`` is "tree" or "chain", the number of drafted nodes.
        """
        self.growth, self.budgets = Growth(tree, sampled), tree.budgets
        size = f"{tree.max_depth} {'tokens' if sampled else 'likeliest tokens'}"
        if noun is not None:
            size = f"{'' if sampled else 'deterministic '}{noun} of {self.max_nodes - 1}"
        self.label_with_size = f"{self.name}, {size}"

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.growth.kind(sampling)})

    @property
    def chains(self) -> tuple[Budget, ...]:
        return self.growth.tree.chains


def _draw_order(shape: TreeShape) -> tuple[int, ...]:
    """Return, for each drafted node, its place in the draw order of its siblings (from 0)."""
    indices = {child: index for children in shape.children for index, child in enumerate(children)}
    return tuple(indices[node] for node in range(1, len(shape)))


def _history(
    requests: Sequence[DraftRequest],
    shapes: Sequence[TreeShape],
    level: _Level,
    known: Int[Tensor, " nodes"],
    texts: TextRows,
) -> HistoryRows:
    """Return, for each parent of the level, the history of a text that continues with a child of this parent."""
    tokens = known.cpu().split([len(shape) for shape in shapes])
    return HistoryRows.cat(
        [
            texts.history_at(row, request.tokens, TokenTree.of_list(tokens[row].tolist(), shapes[row]), parents)
            for row, (request, parents) in enumerate(zip(requests, level.parents_by_row, strict=True))
        ]
    )


def _drawn(tree: TokenTree, q: Float[Tensor, "parents vocab"], kind: ProposalKind, vocab_size: int) -> Proposal:
    """Return a row's proposal, without the nodes that were not drawn (token ``vocab_size``) and their subtrees."""
    device = tree.tokens.device
    if tree.on_host and max(tree.token_list) >= vocab_size:
        kept = [0]
        for node, parent in enumerate(tree.shape.parents[1:], start=1):
            if tree.token_list[node] < vocab_size and parent in kept:
                kept.append(node)
        shape = tree.shape.keep(kept)
        q = q[[tree.shape.inner[kept[node]] for node in shape.inner]]
        tree = TokenTree.of_list([tree.token_list[node] for node in kept], shape, device)
    return Proposal(tree, ProposalKind.DETERMINISTIC) if len(tree) == 1 else Proposal(tree, kind, q)
