"""Traversal verification for all rows of a batch at once.

The order in which a tree's nodes are tested is fixed, and so is the probability of each test: when a node is tested,
its siblings before it, and those before its ancestors, have been rejected. So the probabilities are computed level by
level for all trees together, and then held against the uniforms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.tree import TreeShape
from decoding.rules.verify_rows import Rows, first_accepted, written


@dataclass(frozen=True)
class _Trial:
    """One child of each of the first ``count`` parents of a level: all are tried at once."""

    count: int
    children: Int[Tensor, " count"]
    """Places of the children in the padded (rows, nodes), flattened."""
    drawn: Bool[Tensor, " count"] | bool
    """True where the child was drawn from q, else its q is delta(x); one value where it is that of all."""


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth that have children, in the trees of all rows; those with the most children come first."""

    begin: int
    nodes: Int[Tensor, " parents"]
    """Their places in the padded (rows, nodes), flattened."""
    trials: tuple[_Trial, ...]


@dataclass(frozen=True)
class _Plan:
    """A plan for the trees of a batch, from their shapes alone; the parents of all levels have slots."""

    levels: tuple[_Level, ...]
    rows: Int[Tensor, " slots"]
    nodes: Int[Tensor, " slots"]
    """Row of each parent, and its number in its tree."""
    slots: Int[Tensor, "rows nodes"]
    """Slot of each node, -1 for a leaf."""
    order: Int[Tensor, "rows tests"]
    """The nodes of each tree as they are tested, the leaves of a branch before it; 0 is padding."""
    q_rows: Int[Tensor, " slots"]
    """Place of each parent's q among all rows of q, one row's after the other's; behind them stands a row of zeros."""


@lru_cache(maxsize=64)
def _plan(
    shapes: tuple[TreeShape, ...], drawn: tuple[int, ...], q_rows: tuple[int, ...], device: torch.device
) -> _Plan:
    """Plan trees of these shapes. Of each the first ``drawn`` nodes were drawn, from its ``q_rows`` rows of q."""
    width = max(map(len, shapes))
    of_level: dict[int, list[tuple[int, int]]] = {}
    for row, shape in enumerate(shapes):
        for node, children in enumerate(shape.children):
            if children:
                of_level.setdefault(shape.depths[node], []).append((row, node))
    levels: list[_Level] = []
    placed: list[tuple[int, int]] = []
    for _, parents in sorted(of_level.items()):
        parents.sort(key=lambda place: -len(shapes[place[0]].children[place[1]]))
        trials = []
        for rank in range(len(shapes[parents[0][0]].children[parents[0][1]])):
            tried = [(row, found[rank]) for row, node in parents if len(found := shapes[row].children[node]) > rank]
            flags = [child < drawn[row] for row, child in tried]
            same = flags[0] if len(set(flags)) == 1 else torch.tensor(flags, device=device)
            trials.append(_Trial(len(tried), _flat(tried, width, device), same))
        levels.append(_Level(len(placed), _flat(parents, width, device), tuple(trials)))
        placed += parents
    slots = torch.full((len(shapes), width), -1)
    before = [sum(q_rows[:row]) for row in range(len(shapes))]
    read = []
    for slot, (row, node) in enumerate(placed):
        slots[row, node] = slot
        has_q = shapes[row].children[node][0] < drawn[row]
        read.append(before[row] + node if has_q else sum(q_rows))
    order = torch.zeros(len(shapes), width - 1, dtype=torch.long)
    for row, shape in enumerate(shapes):
        order[row, : len(shape) - 1] = torch.tensor(_tested(shape))
    return _Plan(
        tuple(levels),
        torch.tensor([row for row, _ in placed], device=device),
        torch.tensor([node for _, node in placed], device=device),
        slots.to(device),
        order.to(device),
        torch.tensor(read, device=device),
    )


