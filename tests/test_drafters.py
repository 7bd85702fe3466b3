"""Specification of every drafter: greedy text, bounds and batches; and tests of the draft model.

A session follows any texts, whatever is accepted in any row, even if it is not called for a long time.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

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
    paths,
    request,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples, few
from tiny_models import naive_greedy, tiny_model
from torch import Tensor

from decoding.drafters import DraftModelDrafter, DraftTreeDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.drafters.base import TextStart
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads, StackedHeads
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind

SAMPLED = SamplingConfig(1.0, top_p=0.9)
PENALISED = SamplingConfig(0.9, repetition_penalty=1.4)
FEW = ["chain", "draft tree", "Markov heads", "DSpark tree", "EAGLE-3 best tree", "lookup", "drawn hybrid"]
"""These represent all drafters in `make check`."""
ALL = pytest.mark.parametrize("name", few(DRAFTERS, FEW))


@ALL
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
    """Check that rows that accept, pause and move at random get the same drafts as in sessions of one row each."""
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
        for text in ([1, 2], [1, 2, 15], [1, 2, 15, 14, 13]):  # a draft of 12 tokens does not know 13 to 15
            (proposal,) = opened(drafter, tiny_llama, sampling).propose([request(text)])
            assert max(proposal.tree.token_list[1:]) < min(vocab, 16)
            if proposal.q is not None:
                assert proposal.q.shape[1] == 16 and not proposal.q[:, vocab:].any()
    assert Engine(tiny_llama, drafter).decode([15, 13], DecodingConfig(12)).tokens == naive_greedy(
        tiny_llama.model, [15, 13], 12
    )


class OnlyLateTokens:
    """Processor that forbids every token below 12 in texts whose length modulo 5 is in ``where``."""

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
    # The first row, after five tokens, may draft two; the second row, after six tokens, may draft one. No text of seven
    # tokens is continued.
    for texts in ([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 4]], [[1, 2, 3, 1, 2, 5], [4, 4, 4, 4, 4, 4, 4]]):
        proposals = session.propose([request(text) for text in texts])
        assert [proposal.tree.shape.max_depth for proposal in proposals] == [7 - len(text) for text in texts]
        for proposal in proposals:
            assert proposal.q is None or not bool(proposal.q.isnan().any())


def trimmed(*output_tokens: int) -> CausalLM:
    """Make a draft whose lm_head writes only these tokens."""
    model = tiny_model("llama", seed=1)
    head = torch.nn.Linear(model.config.hidden_size, len(output_tokens), bias=False)
    model.set_output_embeddings(head)
    return CausalLM(model, torch.tensor(output_tokens))


@pytest.mark.parametrize("name", OF_A_DRAFT)
def test_a_draft_that_does_not_fit_is_refused_before_a_text_begins(tiny_llama: CausalLM, name: str) -> None:
    short = CausalLM(tiny_model("llama", max_position_embeddings=8))
    for draft, problem in (
        (trimmed(1, 2, 3, 16), "lm_head writes token 16, but the target has tokens 0 to 15"),
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
    text += [*proposal.tree.token_list[1:], 9]  # all three accepted, followed by the target's token
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


PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))
BOTH_LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])


def random_heads(
    shared: bool, layers: int = 2, vocab: int = 16, width: int = 16, count: int = 3, linear: bool = False
) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(width, vocab, count, layers, tree=((0,),), shared_lm_head=shared, linear=linear))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


def reference_logits(heads: MedusaHeads, target: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return heads(hidden, target.model.get_output_embeddings())


def drafted(drafter: MedusaDrafter, target: CausalLM) -> set[tuple[int, ...]]:
    (proposal,) = Follower(drafter, target).propose([7, 3, 5])
    return paths(proposal.tree)


# --- heads in one go -----------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_stacked_heads_are_the_heads_one_by_one(tiny_llama: CausalLM, shared: bool, count: int, linear: bool) -> None:
    heads, hidden = random_heads(shared, linear=linear), torch.randn(5, 16)
    expected = reference_logits(heads, tiny_llama, hidden)
    with torch.inference_mode():
        stacked = StackedHeads(heads)(hidden, count, tiny_llama.model.get_output_embeddings())
    torch.testing.assert_close(stacked, expected[:count], rtol=1e-5, atol=1e-5)


def test_heads_of_few_tokens_have_the_logits_of_these_tokens(tiny_llama: CausalLM) -> None:
    whole, tokens = random_heads(shared=True), (1, 4, 5, 15)
    few = MedusaHeads(replace(whole.config, draft_vocab_size=len(tokens)))
    few.load_state_dict(whole.state_dict() | {name: few.state_dict()[name] for name in ("lm_head.weight", "d2t")})
    few.write_only(tokens, tiny_llama.model.get_output_embeddings().weight)
    hidden = torch.randn(5, 16)
    with torch.inference_mode():
        found = StackedHeads(few)(hidden, 3)
    wanted = reference_logits(whole, tiny_llama, hidden)[..., list(tokens)]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert few.output_tokens is not None and few.output_tokens.tolist() == list(tokens)


# --- what they draft -----------------------------------------------------------------------------------------------


def counting_heads() -> MedusaHeads:
    """Make heads for the counting target: for a hidden state at token x, the best token of head k is x + 2 + k, then x
    + 3 + k, ...
    """
    heads = MedusaHeads(MedusaConfig(16, 16, 3, tree=((0,),)))
    with torch.no_grad():
        for k, head in enumerate(heads.heads):
            for x, rank in itertools.product(range(16), range(16)):
                head.lm_head.weight[(x + 2 + k + rank) % 16, x] = -float(rank)  # type: ignore[union-attr, operator, index]
    return heads


def test_head_k_drafts_the_token_k_plus_two_after_its_hidden_state(counting: CausalLM) -> None:
    drafter = MedusaDrafter(counting_heads(), PATHS)
    proposals = Follower(drafter, counting, rows=3).propose([4, 5, 6], [4, 5, 6], [1, 2], depths=[9, 2, 1])
    # The hidden state is at 5 and the root is 6; head 0 predicts 7, head 1 predicts 8, head 2 predicts 9; rank r adds
    # r.
    assert proposals[0].tree.shape.parents == (-1, 0, 0, 0, 1, 1, 3, 5)
    assert [proposal.tree.token_list for proposal in proposals] == [
        [6, 7, 8, 9, 8, 9, 8, 9],
        [6, 7, 8, 9, 8, 9, 8],
        [2, 3, 4, 5],
    ]


@pytest.mark.parametrize("beside", [[], [[1]]], ids=["chain", "tree"])
def test_heads_that_are_right_are_accepted_whole_through_the_loop(counting: CausalLM, beside: list[list[int]]) -> None:
    """In the tree the accepted nodes are not the first nodes, and the heads still read the state of the last accepted
    node.
    """
    drafter = MedusaDrafter(counting_heads(), [[0], *beside, [0, 0], [0, 0, 0]])
    generation = Engine(counting, drafter).decode([0], DecodingConfig(13))
    assert generation.tokens == tuple(range(1, 14))
    # The prefill writes one token; then three passes write three drafted tokens and one token of the target each.
    assert [(step.accepted, len(step.tokens)) for step in generation.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]


def test_heads_of_another_target_and_trees_that_they_cannot_draft_are_refused(tiny_llama: CausalLM) -> None:
    for width, vocab in ((8, 16), (16, 8)):
        with pytest.raises(ValueError, match="target"):
            opened(MedusaDrafter(MedusaHeads(MedusaConfig(width, vocab))), tiny_llama)
    for tree, problem in (
        ([], "the tree is empty"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "the tree has depth 4, but there are 3 heads"),
        ([[16]], "the tree has rank 16: use ranks below 16"),
    ):
        with pytest.raises(ValueError, match=problem):
            MedusaDrafter(random_heads(False), tree)


def lookup(target: CausalLM, text: Sequence[int], depth: int = 99, nodes: int = 999, **settings: int) -> Proposal:
    (proposal,) = opened(PromptLookupDrafter(**settings), target).propose([request(text, depth, nodes)])
    return proposal


def every_start(path: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all beginnings of a path, the path itself included."""
    return {tuple(path[:length]) for length in range(1, len(path) + 1)}


