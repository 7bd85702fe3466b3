"""Every lossless rule, proved by enumerating each outcome of drafting and verifying."""

import pytest
import torch
from enumerated_rules import enumerated
from torch import Tensor

from decoding.measure.proof.enumeration import (
    ALL_MODELS,
    LOSSLESS,
    SHAPES,
    TREES,
    EnumeratingSource,
    deterministic_draft,
    distance_from_target,
    distribution,
    draft_of,
    model_pair,
    outcomes,
    sampled_draft,
    top_tokens,
)
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import DrawnPart, Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import (
    BLOCK_VERIFICATION,
    GREEDY,
    RECURSIVE_REJECTION,
    RULES,
    SAMPLED_VERIFY,
    TOKEN_REJECTION,
    TOP_K_CHILDREN,
    TRAVERSAL_VERIFICATION,
    Rule,
    Verdict,
    lossless_rule,
    typical_acceptance,
)

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
DETERMINISTIC = ProposalKind.DETERMINISTIC
GRAFTED = ProposalKind.GRAFTED
MIXED = ProposalKind.MIXED

# The promise of each rule: the kinds it is lossless for, and whether it takes trees.
FITS = {
    "token": ({WITH}, False),
    "block": ({WITH, DETERMINISTIC}, False),
    "recursive": ({WITH, WITHOUT, GRAFTED}, True),
    "traversal": ({WITH, WITHOUT, GRAFTED, DETERMINISTIC}, True),
    "top-k": ({DETERMINISTIC}, True),
    "sampled-verify": ({WITH, WITHOUT, GRAFTED, DETERMINISTIC, MIXED}, True),
}
CASES = [
    pytest.param(name, kind, shape, id=f"{name}, {kind.value}, {shape}")
    for name, (kinds, takes_trees) in FITS.items()
    for kind in sorted(kinds, key=lambda kind: kind.value)
    for shape in (SHAPES if takes_trees else ["chain of 2"])  # rules of chains are those of trees, by another name
]


# --- lossless rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", ALL_MODELS)
@pytest.mark.parametrize(("rule", "kind", "shape"), CASES)
def test_a_lossless_rule_emits_the_targets_distribution(rule: str, kind: ProposalKind, shape: str, models: str) -> None:
    assert enumerated(rule, kind, shape, models, 0).distance < LOSSLESS


@pytest.mark.parametrize("models", ["dense", "zeros"])
@pytest.mark.parametrize("kind", [WITH, WITHOUT, DETERMINISTIC, MIXED])
def test_the_default_rule_is_lossless_with_more_tokens_and_children(kind: ProposalKind, models: str) -> None:
    for parents in [(-1, 0), (-1, 0, 0, 0)]:
        p, q = model_pair(models, 4, 1, seed=0)
        assert distance_from_target(draft_of(kind, TreeShape(parents), q), default_rule, p, 2) < LOSSLESS


def default_rule(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    return lossless_rule(proposal)(proposal, p, source)


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION])
@pytest.mark.parametrize("tokens", [[1, 1, 1], [2, 1, 2], [0, 2, 0]])
def test_duplicate_siblings_do_no_harm(rule: Rule, tokens: list[int]) -> None:
    for models in ("dense", "one-hot target"):
        p, _ = model_pair(models, 3, 2, seed=0)
        draft = deterministic_draft(TreeShape((-1, 0, 0, 0, 1, 2, 3)), lambda context, count: tokens[:count])
        assert distance_from_target(draft, rule, p, 3) < LOSSLESS


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION, BLOCK_VERIFICATION])
def test_a_drafted_token_the_target_rules_out_is_never_kept(rule: Rule) -> None:
    # In fp32, where 1/3 and 2/3 are rounded; token 0 has probability 0 and is drafted all the same.
    proposal = Proposal(TokenTree.chain([0, 0, 1]), DETERMINISTIC)
    rows = torch.tensor([[0.0, 1 / 3, 2 / 3]] * 3)
    assert {verdict.path for verdict in distribution(lambda source: rule(proposal, rows, source))} == {()}


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION, RECURSIVE_REJECTION, TRAVERSAL_VERIFICATION])
def test_a_draft_equal_to_the_target_up_to_rounding_is_always_answered(rule: Rule) -> None:
    # Ratios a little below 1 and nothing left of p - q where one is refused for all that.
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    rows = torch.tensor([[0.5, 0.5 - 2**-25], [0.5, 0.5 - 2**-25], [1.0, 0.0]])
    proposal = Proposal(TokenTree.chain([0, 1, 1]), WITH, q)
    total = sum(chance for _, chance in outcomes(lambda source: rule(proposal, rows, source)))
    assert total == pytest.approx(1, abs=LOSSLESS)
    assert rule(proposal, rows, EnumeratingSource((0, 0, 0, 0))).token in (0, 1)


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WITH, WITHOUT])
def test_greedy_writes_the_argmax_whatever_was_drafted(kind: ProposalKind) -> None:
    shape = TreeShape(TREES["depth first"])
    for seed in range(3):
        p, q = model_pair("one-hot target", 3, 2, seed)
        assert distance_from_target(sampled_draft(shape, q, kind), GREEDY, p, 3) < LOSSLESS
        assert distance_from_target(deterministic_draft(shape, top_tokens(q)), GREEDY, p, 3) < LOSSLESS


