"""Acceptance rules for many rows together, computed on the device of the rows without waiting for it.

Each function does the arithmetic of the readable rule in `decoding.rules.verify`, with the same random numbers. Rules
with rejections take the numbers in an order that depends only on the trees, so every node can be decided before the
path is known. Nodes are numbered across all rows, and each row is padded to ``nodes`` nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from decoding.rules.drawing import GeneratorSource, inverse_cdf
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import Rule, recursive_rejection, sampled_verify, traversal_verification, typical

TargetAt = Callable[[Int[Tensor, " nodes"]], Float[Tensor, "nodes vocab"]]
"""Function from the numbers of nodes (see `Undecided`) to the target's distribution at each of these nodes."""


@dataclass(frozen=True)
class Undecided:
    """Rows that need a verdict, with their proposals, their random numbers and the target's distribution.

    ``target`` numbers the nodes of all rows: ``first[row]`` is the number of the row's root, and the row's other nodes
    follow.
    """

    proposals: Sequence[Proposal]
    sources: Sequence[GeneratorSource]
    target: TargetAt
    first: Sequence[int]
    device: torch.device

    @property
    def trees(self) -> list[TokenTree]:
        return [proposal.tree for proposal in self.proposals]

    def sent(self, values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        """Copy values to the device of the rows, without waiting for the device."""
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def uniforms(self, count: int) -> Float64[Tensor, "rows count"]:
        """Return the next random numbers of each row's source without taking them."""
        return self.sent([source.peek(count) for source in self.sources], torch.float64)

    def tokens(self) -> Int[Tensor, "rows nodes"]:
        """Return the tokens of the trees, with smaller trees padded."""
        if all(tree.on_host for tree in self.trees):
            return self.sent(padded([tree.token_list for tree in self.trees], 0))
        return pad_sequence([tree.tokens.to(self.device) for tree in self.trees], batch_first=True)

    def parents(self) -> Int[Tensor, "rows nodes"]:
        """Return each node's parent; -1 for roots and padding."""
        return self.sent(padded([tree.shape.parents for tree in self.trees], -1))

    def p(self) -> Float[Tensor, "flat vocab"]:
        """Return the target's distribution at all nodes; padding repeats the row's last node."""
        size = max(map(len, self.trees))
        rows = zip(self.first, self.trees, strict=True)
        return self.target(self.sent([root + min(node, len(tree) - 1) for root, tree in rows for node in range(size)]))


def padded(lists: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    """Return the lists padded to the longest length."""
    longest = max(map(len, lists))
    return [[*values, *[fill] * (longest - len(values))] for values in lists]


def walk(batch: Undecided) -> Int[Tensor, "rows 3"]:
    """Verify all rows as `sampled_verify` does: at each row's current node draw a token with the uniform number of the
    node's depth, and move to the child with this token. Returns the last node of each row, the token after it (the
    vocabulary's size if no token has weight), and how many numbers the row's source must skip.
    """
    deepest = max(tree.shape.max_depth for tree in batch.trees)
    uniforms, roots = batch.uniforms(deepest + 1), batch.sent(batch.first)
    parents, tokens = batch.parents(), batch.tokens()
    node, token, taken = (torch.zeros_like(roots) for _ in range(3))
    walking = torch.ones_like(roots, dtype=torch.bool)
    for depth in range(deepest + 1):
        here = _still(walking)
        at, walks = node[here], walking[here]
        if not len(at):
            break
        drawn = inverse_cdf(batch.target(roots[here] + at), uniforms[here, depth])
        holds = (parents[here] == at[:, None]) & (tokens[here] == drawn[:, None])
        follows = walks & holds.any(1)
        token[here] = torch.where(walks, drawn, token[here])
        taken[here] = taken[here] + walks
        node[here] = torch.where(follows, holds.int().argmax(1), at)  # the first child with the token
        walking[here] = follows  # at last, because ``walks`` may be a view of it
    return torch.stack([node, token, taken], dim=1)


def _still(walking: Bool[Tensor, " rows"]) -> Int[Tensor, " some"] | slice:
    """Return the rows that are not finished, or all rows if selecting them would wait for a device."""
    return walking.nonzero().squeeze(1) if walking.is_cpu else slice(None)


@lru_cache(maxsize=64)
def _groups(
    of_rows: tuple[tuple[TreeShape, int, ProposalKind], ...], size: int, by_depth: bool, device: torch.device
) -> list[tuple[Int[Tensor, " some"], ...]]:
    """List the groups of children for `_siblings`. They follow from the shape, the number of drawn nodes (with the
    root; 0: none) and the kind of each row, so equal steps copy nothing to the device.

    A group has six parts: parents, children, the indices in the group of the children that were drawn from q, and their
    rows of q (all mass of any other child's q is on its token); then the same two parts for those drawn children whose
    token leaves q before the next sibling is drawn.
    """
    groups: dict[tuple[int, int], tuple[list[int], ...]] = {}
    above = 0
    for row, (shape, drawn, kind) in enumerate(of_rows):
        inner = shape.keep(range(drawn)).inner if drawn else {}
        for node, children in enumerate(shape.children):
            for rank, child in enumerate(children):
                group = groups.setdefault((shape.depths[node] * by_depth, rank), tuple([] for _ in range(6)))
                is_left = kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT and child != children[-1]
                for part in (2, 4)[: (child < drawn) * (1 + is_left)]:
                    group[part].append(len(group[0]))
                    group[part + 1].append(above + inner[node])
                group[0].append(row * size + node)
                group[1].append(row * size + child)
        above += len(inner)
    sent = partial(torch.tensor, dtype=torch.long)
    return [tuple(sent(part).to(device, non_blocking=True) for part in groups[key]) for key in sorted(groups)]


def _siblings(batch: Undecided, like: Float[Tensor, "flat vocab"], by_depth: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield all children in draw order, rank by rank; with ``by_depth``, depth by depth, and rank by rank within a
    depth. Each entry has the parents and the children, both (pairs,), the children's tokens, (pairs, 1), and the q of
    each child given the siblings before it, (pairs, vocab).
    """
    tokens = batch.tokens()
    left = torch.cat([like[:0], *(row.q.to(like) for row in batch.proposals if row.q is not None)])
    of_rows = tuple(
        (row.tree.shape, *(row.drawn or (0 if row.q is None else len(row.tree), row.kind))) for row in batch.proposals
    )
    groups = _groups(of_rows, tokens.shape[1], by_depth, batch.device)
    for parents, children, drawn, q_rows, leaving, left_rows in groups:
        token = tokens.flatten()[children][:, None]
        q = torch.zeros_like(like[: len(token)]).scatter_(1, token, 1)
        if len(drawn):
            q[drawn] = left[q_rows]
        yield parents, children, token, q
        if len(leaving):
            rest = q[leaving].scatter(1, token[leaving], 0)
            left[left_rows] = rest / rest.sum(-1, keepdim=True)


def reject(batch: Undecided) -> Int[Tensor, "rows 3"]:
    """Verify all rows as `recursive_rejection` does; return the same values as `walk`.

    Whenever a given node is reached, the same children have been tried before. So each try reads the random number at a
    known index.
    """
    shapes, p = [tree.shape for tree in batch.trees], batch.p()
    ends = batch.sent(padded([_tries(shape)[1] for shape in shapes], 0))
    uniforms = batch.uniforms(max(max(_tries(shape)[1]) for shape in shapes) + 1)
    number = uniforms.gather(1, batch.sent(padded([_tries(shape)[0] for shape in shapes], 0))).flatten()
    keeps = torch.zeros_like(number, dtype=torch.bool)
    open_ = torch.ones_like(keeps)  # nodes that have no kept child yet
    for parents, children, token, q in _siblings(batch, p, by_depth=False):
        now, tried = p[parents], open_[parents]
        residual = (now - q).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        ratio = now.gather(1, token) / q.gather(1, token)
        # Without a residual, p equals q up to rounding, and a rejection has probability 0.
        kept = tried & ((number[children] < ratio[:, 0]) | (total[:, 0] == 0))
        keeps[children], open_[parents] = kept, tried & ~kept
        p[parents] = torch.where(tried[:, None] & (total > 0), residual / total, now)
    depths, reached = _reached(batch, keeps.view_as(ends))
    node = (depths * reached).argmax(1, keepdim=True)
    return _drawn(p, node, ends.gather(1, node), uniforms)


def climb(batch: Undecided) -> Int[Tensor, "rows 3"]:
    """Verify chains drawn from q as `traversal_verification` does; return the same values as `walk`.

    The function does the same as `traverse` with a third of the kernels. Every node below the root must have been drawn
    from q, so chains with grafted nodes go to `traverse`. On the way down the chain, A needs no random number. Then,
    for each node from the deepest up to the root, the next random number decides whether the node is kept. The letters
    are as in the rule.
    """
    depths = [tree.shape.max_depth for tree in batch.trees]
    deepest, own = max(depths), batch.sent(depths)[:, None]
    uniforms, p = batch.uniforms(deepest + 1), batch.p().unflatten(0, (len(depths), -1))
    drawn = zip(batch.proposals, depths, strict=True)
    q = pad_sequence([row.q[:last] for row, last in drawn if row.q is not None], batch_first=True)
    token = batch.tokens()[:, 1:, None]
    p_token, q_token = (weights.gather(2, token)[:, :, 0] for weights in (p[:, :-1], q))
    entered = [torch.ones_like(p_token[:, 0])]
    for depth in range(deepest):
        entered.append((p_token[:, depth] * entered[-1] / q_token[:, depth]).clamp(max=1))
    a, node = torch.stack(entered, dim=1), torch.arange(deepest + 1, device=p.device)
    left = (p[:, :-1] * a[:, :-1, None] - q).clamp(min=0).sum(-1).double()
    # A after the child is rejected; the last node has no child.
    later = torch.where(left > 0, left / (left + 1 - a[:, :-1].double()), 0)
    kept = torch.where(node == own, a.double(), F.pad(later, (0, 1)))
    asked = (node > 0) & (node <= own) & ((a > 0).cumprod(1) > 0) & (kept > 0)
    before = asked.flip(1).cumsum(1).flip(1) - asked.long()
    last = (node * (asked & (uniforms.gather(1, before) < kept))).amax(1, keepdim=True)
    taken = (asked & (node >= last)).sum(1, keepdim=True)
    here, at = torch.arange(len(depths), device=p.device), last[:, 0]
    whole = p[here, at]
    rest = (whole * a.gather(1, last) - q[here, at.clamp(max=deepest - 1)]).clamp(min=0)
    ends = (last == own) | (F.pad(left, (0, 1)).gather(1, last) == 0)
    written = inverse_cdf(torch.where(ends, whole, rest), uniforms.gather(1, taken)[:, 0])
    return torch.stack([at, written, taken[:, 0] + 1], dim=1)


def traverse(batch: Undecided) -> Int[Tensor, "rows 3"]:
    """Verify all rows as `traversal_verification` does; return the same values as `walk`.

    When a node is tried, all its earlier siblings have been rejected with their subtrees, so its A and its p are known
    without a random number. Then, for each node, leaves first, the next random number decides whether the node is kept.
    The letters are as in the rule.
    """
    shapes, mass = [tree.shape for tree in batch.trees], batch.p()
    order = batch.sent(padded([_leaves_first(shape) for shape in shapes], max(map(len, shapes)) - 1))
    uniforms = batch.uniforms(order.shape[1])
    inner = batch.sent(padded([list(map(bool, shape.children)) for shape in shapes], 0), torch.bool).flatten()
    a = (torch.arange(len(mass), device=mass.device) % order.shape[1] == 0).double()  # 1 at the roots
    for parents, children, token, q in _siblings(batch, mass, by_depth=True):
        now, above = mass[parents], a[parents]
        # Without a residual, A becomes 0 and later children are not tried.
        ratio = (now.gather(1, token) / q.gather(1, token))[:, 0].clamp(max=1) * (above > 0)
        a[children] = ratio.double()
        mass[children] = torch.where(inner[children], ratio, 1)[:, None] * mass[children]
        residual = (now - q).clamp(min=0)
        left = residual.sum(-1).double()
        rest, lasts = left + (1 - above), (left > 0) & (above > 0)
        a[parents] = torch.where(lasts, left / rest, 0)
        mass[parents] = torch.where(lasts[:, None], residual / rest.to(mass)[:, None], now)
    chance = a.view_as(order).gather(1, order)
    asked = (chance > 0) & (order > 0)
    number = asked.cumsum(1) - asked.long()
    kept = (order == 0) | (asked & (uniforms.gather(1, number) < chance))
    first = kept.int().argmax(1, keepdim=True)
    return _drawn(mass, order.gather(1, first), (number + asked).gather(1, first), uniforms)


def accept_typical(batch: Undecided, epsilon: float, delta: float) -> Int[Tensor, "rows 3"]:
    """Verify all rows as `typical` does; return the same values as `walk`."""
    p, tokens, parents = batch.p(), batch.tokens(), batch.parents()
    threshold = torch.clamp(delta * torch.exp(torch.special.xlogy(p, p).sum(-1)), max=epsilon)
    above = parents.clamp(min=0)
    flat = above + torch.arange(len(p), device=p.device).view_as(above)[:, :1]
    drafted = p[flat, tokens]
    depths, reached = _reached(batch, (drafted > threshold[flat]) & (parents >= 0))
    likelihood = torch.ones_like(drafted, dtype=torch.float64)
    for _ in range(max(tree.shape.max_depth for tree in batch.trees)):
        likelihood = torch.where(parents < 0, 1, likelihood.gather(1, above) * drafted)
    longest = (depths * reached).amax(1, keepdim=True)
    node = torch.where(reached & (depths == longest), likelihood, -1).argmax(1, keepdim=True)
    return _drawn(p, node, torch.zeros_like(node), batch.uniforms(1))


def _reached(batch: Undecided, keeps: Bool[Tensor, "rows nodes"]) -> tuple[Int[Tensor, "rows nodes"], Tensor]:
    """Return each node's depth, and whether the node and all nodes above it are kept; the root is always kept."""
    depths = batch.sent(padded([tree.shape.depths for tree in batch.trees], 0))
    parents, root = batch.parents().clamp(min=0), torch.arange(keeps.shape[1], device=keeps.device) == 0
    reached = root | keeps
    for _ in range(max(tree.shape.max_depth for tree in batch.trees)):
        reached = root | (keeps & reached.gather(1, parents))
    return depths, reached


def _drawn(
    weights: Float[Tensor, "flat vocab"],
    node: Int[Tensor, "rows 1"],
    number: Int[Tensor, "rows 1"],
    uniforms: Float64[Tensor, "rows count"],
) -> Int[Tensor, "rows 3"]:
    """Draw the token after ``node`` in each row, with the uniform number at index ``number``; return the same values as
    `walk`.
    """
    of_node = weights.unflatten(0, (len(node), -1))[torch.arange(len(node), device=node.device), node[:, 0]]
    token = inverse_cdf(of_node, uniforms.gather(1, number)[:, 0])
    return torch.stack([node[:, 0], token, number[:, 0] + 1], dim=1)


@lru_cache(maxsize=256)
def _tries(shape: TreeShape) -> tuple[list[int], list[int]]:
    """Return, for each node, the index of the random number with which the node is tried, and the index of the number
    that draws the next token if no child of the node is kept.
    """
    before, index = [0] * len(shape), [0] * len(shape)
    for node, children in enumerate(shape.children):
        for rank, child in enumerate(children):
            index[child], before[child] = before[node] + rank, before[node] + rank + 1
    return index, [taken + len(children) for taken, children in zip(before, shape.children, strict=True)]


@lru_cache(maxsize=256)
def _leaves_first(shape: TreeShape) -> list[int]:
    """Return the nodes in the order in which traversal leaves them: children before parents, the root last."""
    order, stack = list[int](), [0]
    while stack:
        order.append(node := stack.pop())
        stack += shape.children[node]
    return order[::-1]


class AtOnce(NamedTuple):
    """A function that applies a rule to many rows together, and the kinds of proposals for which it was derived. The
    function's verdicts equal the verdicts of the readable rule.
    """

    decide: Callable[[Undecided], Int[Tensor, "rows 3"]]
    kinds: frozenset[ProposalKind]
    chains_only: bool = False

    def takes(self, proposals: Sequence[Proposal]) -> bool:
        are_chains = all(proposal.tree.shape.is_chain for proposal in proposals)
        return self.kinds.issuperset(proposal.kind for proposal in proposals) and (are_chains or not self.chains_only)

    def __call__(self, batch: Undecided) -> Int[Tensor, "rows 3"]:
        assert self.takes(batch.proposals), f"{self.decide} was not derived for these proposals"
        return self.decide(batch)


_ANY = frozenset(ProposalKind)
_DRAWN_ALONE = _ANY - {ProposalKind.DETERMINISTIC, ProposalKind.GRAFTED}


def at_once(rule: Rule, proposals: Sequence[Proposal]) -> AtOnce | None:
    """Return the function that applies the rule to all these proposals together; None if there is no such function."""
    if isinstance(rule.decide, partial) and rule.decide.func is typical:
        return AtOnce(partial(accept_typical, **rule.decide.keywords), _ANY)
    known = (
        (sampled_verify, AtOnce(walk, _ANY)),
        (recursive_rejection, AtOnce(reject, _ANY)),
        (traversal_verification, AtOnce(climb, _DRAWN_ALONE, chains_only=True)),
        (traversal_verification, AtOnce(traverse, _ANY)),
    )
    return next((function for decide, function in known if rule.decide is decide and function.takes(proposals)), None)
