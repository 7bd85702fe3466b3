"""Verdicts for the rows of a batch: sampling controls on the target's logits, then each row's acceptance rule.

`sampled_verify` and block verification of drawn chains can decide many rows at once, with the same arithmetic on the
same random numbers. All other rules decide row by row. On most CPU batches these two also decide row by row: a single
row stays in the processor's cache and stops as soon as it is decided.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from decoding.rules.drawing import NO_WEIGHT, GeneratorSource, inverse_cdf
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, best_tokens, probabilities
from decoding.rules.tree import TokenTree, fetch_tokens
from decoding.rules.verify import BLOCK_VERIFICATION, SAMPLED_VERIFY, Rule, Verdict, lossless_rule

_WALKERS = 16  # number of rows with drafted tokens from which walking all trees at once is faster on the CPU


def decide(
    proposals: Sequence[Proposal],
    logits: Float[Tensor, "rows nodes vocab"],
    sampling: SamplingConfig,
    rule: Rule | None,
    history: HistoryRows | None,
    sources: Sequence[GeneratorSource],
) -> list[Verdict]:
    """Return a verdict for each row: the accepted path and the target's own token after it.

    Shorter rows are padded in ``logits``. ``history`` has a row for each node of each tree, one tree after the other;
    it is None if no control reads it. ``rule`` None means the lossless rule that fits each proposal. At temperature 0
    every rule is the greedy rule: the argmax decides.
    """
    trees = [proposal.tree for proposal in proposals]
    target = _Target(trees, logits, sampling, history)
    if sampling.greedy:
        best: list[int] = fetch_tokens(trees, [best_tokens(adjusted_logits(target.logits, sampling, history))])[0]
        return [
            Verdict(*tree.descend(best[first : first + len(tree)]))
            for tree, first in zip(trees, target.first, strict=True)
        ]
    rules = [_rule_of(proposal, rule) for proposal in proposals]
    walking = [row for row, of_row in enumerate(rules) if of_row is SAMPLED_VERIFY]
    climbing = [
        row for row, of_row in enumerate(rules) if of_row is BLOCK_VERIFICATION and proposals[row].q is not None
    ]
    drafted, found, decided = sum(len(trees[row]) > 1 for row in walking), list[Tensor](), list[int]()
    for rows, decide_rows, count in ((walking, _walk, drafted), (climbing, _climb, 0)):
        if rows and _pays(logits, count):
            found.append(decide_rows([proposals[row] for row in rows], [sources[row] for row in rows], target, rows))
            decided += rows
    # Fetched together with the tokens of all rows, in one transfer.
    values = [value for part in fetch_tokens(trees, [torch.cat(found).flatten()] if found else []) for value in part]
    verdicts = dict[int, Verdict]()
    for row, node, token, numbers in zip(decided, values[::3], values[1::3], values[2::3], strict=True):
        if token == logits.shape[-1]:
            raise ValueError(NO_WEIGHT)
        sources[row].skip(numbers)
        verdicts[row] = Verdict(trees[row].shape.path(node), token)
    return [
        verdicts[row] if row in verdicts else of_row.decide(proposals[row], target.of_row(row), sources[row])
        for row, of_row in enumerate(rules)
    ]


def _rule_of(proposal: Proposal, rule: Rule | None) -> Rule:
    """Return the rule of a row. A root alone fits every rule, because all rules draw from p after it."""
    if len(proposal.tree) == 1:
        return SAMPLED_VERIFY
    of_row = rule or lossless_rule(proposal)
    of_row.check((proposal.kind,), proposal.tree.shape.is_chain)
    return of_row


def _pays(logits: Float[Tensor, "rows nodes vocab"], drafted: int) -> bool:
    """Return True if deciding all rows at once is faster; ``drafted`` rows have more than a root.

    A CPU does not wait for a device, so only many rows gain. MPS has no float64.
    """
    return drafted >= _WALKERS if logits.is_cpu else not logits.is_mps


class _Target:
    """The target's distribution at the nodes of all trees, computed only at the nodes that a rule reads.

    Nodes are numbered across all trees: ``first[row]`` is the row's root, and its other nodes follow. ``logits`` has a
    row for each number, including padding.
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
        if history is not None:  # history has no rows for padding
            self.logits = torch.cat([logits[row, :size] for row, size in enumerate(self._sizes)])
            self.first = [0, *accumulate(self._sizes)][:-1]
            self._p = None if sampling.greedy else probabilities(self.logits, sampling, history)

    def at(self, nodes: Int[Tensor, " nodes"] | slice) -> Float[Tensor, "nodes vocab"]:
        """Return p at these nodes."""
        return probabilities(self.logits[nodes], self._sampling) if self._p is None else self._p[nodes]

    def of_row(self, row: int) -> Float[Tensor, "nodes vocab"]:
        """Return p at all nodes of a row's tree."""
        return self.at(slice(self.first[row], self.first[row] + self._sizes[row]))


