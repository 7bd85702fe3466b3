"""The acceptance rules beside one another: how much each keeps, by exact enumeration, and where two are one."""

import pytest
import torch
from enumerated_rules import enumerated
from torch import Tensor

from decoding.measure.proof.enumeration import (
    ALL_MODELS,
    CHAINS,
    LOSSLESS,
    TREES,
    ContextModel,
    Draft,
    deterministic_draft,
    distribution,
    model_pair,
    outcomes,
    sampled_draft,
    target_rows,
    top_tokens,
    verdicts,
)
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind, TreeShape
from decoding.rules.verify import (
    BLOCK_VERIFICATION,
    RECURSIVE_REJECTION,
    SAMPLED_VERIFY,
    TOKEN_REJECTION,
    TOP_K_CHILDREN,
    TRAVERSAL_VERIFICATION,
    Rule,
    Verdict,
)

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT


# --- how much is accepted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", ALL_MODELS)
def test_one_token_is_accepted_with_the_probability_each_rule_promises(models: str) -> None:
    for seed in range(5):
        p, q = model_pair(models, 4, 1, seed)
        drawn = sampled_draft(TreeShape.chain(1), q, WITH)
        overlap = float(torch.minimum(p(()), q(())).sum())
        for rule in (TOKEN_REJECTION, BLOCK_VERIFICATION, RECURSIVE_REJECTION, TRAVERSAL_VERIFICATION):
            assert length_of(drawn, rule, p) == pytest.approx(overlap, abs=LOSSLESS)
        assert length_of(drawn, SAMPLED_VERIFY, p) == pytest.approx(float(p(()) @ q(())), abs=LOSSLESS)
        best_two = deterministic_draft(TreeShape((-1, 0, 0)), top_tokens(q))
        of_set = float(p(())[top_tokens(q)((), 2)].sum())
        for rule in (SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION):
            assert length_of(best_two, rule, p) == pytest.approx(of_set, abs=LOSSLESS)


def length_of(draft: Draft, rule: Rule, p: ContextModel) -> float:
    return sum(len(verdict.path) * probability for _, verdict, probability in verdicts(draft, rule, p))


def test_the_block_papers_own_example() -> None:
    # p = (1/3, 2/3) and q = (2/3, 1/3) in every context: token rejection keeps 2/3 + (2/3)**2 = 10/9 of two tokens.
    every = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    p = ContextModel({context: torch.tensor([1.0, 2.0], dtype=torch.float64) / 3 for context in every})
    q = ContextModel({context: torch.tensor([2.0, 1.0], dtype=torch.float64) / 3 for context in every})
    draft = sampled_draft(TreeShape.chain(2), q, WITH)
    assert length_of(draft, TOKEN_REJECTION, p) == pytest.approx(10 / 9)
    assert length_of(draft, BLOCK_VERIFICATION, p) == pytest.approx(11 / 9)


# Of each pair the second keeps at least as many in expectation, on every model, and on some more.
@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (("token", WITH), ("block", WITH)),
        (("recursive", WITH), ("traversal", WITH)),
        (("recursive", WITHOUT), ("traversal", WITHOUT)),
        (("recursive", WITH), ("recursive", WITHOUT)),
        (("traversal", WITH), ("traversal", WITHOUT)),
    ],
)
def test_one_rule_keeps_at_least_as_many_as_another(
    fewer: tuple[str, ProposalKind], more: tuple[str, ProposalKind]
) -> None:
    gains = length_differences(fewer, more, CHAINS if fewer[0] == "token" else TREES)
    assert min(gains) > -LOSSLESS and max(gains) > 0.01


def length_differences(
    one: tuple[str, ProposalKind], other: tuple[str, ProposalKind], shapes: dict[str, tuple[int, ...]]
) -> list[float]:
    """Expected accepted length of the other rule and kind less that of the one, by shape and models."""
    return [
        enumerated(*other, shape, models, 0).accepted_length - enumerated(*one, shape, models, 0).accepted_length
        for shape in shapes
        for models in ALL_MODELS
    ]


# --- the rules beside one another -----------------------------------------------------------------------------------


def block_forwards(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Block verification as its paper writes it: every position tested, the last to hold counts."""
    tokens, q = proposal.tree.token_list, proposal.q
    assert q is not None
    length, reach, kept, weights = len(tokens) - 1, 1.0, 0, (p[0] - q[0]).clamp(min=0)
    for position in range(1, length + 1):
        reach = min(1.0, reach * float(p[position - 1, tokens[position]] / q[position - 1, tokens[position]]))
        whole = position == length
        residual = p[position] if whole else (reach * p[position] - q[position]).clamp(min=0)
        left = float(residual.sum())
        share = reach if whole else 0.0 if left == 0 else left / (left + (1 - reach))
        if source.accept(share):
            kept, weights = position, residual
    return Verdict(tuple(range(1, kept + 1)), source.draw(weights if bool(weights.any()) else p[kept]))


def every_chain(q: ContextModel, length: int, kind: ProposalKind = WITH) -> list[Proposal]:
    """Every chain that q can draft."""
    return [proposal for proposal, _ in outcomes(sampled_draft(TreeShape.chain(length), q, kind))]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (RECURSIVE_REJECTION, TOKEN_REJECTION, WITH),
        (TRAVERSAL_VERIFICATION, BLOCK_VERIFICATION, WITH),
        (BLOCK_VERIFICATION, block_forwards, WITH),
    ],
)
@pytest.mark.parametrize("models", ALL_MODELS)
def test_on_a_chain_two_rules_agree_outcome_by_outcome(one: Rule, other: Rule, kind: ProposalKind, models: str) -> None:
    p, q = model_pair(models, 3, 3, seed=0)
    for proposal in every_chain(q, 3, kind):
        rows = target_rows(proposal.tree, p)
        first, second = (
            distribution(lambda source, rule=rule, x=proposal, t=rows: rule(x, t, source)) for rule in (one, other)
        )
        assert positive(first) == pytest.approx(positive(second), abs=LOSSLESS)


def positive(found: dict[Verdict, float]) -> dict[Verdict, float]:
    """Without what only rounding makes possible."""
    return {verdict: chance for verdict, chance in found.items() if chance > LOSSLESS}