def _flat(places: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([row * width + node for row, node in places], device=device)


def _tested(shape: TreeShape) -> list[int]:
    """Return the nodes below the root, depth first, each behind its children."""
    found, waiting = list[int](), [0]
    while waiting:
        found.append(waiting.pop())
        waiting += shape.children[found[-1]]
    return found[:0:-1]


def traversal_verification_rows(rows: Rows) -> Int[Tensor, "rows 4"]:
    """Compute the probability of every test, find the first that each row passes, and draw behind that node."""
    plan = _plan_of(rows)
    kept = torch.zeros(rows.tokens.shape, dtype=torch.float64, device=rows.device).index_fill_(1, rows.every[:1], 1.0)
    entered = kept > 0
    undrawn = torch.zeros_like(entered)
    mass = rows.target.at(rows.roots[plan.rows] + plan.nodes)
    q = _q_of(rows.proposals, plan, mass)
    # Rows were drawn in one way, but for roots alone, whose kind says nothing.
    kinds = {drawn_kind(each) for each in rows.proposals if len(each.tree) > 1}
    renews = kinds == {ProposalKind.SAMPLED_WITHOUT_REPLACEMENT}
    for level in plan.levels:
        slots = slice(level.begin, level.begin + len(level.nodes))
        _try_children(level, mass[slots], None if q is None else q[slots], renews, rows.tokens, kept, entered, undrawn)
    odds = torch.where(entered, kept, 0.0).gather(1, plan.order).masked_fill_(plan.order == 0, 0.0)
    uniforms = rows.uniforms(plan.order.shape[1] + 1)
    test, tested = first_accepted(odds, uniforms)
    node = torch.cat([plan.order, torch.zeros_like(plan.order[:, :1])], 1).gather(1, test[:, None]).squeeze(1)
    slot = plan.slots.gather(1, node[:, None])
    weights = torch.where(slot < 0, rows.target.at(rows.roots + node), mass[slot.squeeze(1).clamp(min=0)])
    return written(rows, node, weights, uniforms, tested, undrawn.any(1))


def _try_children(
    level: _Level,
    mass: Float[Tensor, "parents vocab"],
    q: Float[Tensor, "parents vocab"] | None,
    renews: bool,
    tokens: Int[Tensor, "rows nodes"],
    kept: Float64[Tensor, "rows nodes"],
    entered: Bool[Tensor, "rows nodes"],
    undrawn: Bool[Tensor, "rows nodes"],
) -> None:
    """Try the children of a level's nodes in draw order; ``mass`` becomes A p as it is behind the last of them.

    Enters the probabilities of the children in ``kept``, and the last ones of the nodes themselves.
    """
    kept, entered, undrawn, tokens = (each.view(-1) for each in (kept, entered, undrawn, tokens))
    left_kept, lives = kept[level.nodes], entered[level.nodes]
    mass *= left_kept.to(mass.dtype)[:, None]
    before = None
    for trial in level.trials:
        count, token = trial.count, tokens[trial.children][:, None]
        if renews and before is not None and q is not None:
            q[:count].scatter_(1, before[:count], 0.0)
            q[:count] /= q[:count].sum(-1, keepdim=True)
        before = token
        q_now = _q_now(q, trial, token, mass)
        own = mass[:count]
        ratio = (own.gather(1, token) / q_now.gather(1, token)).squeeze(1)
        alive = lives[:count]
        undrawn[trial.children] = alive & ~(ratio < torch.inf)
        enters = alive & (ratio > 0)
        entered[trial.children] = enters
        kept[trial.children] = torch.where(enters, ratio.double().clamp(max=1.0), 0.0)
        # Nobody reads the mass of a node without a residual but that of a root, which is drawn from as it was before.
        residual = (own - q_now if level.begin == 0 else own.sub_(q_now)).clamp_(min=0)
        left = residual.sum(-1)
        goes_on = alive & (left > 0)
        rest = torch.where(goes_on, left.double() + (1 - left_kept[:count]), 1.0)
        residual /= rest.to(residual.dtype)[:, None]
        if level.begin == 0:
            own.copy_(torch.where(goes_on[:, None], residual, own))
        left_kept[:count] = torch.where(goes_on, left.double() / rest, 0.0)
        lives[:count] = goes_on
    kept[level.nodes] = left_kept


def _q_now(
    q: Float[Tensor, "parents vocab"] | None, trial: _Trial, token: Int[Tensor, "count 1"], like: Tensor
) -> Float[Tensor, "count vocab"]:
    """Return the q of the child that is tried; of a child that was not drawn it is delta(x)."""
    if trial.drawn is True:
        assert q is not None
        return q[: trial.count]
    delta = torch.zeros_like(like[: trial.count]).scatter_(1, token, 1.0)
    if trial.drawn is False or q is None:
        return delta
    return torch.where(trial.drawn[:, None], q[: trial.count], delta)


def drawn_kind(proposal: Proposal) -> ProposalKind:
    """Return the way in which the drawn part of a proposal was drawn."""
    return proposal.drawn.kind if proposal.drawn else proposal.kind


def _plan_of(rows: Rows) -> _Plan:
    shapes = tuple(proposal.tree.shape for proposal in rows.proposals)
    drawn = tuple(
        0 if proposal.q is None else proposal.drawn.nodes if proposal.drawn else len(proposal.tree)
        for proposal in rows.proposals
    )
    q_rows = tuple(0 if proposal.q is None else len(proposal.q) for proposal in rows.proposals)
    return _plan(shapes, drawn, q_rows, rows.device)


def _q_of(
    proposals: Sequence[Proposal], plan: _Plan, like: Float[Tensor, "slots vocab"]
) -> Float[Tensor, "slots vocab"] | None:
    """Return the q of every parent, in a tensor of its own; None if no proposal carries any."""
    given = [proposal.q for proposal in proposals if proposal.q is not None]
    if not given:
        return None
    return torch.cat([*given, like.new_zeros(1, like.shape[1])])[plan.q_rows]