def _sent(values: Sequence[object], like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Return the values on the device of ``like``, without waiting for the device."""
    return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)


def _walk(
    proposals: Sequence[Proposal], sources: Sequence[GeneratorSource], target: _Target, rows: Sequence[int]
) -> Int[Tensor, "rows 3"]:
    """Decide ``rows`` by `sampled_verify` at once: draw at each row's node with the uniform of its depth, then follow.

    Returns each row's last node, the token after it (the vocabulary's size if no token has weight), and how many
    numbers the row's source must skip. Does not wait for a device.
    """
    trees = [proposal.tree for proposal in proposals]
    deepest = max(tree.shape.max_depth for tree in trees)
    uniforms = _sent([source.peek(deepest + 1) for source in sources], target.logits, torch.float64)
    roots = _sent([target.first[row] for row in rows], target.logits)
    parents = _sent(_padded([tree.shape.parents for tree in trees], -1), target.logits)
    tokens = _tokens(trees, target.logits.device)
    node, token, taken = (torch.zeros_like(roots) for _ in range(3))
    walking = torch.ones_like(roots, dtype=torch.bool)
    for depth in range(deepest + 1):
        here = _still(walking)
        if not len(here):
            break
        at, walks = node[here], walking[here]
        drawn = inverse_cdf(target.at(roots[here] + at), uniforms[here, depth])
        holds = (parents[here] == at[:, None]) & (tokens[here] == drawn[:, None])
        walking[here] = goes_on = walks & holds.any(1)
        node[here] = torch.where(goes_on, holds.int().argmax(1), at)  # the first child with the token
        token[here] = torch.where(walks, drawn, token[here])
        taken[here] += walks
    return torch.stack([node, token, taken], dim=1)


def _climb(
    proposals: Sequence[Proposal], sources: Sequence[GeneratorSource], target: _Target, rows: Sequence[int]
) -> Int[Tensor, "rows 3"]:
    """Decide chains drawn from q by `traversal_verification` at once; returns the same as `_walk`.

    Going down the chain, A at each node needs no random number. Then from the deepest node up to the root, the next
    number decides whether the node is kept. The letters are as in the rule.
    """
    trees = [proposal.tree for proposal in proposals]
    depths = [tree.shape.max_depth for tree in trees]
    deepest, own = max(depths), _sent(depths, target.logits)[:, None]
    uniforms = _sent([source.peek(deepest + 1) for source in sources], target.logits, torch.float64)
    places = [
        [target.first[row] + min(node, last) for node in range(deepest + 1)]
        for row, last in zip(rows, depths, strict=True)
    ]
    p = target.at(_sent(places, target.logits).flatten()).unflatten(0, (len(rows), -1))
    drawn = zip(proposals, depths, strict=True)
    q = pad_sequence([row.q[:last] for row, last in drawn if row.q is not None], batch_first=True)
    token = _tokens(trees, p.device)[:, 1:, None]
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
    here, at = torch.arange(len(rows), device=p.device), last[:, 0]
    whole = p[here, at]
    rest = (whole * a.gather(1, last) - q[here, at.clamp(max=deepest - 1)]).clamp(min=0)
    ends = (last == own) | (F.pad(left, (0, 1)).gather(1, last) == 0)
    written = inverse_cdf(torch.where(ends, whole, rest), uniforms.gather(1, taken)[:, 0])
    return torch.stack([at, written, taken[:, 0] + 1], dim=1)


def _still(walking: Bool[Tensor, " rows"]) -> Int[Tensor, " some"]:
    """Return the rows still walking, or all rows if selecting them would wait for a device."""
    return walking.nonzero().squeeze(1) if walking.is_cpu else torch.arange(len(walking), device=walking.device)


def _tokens(trees: Sequence[TokenTree], device: torch.device) -> Int[Tensor, "rows nodes"]:
    """Return the tokens of the trees, with smaller trees padded."""
    if all(tree.on_host for tree in trees):
        return torch.tensor(_padded([tree.token_list for tree in trees], 0)).to(device, non_blocking=True)
    return pad_sequence([tree.tokens.to(device) for tree in trees], batch_first=True)


def _padded(lists: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    """Return the lists padded to the longest length."""
    longest = max(map(len, lists))
    return [[*values, *[fill] * (longest - len(values))] for values in lists]
