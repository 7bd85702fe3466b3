"""Verdicts for a batch's rows: the target's logits under the sampling controls, then each row's acceptance rule."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from decoding.rules.drawing import NO_WEIGHT, GeneratorSource
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, best_tokens
from decoding.rules.traversal_rows import drawn_kind, traversal_verification_rows
from decoding.rules.tree import fetch_tokens
from decoding.rules.verify import (
    SAMPLED_VERIFY,
    UNDRAWN,
    Decide,
    Rule,
    Verdict,
    block_verification,
    lossless_rule,
    sampled_verify,
    token_rejection,
    traversal_verification,
)
from decoding.rules.verify_rows import (
    RowRule,
    Rows,
    TargetRows,
    block_verification_rows,
    sampled_verify_rows,
    token_rejection_rows,
)

ROW_RULES: dict[Decide, RowRule] = {
    sampled_verify: sampled_verify_rows,
    token_rejection: token_rejection_rows,
    block_verification: block_verification_rows,
    traversal_verification: traversal_verification_rows,
}
"""The rule for many rows of each readable rule that has one; rows of other rules are decided one by one."""


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

    On a device, the rows of a rule in `ROW_RULES` are decided at once; all verdicts come to the host in one transfer.
    """
    trees = [proposal.tree for proposal in proposals]
    target = TargetRows(trees, logits, sampling, history)
    if sampling.greedy:
        best: list[int] = fetch_tokens(trees, [best_tokens(adjusted_logits(target.logits, sampling, history))])[0]
        return [
            Verdict(*tree.descend(best[first : first + len(tree)]))
            for tree, first in zip(trees, target.first, strict=True)
        ]
    groups: list[tuple[Rows, Tensor]] = []
    one_by_one: list[tuple[int, Rule]] = []
    for group_rule, numbers in _groups(proposals, rule):
        drafted = sum(len(proposals[number].tree) > 1 for number in numbers)
        if group_rule.decide not in ROW_RULES or not _pays(group_rule, logits, drafted):
            one_by_one += [(number, group_rule) for number in numbers]
            continue
        rows = Rows([proposals[n] for n in numbers], [sources[n] for n in numbers], target, numbers)
        groups.append((rows, ROW_RULES[group_rule.decide](rows)))
    lists = fetch_tokens(trees, [found.flatten() for _, found in groups])
    verdicts = {number: each(proposals[number], target.of_row(number), sources[number]) for number, each in one_by_one}
    for (rows, _), found in zip(groups, lists, strict=True):
        verdicts.update(zip(rows.numbers, _read(found, rows, logits.shape[2]), strict=True))
    return [verdicts[number] for number in range(len(proposals))]


def _pays(rule: Rule, logits: Float[Tensor, "rows nodes vocab"], drafted: int) -> bool:
    """Return True where deciding all rows at once is faster than one by one; ``drafted`` of them are no roots alone.

    On the CPU nothing waits: a row alone stays in the cache and stops where its decision falls, so that only a walk,
    which stops as well, gains from company. MPS has no float64.
    """
    if logits.is_cpu:
        return rule.decide is sampled_verify and drafted >= _WALKERS
    return not logits.is_mps


def _groups(proposals: Sequence[Proposal], rule: Rule | None) -> list[tuple[Rule, list[int]]]:
    """Group the rows by their rules, for traversal also by the way in which they were drawn; roots alone join any."""
    members: dict[tuple[Rule, ProposalKind | None], list[int]] = {}
    roots = []
    for number, proposal in enumerate(proposals):
        if len(proposal.tree) == 1:
            roots.append(number)
            continue
        of_row = rule or lossless_rule(proposal)
        of_row.check((proposal.kind,), proposal.tree.shape.is_chain)
        kind = drawn_kind(proposal) if of_row.decide is traversal_verification else None
        members.setdefault((of_row, kind), []).append(number)
    groups = [(of_group, numbers) for (of_group, _), numbers in members.items()]
    if roots:  # some rules refuse their kind; there, all rules draw from p
        fitting = [numbers for of_group, numbers in groups if of_group.decide in ROW_RULES]
        if fitting:
            fitting[0] += roots
        else:
            groups.append((SAMPLED_VERIFY, roots))
    return groups


def _read(found: Sequence[int], rows: Rows, vocab: int) -> list[Verdict]:
    """Read a group's verdicts; the sources skip the numbers that were taken. ValueError where no token has weight."""
    verdicts = []
    for row, (proposal, source) in enumerate(zip(rows.proposals, rows.sources, strict=True)):
        node, token, taken, undrawn = found[4 * row : 4 * row + 4]
        assert not undrawn, UNDRAWN
        if token == vocab:
            raise ValueError(NO_WEIGHT)
        source.skip(taken)
        verdicts.append(Verdict(proposal.tree.shape.path(node), token))
    return verdicts