# --- refusals -------------------------------------------------------------------------------------------------------


def proposal_of(kind: ProposalKind, parents: tuple[int, ...] = (-1, 0)) -> Proposal:
    shape = TreeShape(parents)
    q = torch.full((len({*parents[1:]}), 3), 1 / 3) if kind.has_q else None
    drawn = DrawnPart(len(shape), WITH) if kind is GRAFTED else None
    return Proposal(TokenTree(torch.zeros(len(shape), dtype=torch.long), shape), kind, q, drawn)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (kinds, _) in FITS.items() for kind in ProposalKind if kind not in kinds]
)
def test_a_rule_refuses_a_kind_it_was_not_derived_for(name: str, kind: ProposalKind) -> None:
    with pytest.raises(ValueError, match=f"{RULES[name].name} rule takes .* proposals, not {kind.value} ones"):
        RULES[name](proposal_of(kind), torch.full((2, 3), 1 / 3), EnumeratingSource())


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION])
def test_a_chain_rule_refuses_a_tree(rule: Rule) -> None:
    with pytest.raises(ValueError, match="takes chains only: use traversal verification"):
        rule(proposal_of(WITH, (-1, 0, 0)), torch.full((3, 3), 1 / 3), EnumeratingSource())


@pytest.mark.parametrize("kind", ProposalKind)
def test_only_a_proposal_with_draws_of_one_draft_carries_q_and_it_must(kind: ProposalKind) -> None:
    q = None if kind in (WITH, WITHOUT, GRAFTED) else torch.ones(1, 3)
    with pytest.raises(ValueError, match=f"a {kind.value} proposal {'needs' if q is None else 'must not carry'} q"):
        Proposal(TokenTree.chain([0, 1]), kind, q)


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, RECURSIVE_REJECTION, BLOCK_VERIFICATION, TRAVERSAL_VERIFICATION])
@pytest.mark.parametrize("target", [[1.0, 0.0], [0.5, 0.5]])
def test_a_token_whose_recorded_q_is_zero_is_our_own_bug(rule: Rule, target: list[float]) -> None:
    proposal = Proposal(TokenTree.chain([0, 1]), WITH, torch.tensor([[1.0, 0.0]]))
    with pytest.raises(AssertionError, match="q = 0"):
        rule(proposal, torch.tensor([target, target]), EnumeratingSource())


@pytest.mark.parametrize(
    ("kind", "parents", "rule"),
    [
        (DETERMINISTIC, (-1, 0, 1), SAMPLED_VERIFY),
        (DETERMINISTIC, (-1, 0, 0), SAMPLED_VERIFY),
        (MIXED, (-1, 0, 0), SAMPLED_VERIFY),
        (WITH, (-1, 0, 1), BLOCK_VERIFICATION),
        (WITH, (-1, 0, 0), TRAVERSAL_VERIFICATION),
        (WITHOUT, (-1, 0, 1), TRAVERSAL_VERIFICATION),
        (WITHOUT, (-1, 0, 0), TRAVERSAL_VERIFICATION),
        (GRAFTED, (-1, 0, 1), TRAVERSAL_VERIFICATION),
    ],
)
def test_the_rule_that_fits_is_chosen_by_kind_and_shape(
    kind: ProposalKind, parents: tuple[int, ...], rule: Rule
) -> None:
    assert lossless_rule(proposal_of(kind, parents)) is rule


# --- typical acceptance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        # Entropy 0: the threshold is min(0.09, 0.3) = 0.09.
        ([1.0, 0.0, 0.0, 0.0], [0]),
        # Entropy ln 4: the threshold is min(0.09, 0.3 / 4) = 0.075.
        ([0.25, 0.25, 0.25, 0.25], [0, 1, 2, 3]),
        # Entropy 0.4 ln(1/0.4) + 0.52 ln(1/0.52) + 0.08 ln(1/0.08) = 0.909: 0.3 exp(-0.909) = 0.1209, so 0.09.
        ([0.4, 0.52, 0.08, 0.0], [0, 1]),
    ],
)
def test_typical_acceptance_keeps_what_is_above_the_threshold(row: list[float], kept: list[int]) -> None:
    rows = torch.tensor([row, [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for token in range(4):
        proposal = Proposal(TokenTree.chain([0, token]), DETERMINISTIC)
        lengths = {
            len(verdict.path)
            for verdict in distribution(lambda source, x=proposal: typical_acceptance()(x, rows, source))
        }
        assert lengths == {int(token in kept)}
