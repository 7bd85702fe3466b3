"""Specification of every drafter: greedy text, bounds, batches. And what is the draft model's own.

A session keeps up with any texts: whatever is accepted, in whichever row, however long it is not asked.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from drafter_checks import (
    DRAFTERS,
    OF_A_DRAFT,
    Follower,
    accept_some,
    assert_same,
    check_bounds,
    check_greedy,
    opened,
    request,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from tiny_models import naive_greedy, tiny_model
from torch import Tensor

from decoding.drafters import DraftModelDrafter, DraftTreeDrafter
from decoding.drafters.base import TextStart
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig

SAMPLED = SamplingConfig(1.0, top_p=0.9)
PENALISED = SamplingConfig(0.9, repetition_penalty=1.4)
ALL = pytest.mark.parametrize("name", DRAFTERS)
FEW = [
    *("chain", "draft tree", "Markov heads", "DSpark tree", "EAGLE-3 chain", "EAGLE-3 best tree", "lookup"),
    *("lookahead", "cascade", "drawn hybrid"),
]
"""They stand for all in `make check`."""


@pytest.mark.parametrize("name", FEW)
def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, tiny_draft: CausalLM, name: str) -> None:
    check_greedy(tiny_llama, DRAFTERS[name](tiny_llama, tiny_draft))


@ALL
def test_trees_keep_to_their_bounds_and_budgets_grow(tiny_llama: CausalLM, tiny_draft: CausalLM, name: str) -> None:
    drafter = DRAFTERS[name](tiny_llama, tiny_draft)
    for seed, sampling in enumerate((SamplingConfig(), SAMPLED, PENALISED)):
        check_bounds(drafter, tiny_llama, sampling, seed)
    budgets = drafter.budgets
    assert list(budgets) == sorted(budgets, key=lambda budget: (budget.nodes, budget.depth))
    assert all(1 <= budget.depth < budget.nodes for budget in budgets)


def check_rows(target: CausalLM, draft: CausalLM, name: str, sampling: SamplingConfig, seed: int) -> None:
    """Check that rows that accept, pause and move as they like are drafted for as sessions of one row each draft."""
    chance, drafter = random.Random(seed), DRAFTERS[name](target, draft)
    batch = Follower(drafter, target, sampling, rows=3)
    alone = [Follower(drafter, target, sampling, seed=row) for row in range(3)]
    texts = [[chance.randrange(16) for _ in range(chance.randint(1, 9))] for _ in range(3)]
    for _ in range(4):
        depths, nodes = [chance.randint(0, 4) for _ in texts], [chance.choice([1, 4, 99]) for _ in texts]
        proposals = batch.propose(*texts, depths=depths, nodes=nodes)
        for row, (follower, proposal) in enumerate(zip(alone, proposals, strict=True)):
            (wanted,) = follower.propose(texts[row], depths=[depths[row]], nodes=[nodes[row]])
            assert_same(proposal, wanted)
            texts[row] += accept_some(proposal, chance)
            if chance.random() < 0.3:  # steps of plain decoding
                texts[row] += [chance.randrange(16) for _ in range(chance.randint(1, 3))]
        if len(texts) > 1 and chance.random() < 0.4:
            batch.move(len(texts) - 1, 0)
            texts, alone = [texts[-1], *texts[1:-1]], [alone[-1], *alone[1:-1]]


@ALL
def test_each_row_is_drafted_for_as_if_it_were_alone(tiny_llama: CausalLM, tiny_draft: CausalLM, name: str) -> None:
    for seed, sampling in enumerate((SamplingConfig(), SAMPLED, PENALISED)):
        check_rows(tiny_llama, tiny_draft, name, sampling, seed)


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(
        ["chain", "draft tree", "DSpark tree", "EAGLE-3 chain", "EAGLE-3 best tree", "lookup", "cascade"]
    ),
)
def test_a_session_after_any_acceptances_is_a_fresh_session(
    tiny_draft: CausalLM, tiny_llama: CausalLM, seed: int, name: str
) -> None:
    chance, drafter = random.Random(seed), DRAFTERS[name](tiny_llama, tiny_draft)
    follower = Follower(drafter, tiny_llama)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 4))]
    for _ in range(chance.randint(1, 5)):
        bounds = {"depths": [chance.randint(0, 4)], "nodes": [chance.choice([2, 5, 99])]}
        (proposal,), (fresh,) = (each.propose(text, **bounds) for each in (follower, Follower(drafter, tiny_llama)))
        assert_same(proposal, fresh)
        text += accept_some(proposal, chance)


# --- what a draft does not know ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [12, 20])
@pytest.mark.parametrize("name", OF_A_DRAFT)
def test_a_draft_of_another_padding_never_proposes_what_either_does_not_know(
    tiny_llama: CausalLM, vocab: int, name: str
) -> None:
    drafter = DRAFTERS[name](tiny_llama, CausalLM(tiny_model("llama", vocab=vocab, seed=2)))
    for sampling in (SamplingConfig(), SamplingConfig(1.5), PENALISED):
        for text in ([1, 2], [1, 2, 15], [1, 2, 15, 14, 13]):  # a draft of 12 does not know 13 to 15
            (proposal,) = opened(drafter, tiny_llama, sampling).propose([request(text)])
            assert max(proposal.tree.token_list[1:]) < min(vocab, 16)
            if proposal.q is not None:
                assert proposal.q.shape[1] == 16 and not proposal.q[:, vocab:].any()
    assert Engine(tiny_llama, drafter).decode([15, 13], DecodingConfig(12)).tokens == naive_greedy(
        tiny_llama.model, [15, 13], 12
    )


class OnlyLateTokens:
    """Forbids every token below 12 in texts whose length is in ``where`` modulo 5."""

    def __init__(self, where: Sequence[int]) -> None:
        self._where = where

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] % 5 not in self._where:
            return scores
        return scores.index_fill(1, torch.arange(12), -torch.inf)


@pytest.mark.parametrize("name", ["chain", "draft tree", "cascade"])
def test_a_draft_ends_at_the_node_after_which_it_knows_no_token_allowed(tiny_llama: CausalLM, name: str) -> None:
    drafter = DRAFTERS[name](tiny_llama, CausalLM(tiny_model("llama", vocab=12, seed=2)))
    nothing = SamplingConfig(1.0, processors=(OnlyLateTokens(range(5)),))
    (proposal,) = opened(drafter, tiny_llama, nothing).propose([request([1, 2, 3, 1, 2])])
    assert proposal.tree.token_list == [2]
    session = opened(drafter, tiny_llama, SamplingConfig(1.0, processors=(OnlyLateTokens([2]),)), rows=2)
    # After five tokens it may draft two, the second row after six one: no text of seven tokens is followed.
    for texts in ([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 4]], [[1, 2, 3, 1, 2, 5], [4, 4, 4, 4, 4, 4, 4]]):
        proposals = session.propose([request(text) for text in texts])
        assert [proposal.tree.shape.max_depth for proposal in proposals] == [7 - len(text) for text in texts]
        for proposal in proposals:
            assert proposal.q is None or not bool(proposal.q.isnan().any())


def trimmed(*output_tokens: int) -> CausalLM:
    """A draft whose lm_head writes these tokens alone."""
    model = tiny_model("llama", seed=1)
    head = torch.nn.Linear(model.config.hidden_size, len(output_tokens), bias=False)
    model.set_output_embeddings(head)
    return CausalLM(model, torch.tensor(output_tokens))


@pytest.mark.parametrize("name", OF_A_DRAFT)
def test_a_draft_that_does_not_fit_is_refused_before_a_text_begins(tiny_llama: CausalLM, name: str) -> None:
    short = CausalLM(tiny_model("llama", max_position_embeddings=8))
    for draft, problem in (
        (trimmed(1, 2, 3, 16), "lm_head writes token 16, but the target knows 0 to 15"),
        (short, "may grow to 12 tokens, more than the draft's context of 8"),
    ):
        with pytest.raises(ValueError, match=problem):
            DRAFTERS[name](tiny_llama, draft).open(tiny_llama, SamplingConfig(), 1, 12)
    with pytest.raises(ValueError, match="width is 4, but target and draft share 3 tokens"):
        DraftTreeDrafter(trimmed(1, 2, 3), 2, 4, 9).open(tiny_llama, SamplingConfig(), 1, 20)


# --- the draft's cache ------------------------------------------------------------------------------------------------


def test_nothing_that_was_accepted_is_run_again_and_a_new_row_is_caught_up_alone(tiny_llama: CausalLM) -> None:
    draft = CausalLM(tiny_model("llama", seed=1))
    shapes: list[tuple[int, ...]] = []
    embeddings = draft.model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    session = opened(DraftModelDrafter(draft, 3), tiny_llama)
    text = [1, 2, 3, 4]
    (proposal,) = session.propose([request(text)])
    text += [*proposal.tree.token_list[1:], 9]  # all three accepted, and then the target's own
    assert shapes == [(1, 3), (1, 1), (1, 1), (1, 1)], "the prompt, its last token, two of the chain"
    shapes.clear()
    session.propose([request(text)])
    assert shapes == [(1, 2), (1, 1), (1, 1)], "the third drafted token never ran: nothing followed it"
    session = opened(DraftModelDrafter(draft, 1), tiny_llama, rows=2)
    session.propose([request([1, 2, 3]), request([4])])
    session.admit(1, TextStart(1, GeneratorSource.from_seed(5)))
    shapes.clear()
    session.propose([request([1, 2, 3, 5]), request([6] * 20)])
    assert shapes == [(1, 19), (2, 1)], "else every other row would be as wide as its prompt"
