"""The enumerator that the proofs stand on."""

import pytest
import torch
from jaxtyping import TypeCheckError

from decoding.measure.proof.enumeration import (
    ALL_MODELS,
    ContextModel,
    EnumeratingSource,
    distance_from_target,
    distribution,
    enumerate_turn,
    mixed_draft,
    outcomes,
    prove_rule,
    sampled_draft,
    shapes_unchecked,
    verdicts,
)
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind, TreeShape
from decoding.rules.verify import RULES, SAMPLED_VERIFY, TOKEN_REJECTION, Rule, Verdict


def test_two_coins_have_four_outcomes() -> None:
    def program(source: RandomSource) -> tuple[bool, bool]:
        return source.accept(0.25), source.accept(0.5)

    assert distribution(program) == {
        (True, True): 0.125,
        (True, False): 0.125,
        (False, True): 0.375,
        (False, False): 0.375,
    }


def test_every_path_is_visited_once_and_the_probabilities_sum_to_one() -> None:
    def program(source: RandomSource) -> tuple[int, ...]:
        return tuple(source.draw(torch.ones(3)) for _ in range(4))

    visited = list(outcomes(program))
    assert len(visited) == len({result for result, _ in visited}) == 81
    assert sum(probability for _, probability in visited) == pytest.approx(1, abs=1e-12)


def test_a_nan_or_an_empty_draw_is_an_error_of_the_rule_under_test() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        EnumeratingSource().accept(float("nan"))
    with pytest.raises(AssertionError, match="cannot draw"):
        EnumeratingSource().draw(torch.zeros(3))


def test_a_sampled_draft_is_distributed_as_q() -> None:
    q = ContextModel.random(3, 2, "mixed", torch.Generator().manual_seed(0))
    draft = sampled_draft(TreeShape.chain(2), q, ProposalKind.SAMPLED)
    drafted = distribution(lambda source: tuple(draft(source).tree.token_list[1:]))
    assert drafted == pytest.approx({path: chance for path, chance in q.joint(2).items() if chance > 0}, abs=1e-15)


def test_the_distance_is_that_of_the_emitted_text_from_the_target() -> None:
    # p writes 0 or 1 with probability 1/4 and 3/4; a "rule" that always writes 1 first is off by 1/4 there.
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row})
    draft = sampled_draft(TreeShape.chain(1), p, ProposalKind.SAMPLED)

    def always_one(proposal: Proposal, rows: torch.Tensor, source: RandomSource) -> Verdict:
        return Verdict((), 1)

    assert distance_from_target(draft, always_one, p, length=1) == 0.25


def test_the_outcomes_of_a_turn_sum_to_one_and_give_the_expected_accepted_length() -> None:
    # q always drafts 0, which p keeps in a quarter of cases.
    p = ContextModel({(): torch.tensor([0.25, 0.75], dtype=torch.float64), (0,): torch.tensor([0.5, 0.5]).double()})
    q = ContextModel({(): torch.tensor([1.0, 0.0], dtype=torch.float64)})
    draft = sampled_draft(TreeShape.chain(1), q, ProposalKind.SAMPLED)
    found = verdicts(draft, TOKEN_REJECTION, p)
    assert sorted((verdict.path, verdict.token, chance) for _, verdict, chance in found) == [
        ((), 1, 0.75),
        ((1,), 0, 0.125),
        ((1,), 1, 0.125),
    ]


def test_a_mixed_draft_may_look_up_what_it_has_drawn() -> None:
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row})
    draft = mixed_draft(TreeShape((-1, 0, 0)), p, lambda context, count: [1] * count)
    drafted = distribution(lambda source: tuple(draft(source).tree.token_list[1:]))
    assert drafted == {(0, 1): 0.25, (1, 1): 0.75}
    # Of 0 and 1 one is always drawn; of 1 and 1 in three quarters of cases.
    assert enumerate_turn(draft, SAMPLED_VERIFY, p, length=2).accepted_length == 0.25 + 0.75 * 0.75


def test_shapes_are_checked_unless_an_enumeration_is_under_way() -> None:
    proposal = Proposal.root_only(0)
    row = torch.tensor([1.0, 0.0])
    with shapes_unchecked(), pytest.raises(IndexError):
        SAMPLED_VERIFY(proposal, row[:0], EnumeratingSource())
    with pytest.raises(TypeCheckError):
        SAMPLED_VERIFY(proposal, row[:0], EnumeratingSource())


@pytest.mark.parametrize("rule", [rule for name, rule in RULES.items() if name != "greedy"], ids=lambda rule: rule.name)
def test_a_rule_is_proved_for_every_kind_and_shape_that_it_takes(rule: Rule) -> None:
    proof = prove_rule(rule, seeds=(0,))
    shapes = 2 if rule.chains_only else 6
    assert proof.turns == len(rule.kinds) * shapes * len(ALL_MODELS)
    assert proof.lossless == rule.lossless


def test_a_rule_that_writes_from_p_in_place_of_the_residual_is_refuted_on_a_turn_that_is_named() -> None:
    def without_residual(proposal: Proposal, p: torch.Tensor, source: RandomSource) -> Verdict:
        q, token = proposal.q, proposal.tree.token_list[1]
        assert q is not None
        if source.accept(float(p[0, token] / q[0, token])):
            return Verdict((1,), source.draw(p[1]))
        return Verdict((), source.draw(p[0]))

    proof = prove_rule(Rule("mine", True, frozenset({ProposalKind.SAMPLED}), without_residual, chains_only=True))
    assert not proof.lossless and proof.distance > 0.01 and proof.worst.startswith("sampled chain of ")
