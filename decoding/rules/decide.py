"""Verdicts for the rows of a batch: the sampling controls are applied to the target's logits, and then a rule judges
each row. On an accelerator (except MPS), all rows with the same rule are judged together if `decoding.rules.at_once`
has a function for the rule and these proposals. On a CPU the rows are judged one by one, because a single row fits into
the processor's cache, and its computation stops as soon as its verdict is known; only large batches of `sampled_verify`
are judged together.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.errors import UserError
from decoding.rules.at_once import Undecided, at_once
from decoding.rules.drawing import NO_WEIGHT, GeneratorSource
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, best_tokens, probabilities
from decoding.rules.tree import Proposal, TokenTree, fetch_tokens
from decoding.rules.verify import SAMPLED_VERIFY, Rule, Verdict, lossless_rule

_WALKERS = 16  # from this many drafted rows on, walking all trees together is faster on the CPU


def decide(
    proposals: Sequence[Proposal],
    logits: Float[Tensor, "rows nodes vocab"],
    sampling: SamplingConfig,
    rule: Rule | None,
    history: HistoryRows | None,
    sources: Sequence[GeneratorSource],
) -> list[Verdict]:
    """Return a verdict for each row: the accepted path and the target's own token after it.

    In ``logits`` shorter rows are padded. ``history`` has a row for each node of each tree, one tree after the other;
    it is None if no control reads the history. If ``rule`` is None, each proposal is judged by the lossless rule that
    fits it. At temperature 0 every rule is the greedy rule, which follows the argmax.
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
    parts, decided = list[Tensor](), list[int]()
    for used in {id(of_row): of_row for of_row in rules}.values():  # a user's own rules may not be hashable
        rows = [row for row, of_row in enumerate(rules) if of_row is used]
        drafted = sum(len(trees[row]) > 1 for row in rows if used is SAMPLED_VERIFY)
        of_rows = [proposals[row] for row in rows]
        if (decide_rows := at_once(used, of_rows)) and _pays(logits, drafted):
            of_sources, first = [sources[row] for row in rows], [target.first[row] for row in rows]
            parts.append(decide_rows(Undecided(of_rows, of_sources, target.at, first, logits.device)))
            decided += rows
    # Fetched together with the tokens of all rows, in one transfer.
    values = [value for part in fetch_tokens(trees, [torch.cat(parts).flatten()] if parts else []) for value in part]
    verdicts = dict[int, Verdict]()
    for row, node, token, numbers in zip(decided, values[::3], values[1::3], values[2::3], strict=True):
        if token == logits.shape[-1]:
            raise UserError(NO_WEIGHT)
        sources[row].skip(numbers)
        verdicts[row] = Verdict(trees[row].shape.path(node), token)
    return [
        verdicts[row] if row in verdicts else of_row.decide(proposals[row], target.of_row(row), sources[row])
        for row, of_row in enumerate(rules)
    ]


def _rule_of(proposal: Proposal, rule: Rule | None) -> Rule:
    """Return the rule that judges a row.

    A tree with only a root fits every rule, because all rules draw from p after the root.
    """
    if len(proposal.tree) == 1:
        return SAMPLED_VERIFY
    of_row = rule or lossless_rule(proposal)
    of_row.check((proposal.kind,), proposal.tree.shape.is_chain)
    return of_row


def _pays(logits: Float[Tensor, "rows nodes vocab"], drafted: int) -> bool:
    """Return True if it is faster to judge all rows together. ``drafted`` is the number of rows with drafted tokens.

    On a CPU, which does not wait for a device, this is so only for many rows. MPS has no float64.
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
        if history is not None:  # history omits padding
            self.logits = torch.cat([logits[row, :size] for row, size in enumerate(self._sizes)])
            self.first = [0, *accumulate(self._sizes)][:-1]
            self._p = None if sampling.greedy else probabilities(self.logits, sampling, history)

    def at(self, nodes: Int[Tensor, " nodes"] | slice) -> Float[Tensor, "nodes vocab"]:
        """Return the target's distribution p at these nodes."""
        return probabilities(self.logits[nodes], self._sampling) if self._p is None else self._p[nodes]

    def of_row(self, row: int) -> Float[Tensor, "nodes vocab"]:
        """Return the target's distribution p at all nodes of a row's tree."""
        return self.at(slice(self.first[row], self.first[row] + self._sizes[row]))
