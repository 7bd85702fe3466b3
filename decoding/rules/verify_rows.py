"""The acceptance rules of `decoding.rules.verify` for all rows of a batch at once.

Each function here finds what the readable rule of the same name decides in every row: the same verdict, by the same
arithmetic, from the same numbers of the row's source. It computes on the logits' device and never waits for it: the
numbers that a row may need are looked at beforehand, and the row's source skips those that were taken afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.rules.drawing import GeneratorSource, inverse_cdf
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import TokenTree


class TargetRows:
    """The target's distribution at the nodes of all trees, computed at those nodes that a rule asks for.

    Nodes are numbered through all trees: ``first[row]`` is the row's root, and its other nodes follow. ``logits`` has a
    row for each number; where the trees differ in size some are padding.
    """

    def __init__(
        self,
        trees: Sequence[TokenTree],
        logits: Float[Tensor, "rows nodes vocab"],
        sampling: SamplingConfig,
        history: HistoryRows | None,
    ) -> None:
        self._sampling = sampling
        self._sizes = [len(tree) for tree in trees]
        self._p: Tensor | None = None
        self.logits = logits.flatten(0, 1)
        self.first = [row * logits.shape[1] for row in range(len(trees))]
        if history is not None:  # has no rows for padding
            self.logits = torch.cat([logits[row, :size] for row, size in enumerate(self._sizes)])
            self.first = [0, *accumulate(self._sizes)][:-1]
            self._p = None if sampling.greedy else probabilities(self.logits, sampling, history)

    def at(self, nodes: Int[Tensor, " nodes"]) -> Float[Tensor, "nodes vocab"]:
        """Return p at these nodes, in a tensor of its own."""
        return probabilities(self.logits[nodes], self._sampling) if self._p is None else self._p[nodes]

    def of_row(self, row: int) -> Float[Tensor, "nodes vocab"]:
        """Return p at all nodes of a row's tree."""
        nodes = slice(self.first[row], self.first[row] + self._sizes[row])
        return probabilities(self.logits[nodes], self._sampling) if self._p is None else self._p[nodes]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that one rule decides: the ``numbers`` of them, with their proposals and sources."""

    proposals: Sequence[Proposal]
    sources: Sequence[GeneratorSource]
    target: TargetRows
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.proposals)

    @property
    def device(self) -> torch.device:
        return self.target.logits.device

    @cached_property
    def roots(self) -> Int[Tensor, " rows"]:
        """Number of each row's root in `TargetRows`."""
        return self.on_device([self.target.first[number] for number in self.numbers])

    @cached_property
    def every(self) -> Int[Tensor, " rows"]:
        """Numbers from 0 to rows - 1."""
        return torch.arange(len(self), device=self.device)

    @cached_property
    def tokens(self) -> Int[Tensor, "rows nodes"]:
        """Tokens of the trees, the smaller ones padded."""
        trees = [proposal.tree for proposal in self.proposals]
        if all(tree.on_host for tree in trees):
            return self.on_device(padded([tree.token_list for tree in trees], 0))
        return pad_sequence([tree.tokens.to(self.device) for tree in trees], batch_first=True)

    def uniforms(self, count: int) -> Float64[Tensor, "rows count"]:
        """Return the next ``count`` numbers of each row's source, which are not taken yet."""
        return self.on_device([source.peek(count) for source in self.sources], torch.float64)

    def on_device(self, values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        """Copy numbers to the device, without waiting for the work queued on it."""
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


RowRule = Callable[[Rows], Int[Tensor, "rows 4"]]
"""A rule for all rows: the last accepted node, the token, how many numbers were taken, and 1 if a token has q = 0."""


def sampled_verify_rows(rows: Rows) -> Int[Tensor, "rows 4"]:
    """Walk down all trees at once: draw a token at each row's node, by the uniform of its depth, and follow it."""
    shapes = [proposal.tree.shape for proposal in rows.proposals]
    deepest = max(shape.max_depth for shape in shapes)
    uniforms = rows.uniforms(deepest + 1)
    parents = rows.on_device(padded([shape.parents for shape in shapes], -1))
    node, token, taken = (torch.zeros_like(rows.every) for _ in range(3))
    walking = torch.ones_like(rows.every, dtype=torch.bool)
    for depth in range(deepest + 1):
        here = _still(walking, rows)
        if not len(here):
            break
        at, walks = node[here], walking[here]
        drawn = inverse_cdf(rows.target.at(rows.roots[here] + at), uniforms[here, depth])
        holds = (parents[here] == at[:, None]) & (rows.tokens[here] == drawn[:, None])
        walking[here] = goes_on = walks & holds.any(1)
        node[here] = torch.where(goes_on, holds.int().argmax(1), at)  # the first child that holds the token
        token[here] = torch.where(walks, drawn, token[here])
        taken[here] += walks
    return torch.stack([node, token, taken, torch.zeros_like(node)], dim=1)


def _still(walking: Bool[Tensor, " rows"], rows: Rows) -> Int[Tensor, " some"]:
    """Return the rows to go on with: all of them where asking which ones still walk would wait for a device."""
    return walking.nonzero().squeeze(1) if walking.is_cpu else rows.every


@dataclass(frozen=True)
class _Chains:
    """The chains of all rows, the shorter ones padded: distributions and ratios at each place."""

    lengths: Int[Tensor, " rows"]
    p: Float[Tensor, "rows places_and_end vocab"]
    q: Float[Tensor, "rows places vocab"]
    drafted: Bool[Tensor, "rows places"]
    """False at padding."""
    ratios: Float64[Tensor, "rows places"]
    """p(x)/q(x) of each drafted token x."""
    undrawn: Bool[Tensor, " rows"]

    @staticmethod
    def of(rows: Rows) -> "_Chains":
        sizes = [len(proposal.tree) for proposal in rows.proposals]
        longest = max(sizes) - 1
        lengths = rows.on_device(sizes) - 1
        places = torch.arange(longest + 1, device=rows.device)
        nodes = rows.roots[:, None] + torch.minimum(places, lengths[:, None])
        p = rows.target.at(nodes.flatten()).unflatten(0, nodes.shape)
        q = _chain_q(rows.proposals, longest, p)
        drawn = rows.tokens[:, 1:, None]
        drafted = places[:-1] < lengths[:, None]
        ratios = (p[:, :-1].gather(2, drawn) / q.gather(2, drawn)).squeeze(2).double()
        undrawn = (drafted & ~(ratios < torch.inf)).any(1)
        return _Chains(lengths, p, q, drafted, ratios, undrawn)


def _chain_q(
    proposals: Sequence[Proposal], longest: int, like: Float[Tensor, "rows places_and_end vocab"]
) -> Float[Tensor, "rows places vocab"]:
    """Stack the q of chains; a deterministic token counts as drawn from delta(x), and padding has no q."""
    lengths = [len(proposal.tree) - 1 for proposal in proposals]
    given = [proposal.q[:length] for proposal, length in zip(proposals, lengths, strict=True) if proposal.q is not None]
    if len(given) == len(proposals) and set(lengths) == {longest}:
        return torch.stack(given)
    q = like.new_zeros(len(proposals), longest, like.shape[2])
    for row, (proposal, length) in enumerate(zip(proposals, lengths, strict=True)):
        if proposal.q is not None:
            q[row, :length] = proposal.q[:length]
        else:
            q[row, :length].scatter_(1, proposal.tree.tokens[1:, None].to(q.device), 1.0)
    return q


def token_rejection_rows(rows: Rows) -> Int[Tensor, "rows 4"]:
    """Test every token of each chain by its own uniform: the first that fails ends it."""
    chains = _Chains.of(rows)
    places = chains.ratios.shape[1]
    uniforms = rows.uniforms(places + 1)
    passed = chains.drafted & (uniforms[:, :places] < chains.ratios)
    kept = passed.int().cumprod(1).sum(1)
    whole = kept == chains.lengths
    p = chains.p[rows.every, kept]
    positive = (p - chains.q[rows.every, kept.clamp(max=places - 1)]).clamp(min=0)
    total = positive.sum(-1)
    from_p = whole | ~(total > 0)
    weights = torch.where(from_p[:, None], p, positive / total[:, None])
    tested = kept + ~whole
    return written(rows, kept, weights, uniforms, tested, chains.undrawn)


def block_verification_rows(rows: Rows) -> Int[Tensor, "rows 4"]:
    """Test each whole chain, then its prefixes from the longest down: the first that is kept decides."""
    chains = _Chains.of(rows)
    places = chains.ratios.shape[1]
    reach = [torch.ones_like(chains.ratios[:, 0])]
    for ratio in chains.ratios.T:
        reach.append((reach[-1] * ratio).clamp(max=1.0))
    reached = torch.stack(reach, dim=1)
    scale = reached[:, :-1].to(chains.p.dtype)
    residuals = (chains.p[:, :-1] * scale[:, :, None]).sub_(chains.q).clamp_(min=0)
    masses = residuals.sum(-1).double()
    share = masses / (masses + (1 - reached[:, :-1]))
    share = torch.where((masses > 0) & (reached[:, :-1] > 0), share, 0.0)
    # Test 0 is that of the whole chain, test k that of its first length - k tokens; the empty prefix needs none.
    length = chains.lengths[:, None]
    prefix = length - torch.arange(1, places, device=rows.device)
    of_prefix = torch.where(prefix > 0, share.gather(1, prefix.clamp(min=0)), 0.0)
    of_whole = torch.where(length > 0, reached.gather(1, length), 0.0)
    uniforms = rows.uniforms(places + 1)
    test, tested = first_accepted(torch.cat([of_whole, of_prefix], dim=1), uniforms)
    kept = (chains.lengths - test).clamp(min=0)
    whole = kept == chains.lengths
    place = kept.clamp(max=places - 1)
    from_p = whole | ~(masses[rows.every, place] > 0)
    weights = torch.where(from_p[:, None], chains.p[rows.every, kept], residuals[rows.every, place])
    return written(rows, kept, weights, uniforms, tested, chains.undrawn)


def first_accepted(
    odds: Float64[Tensor, "rows tests"], uniforms: Float64[Tensor, "rows count"]
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Return the first test that each row passes, the number of tests if none, and the count of uniforms it took.

    A test of probability 0 takes no uniform.
    """
    takes = odds > 0
    before = takes.cumsum(1)
    passed = takes & (uniforms.gather(1, (before - 1).clamp(min=0)) < odds)
    none = torch.full_like(before[:, :1], odds.shape[1])
    first = torch.cat([torch.where(passed, torch.arange(odds.shape[1], device=odds.device), none), none], 1)
    test = first.amin(1)
    taken = before.gather(1, test.clamp(max=odds.shape[1] - 1)[:, None]).squeeze(1)
    return test, taken


def written(
    rows: Rows,
    node: Int[Tensor, " rows"],
    weights: Float[Tensor, "rows vocab"],
    uniforms: Float64[Tensor, "rows count"],
    tested: Int[Tensor, " rows"],
    undrawn: Bool[Tensor, " rows"],
) -> Int[Tensor, "rows 4"]:
    """Draw each row's token from its weights, by the uniform after those that its tests took."""
    token = inverse_cdf(weights, uniforms.gather(1, tested[:, None]).squeeze(1))
    return torch.stack([node, token, tested + 1, undrawn.long()], dim=1)


def padded(lists: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    """Return the lists at the length of the longest one."""
    longest = max(map(len, lists))
    return [[*values, *[fill] * (longest - len(values))] for values in lists]