def naive_paths(tokens: list[int], depth: int, ngram: int, min_ngram: int, branches: int) -> set[tuple[int, ...]]:
    """Compare every suffix, longest first, with every earlier place, latest first; try four places for each branch."""
    found: set[tuple[int, ...]] = set()
    added = 0
    for size in range(min(ngram, len(tokens)), min_ngram - 1, -1):
        suffix = tokens[len(tokens) - size :]
        ends = [end for end in range(len(tokens) - 1, size - 1, -1) if tokens[end - size : end] == suffix]
        for end in ends[: 4 * branches]:
            piece = tokens[end:]
            continuation = (piece * depth if len(piece) <= size else piece)[:depth]
            if added < branches and not every_start(continuation) <= found:
                found |= every_start(continuation)
                added += 1
    return found


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    growth=st.lists(st.integers(1, 4), max_size=8),
    count=st.integers(1, 5),
    ngrams=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    branches=st.integers(1, 4),
    room=st.integers(1, 6),
)
def test_prompt_lookup_is_the_naive_search_however_the_text_grows(
    tiny_llama: CausalLM,
    text: list[int],
    growth: list[int],
    count: int,
    ngrams: tuple[int, int],
    branches: int,
    room: int,
) -> None:
    shortest, longest = ngrams
    session = opened(PromptLookupDrafter(count, longest, shortest, branches), tiny_llama)
    length = 1
    for grown in (0, *growth):
        length = min(length + grown, len(text))
        (proposal,) = session.propose([request(text[:length], room)])
        assert paths(proposal.tree) == naive_paths(text[:length], min(count, room), longest, shortest, branches)
        assert proposal.tree.token_list[0] == text[length - 1]
        assert proposal.kind is ProposalKind.DETERMINISTIC
        assert branches > 1 or proposal.tree.shape.is_chain


def test_a_proposal_tells_how_long_its_match_is_beyond_the_longest_ngram_too(tiny_llama: CausalLM) -> None:
    assert lookup(tiny_llama, [1, 2, 3]).matched == 0
    assert lookup(tiny_llama, [1, 2, 3, 2]).matched == 1
    # 1 2 3 4 5 occurred earlier after another token; the n-gram that finds it has three tokens.
    assert lookup(tiny_llama, [7, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5], ngram=3).matched == 5
    # The latest occurrence of the suffix counts, because its continuation is drafted. This occurrence is in 9 4 5, and
    # the one before is in 3 4 5.
    assert lookup(tiny_llama, [3, 4, 5, 6, 9, 4, 5, 6, 3, 4, 5], ngram=2).matched == 2


def test_a_second_branch_is_accepted_where_the_first_is_wrong(counting: CausalLM) -> None:
    # In the prompt, 0 is followed by 1 and, later, by 9. The counting target writes 1 2 3, which is the second branch.
    prompt = [0, 1, 2, 3, 4, 0, 9, 15]
    steps = Engine(counting, PromptLookupDrafter(3, branches=2)).decode(prompt, DecodingConfig(5)).steps
    assert steps[1].accepted == 3
    assert Engine(counting, PromptLookupDrafter(3)).decode(prompt, DecodingConfig(5)).steps[1].accepted == 0
