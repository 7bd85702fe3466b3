"""Medusa heads as a drafter: trees of a fixed shape or chosen at each step, heads with an lm_head or without one."""

import itertools
from dataclasses import replace

import pytest
import torch
from drafter_checks import Follower, opened, paths

from decoding.drafters import MedusaDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads, StackedHeads

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
    """Heads for the counting target: of a hidden state at token x, head k's best is x + 2 + k, then x + 3 + k, ..."""
    heads = MedusaHeads(MedusaConfig(16, 16, 3, tree=((0,),)))
    with torch.no_grad():
        for k, head in enumerate(heads.heads):
            for x, rank in itertools.product(range(16), range(16)):
                head.lm_head.weight[(x + 2 + k + rank) % 16, x] = -float(rank)  # type: ignore[union-attr, operator, index]
    return heads


def test_head_k_drafts_the_token_k_plus_two_after_its_hidden_state(counting: CausalLM) -> None:
    drafter = MedusaDrafter(counting_heads(), PATHS)
    proposals = Follower(drafter, counting, rows=3).propose([4, 5, 6], [4, 5, 6], [1, 2], depths=[9, 2, 1])
    # The hidden state is that of 5; the root is 6; head 0 wants 7, head 1 wants 8, head 2 wants 9; rank r is r more.
    assert proposals[0].tree.shape.parents == (-1, 0, 0, 0, 1, 1, 3, 5)
    assert [proposal.tree.token_list for proposal in proposals] == [
        [6, 7, 8, 9, 8, 9, 8, 9],
        [6, 7, 8, 9, 8, 9, 8],
        [2, 3, 4, 5],
    ]


def test_heads_that_are_right_are_accepted_whole_through_the_loop(counting: CausalLM) -> None:
    drafter = MedusaDrafter(counting_heads(), [[0], [0, 0], [0, 0, 0]])
    generation = Engine(counting, drafter).decode([0], DecodingConfig(13))
    assert generation.tokens == tuple(range(1, 14))
    # The prefill writes one, then three times three drafted and one written.
    assert [(step.accepted, len(step.tokens)) for step in generation.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]


def test_heads_of_another_target_and_trees_that_they_cannot_draft_are_refused(tiny_llama: CausalLM) -> None:
    for width, vocab in ((8, 16), (16, 8)):
        with pytest.raises(ValueError, match="target"):
            opened(MedusaDrafter(MedusaHeads(MedusaConfig(width, vocab))), tiny_llama)
    for tree, problem in (
        ([], "the tree is empty"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "the tree is 4 deep, but there are 3 heads"),
        ([[16]], "the tree has rank 16: give ranks below 16"),
    ):
        with pytest.raises(ValueError, match=problem):
            MedusaDrafter(random_heads(False), tree)
