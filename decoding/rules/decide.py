"""Verdicts for a batch's rows: the target's logits under the sampling controls, then each row's acceptance rule."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.rules.proposal import Proposal
from decoding.rules.sampling import HistoryRows, RandomSource, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import fetch_tokens
from decoding.rules.verify import Rule, Verdict, lossless_rule


def decide(
    proposals: Sequence[Proposal],
    logits: Float[Tensor, "rows nodes vocab"],
    sampling: SamplingConfig,
    rule: Rule | None,
    history: HistoryRows | None,
    sources: Sequence[RandomSource],
) -> list[Verdict]:
    """Return a verdict for each row: the accepted path and the target's own token after it.

    Rows with fewer nodes than others are padded in ``logits``. ``history`` has a row for each node of each tree, one
    tree after the other; None if no control reads it. ``rule`` None takes the lossless rule that fits each proposal. At
    temperature 0 every rule is the greedy one: the argmax decides.
    """
    trees = [proposal.tree for proposal in proposals]
    sizes = [len(tree) for tree in trees]
    equal = set(sizes) == {logits.shape[1]}
    flat = logits.flatten(0, 1) if equal else torch.cat([logits[row, :size] for row, size in enumerate(sizes)])
    if sampling.greedy:
        best = adjusted_logits(flat, sampling, history).argmax(-1).split(sizes)
        best_lists = fetch_tokens(trees, best)
        return [Verdict(*tree.descend(tokens)) for tree, tokens in zip(trees, best_lists, strict=True)]
    p = probabilities(flat, sampling, history).split(sizes)
    fetch_tokens(trees)
    return [_rule_for(proposal, rule)(proposal, p[row], sources[row]) for row, proposal in enumerate(proposals)]


def _rule_for(proposal: Proposal, rule: Rule | None) -> Rule:
    # The root alone is a deterministic proposal, which some rules refuse; there, all rules would draw from p.
    return rule if rule and len(proposal.tree) > 1 else lossless_rule(proposal)
