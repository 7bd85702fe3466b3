"""Verdicts for a batch's rows: the target's logits under the sampling controls, then each row's acceptance rule.

`sampled_verify` can decide many rows at once, by the same arithmetic from the same numbers of each row's source. All
other rules decide row by row: on a CPU that is faster, since one row stays in the cache and stops where it is decided.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.rules.drawing import NO_WEIGHT, GeneratorSource, inverse_cdf
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, best_tokens, probabilities
from decoding.rules.tree import TokenTree, fetch_tokens
from decoding.rules.verify import SAMPLED_VERIFY, Rule, Verdict, lossless_rule

_WALKERS = 16
"""Least number of rows with drafted tokens that walk down their trees at once on the CPU."""


def decide(
    proposals: Sequence[Proposal],
    logits: Float[Tensor, "rows nodes vocab"],
    sampling: SamplingConfig,
    rule: Rule | None,
    history: HistoryRows | None,
    sources: Sequence[GeneratorSource],
) -> list[Verdict]:
    """Return a verdict for each row: the accepted path and the target's own token after it.

    Rows with fewer nodes than others are padded in ``logits``. ``history`` has a row for each node of each tree, one
    tree after the other; None if no control reads it. ``rule`` None takes the lossless rule that fits each proposal. At
    temperature 0 every rule is the greedy one: the argmax decides.
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
    if not _pays(logits, sum(len(trees[row]) > 1 for row in walking)):
        walking = []
    verdicts: dict[int, Verdict] = {}
    if walking:
        walked = _walk([trees[row] for row in walking], [sources[row] for row in walking], target, walking)
        verdicts = dict(zip(walking, walked, strict=True))
    fetch_tokens(trees)  # of the other rows, in one transfer
    return [
        verdicts[row] if row in verdicts else of_row.decide(proposals[row], target.of_row(row), sources[row])
        for row, of_row in enumerate(rules)
    ]


def _rule_of(proposal: Proposal, rule: Rule | None) -> Rule:
    """Return the rule of a row. Roots alone, whose kind some rules refuse, draw from p as all rules do."""
    if len(proposal.tree) == 1:
        return SAMPLED_VERIFY
    of_row = rule or lossless_rule(proposal)
    of_row.check((proposal.kind,), proposal.tree.shape.is_chain)
    return of_row


def _pays(logits: Float[Tensor, "rows nodes vocab"], drafted: int) -> bool:
    """Return True where walking at once is faster than row by row; ``drafted`` of the rows are no roots alone.

    On the CPU nothing waits, so that only many rows gain. MPS has no float64.
    """
    return drafted >= _WALKERS if logits.is_cpu else not logits.is_mps


class _Target:
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

    def at(self, nodes: Int[Tensor, " nodes"] | slice) -> Float[Tensor, "nodes vocab"]:
        """Return p at these nodes."""
        return probabilities(self.logits[nodes], self._sampling) if self._p is None else self._p[nodes]

    def of_row(self, row: int) -> Float[Tensor, "nodes vocab"]:
        """Return p at all nodes of a row's tree."""
        return self.at(slice(self.first[row], self.first[row] + self._sizes[row]))


def _walk(
    trees: Sequence[TokenTree], sources: Sequence[GeneratorSource], target: _Target, rows: Sequence[int]
) -> list[Verdict]:
    """Decide ``rows`` by `sampled_verify` at once: draw at each row's node by the uniform of its depth, and follow.

    Computes on the logits' device, with one transfer to the host. The numbers that a row may need are looked at
    beforehand, and its source skips those that were taken. ValueError where no token has weight.
    """
    device = target.logits.device

    def on_device(values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    deepest = max(tree.shape.max_depth for tree in trees)
    uniforms = on_device([source.peek(deepest + 1) for source in sources], torch.float64)
    roots = on_device([target.first[row] for row in rows])
    parents = on_device(_padded([tree.shape.parents for tree in trees], -1))
    tokens = _tokens(trees, device)
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
        node[here] = torch.where(goes_on, holds.int().argmax(1), at)  # the first child that holds the token
        token[here] = torch.where(walks, drawn, token[here])
        taken[here] += walks
    (found,) = fetch_tokens(trees, [torch.stack([node, token, taken], dim=1).flatten()])
    vocab = target.logits.shape[1]
    verdicts = []
    for index, (tree, source) in enumerate(zip(trees, sources, strict=True)):
        last, written, numbers = found[3 * index : 3 * index + 3]
        if written == vocab:
            raise ValueError(NO_WEIGHT)
        source.skip(numbers)
        verdicts.append(Verdict(tree.shape.path(last), written))
    return verdicts


def _still(walking: Bool[Tensor, " rows"]) -> Int[Tensor, " some"]:
    """Return the rows to go on with: all of them where asking which ones still walk would wait for a device."""
    return walking.nonzero().squeeze(1) if walking.is_cpu else torch.arange(len(walking), device=walking.device)


def _tokens(trees: Sequence[TokenTree], device: torch.device) -> Int[Tensor, "rows nodes"]:
    """Return the tokens of the trees, the smaller ones padded."""
    if all(tree.on_host for tree in trees):
        return torch.tensor(_padded([tree.token_list for tree in trees], 0)).to(device, non_blocking=True)
    return pad_sequence([tree.tokens.to(device) for tree in trees], batch_first=True)


def _padded(lists: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    """Return the lists at the length of the longest one."""
    longest = max(map(len, lists))
    return [[*values, *[fill] * (longest - len(values))] for values in lists]
