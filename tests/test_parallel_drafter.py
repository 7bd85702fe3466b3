"""Parallel drafts as drafters: one forward of text and masks drafts a chain, and q is the one that was drawn from."""

import random
from functools import cache

import pytest
import torch
from drafter_checks import Follower, accept_some, check_greedy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from tiny_models import naive_greedy, tiny_model
from tiny_parallel import masked_logits, states_before, tiny_parallel_draft
from torch import Tensor

from decoding.drafters import ParallelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelDraft
from decoding.rules.sampling import SamplingConfig

PARTS = [(0, False), (3, False), (0, True), (3, True)]
"""Rank of the bias, and True for a draft that reads the target."""
WITH_PARTS = pytest.mark.parametrize(("rank", "reads_target"), PARTS)


@cache
def draft_of(rank: int = 3, reads_target: bool = True, tokens: int = 4) -> ParallelDraft:
    return tiny_parallel_draft(CausalLM(tiny_model("llama")), tokens, rank, reads_target)


# --- one forward ------------------------------------------------------------------------------------------------------


@WITH_PARTS
def test_one_forward_equals_forwards_with_ever_more_masks(tiny_llama: CausalLM, rank: int, reads_target: bool) -> None:
    """Output j of [text, M × (K - 1)] is the last one of [text, M × j]: a mask sees the masks before it only."""
    draft = draft_of(rank, reads_target)
    texts = [[3, 1, 4, 1, 5], [9], [2, 7, 1]]
    cache = draft.model.new_cache(32, 3)
    added = None
    if reads_target:
        added = [draft.parts.read(states_before(tiny_llama, text)) for text in texts]
    logits = draft.model.look_ahead(texts, [draft.parts.config.mask_token] * 3, cache, added).logits
    assert logits.shape == (3, 4, 17) and cache.lengths == [5, 1, 3]
    for row, text in enumerate(texts):
        for masks in range(4):
            wanted = masked_logits(draft, tiny_llama, text, masks)
            torch.testing.assert_close(logits[row, masks, :16], wanted, rtol=0, atol=2e-5)


def test_a_step_is_one_forward_of_the_new_tokens_and_a_mask_for_each_further_token(tiny_llama: CausalLM) -> None:
    draft = tiny_parallel_draft(tiny_llama)
    shapes: list[tuple[int, ...]] = []
    draft.model.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape))
    )
    follower = Follower(ParallelDrafter(draft), tiny_llama)
    follower.propose([1, 2, 3])
    assert shapes == [(1, 2), (1, 4)], "the prompt, then its last token and three masks"
    del shapes[:]
    follower.propose([1, 2, 3, 4, 5])
    assert shapes == [(1, 5)]
    del shapes[:]
    follower.propose([1, 2, 3, 4, 5, 6], depths=[2])
    assert shapes == [(1, 2)], "a request of two tokens takes one mask"


@examples(20)
@given(seed=st.integers(0, 2**32 - 1), parts=st.sampled_from(PARTS), rounds=st.integers(1, 6))
def test_masks_leave_no_trace(tiny_llama: CausalLM, seed: int, parts: tuple[int, bool], rounds: int) -> None:
    """Draft after draft equals a fresh session's, and the cache equals one that has never seen a mask."""
    chance, drafter = random.Random(seed), ParallelDrafter(draft_of(*parts))
    follower = Follower(drafter, tiny_llama)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 5))]
    for _ in range(rounds):
        depth = chance.randint(0, 5)
        (proposal,) = follower.propose(text, depths=[depth])
        (wanted,) = Follower(drafter, tiny_llama).propose(text, depths=[depth])
        assert proposal.tree.token_list == wanted.tree.token_list
        held = follower.session._state.cache.lengths[0]
        assert held == len(text) or not depth
        maskless = drafter.draft.model.new_cache(96)
        if held:
            added = [drafter.draft.parts.read(states_before(tiny_llama, text[:held]))] if parts[1] else None
            drafter.draft.model.prefill([text[:held]], maskless, added=added)
        kept, clean = (keys_and_values(cache, held) for cache in (follower.session._state.cache, maskless))
        torch.testing.assert_close(kept, clean, rtol=0, atol=2e-5)
        text = [*text, *accept_some(proposal, chance)]


def keys_and_values(cache: object, length: int) -> Tensor:
    layers = [layer for layer in cache.layers if layer.is_initialized]  # type: ignore[attr-defined]
    held = [torch.stack([layer.keys[0], layer.values[0]])[..., :length, :] for layer in layers]
    return torch.stack(held) if length else torch.empty(0)


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_drafts_of_other_families_write_plain_greedy_too(tiny_llama: CausalLM, family: str) -> None:
    """Sliding windows, learned positions, and masks by layer type."""
    check_greedy(tiny_llama, ParallelDrafter(tiny_parallel_draft(tiny_llama, family=family)), count=12)


def test_a_draft_near_the_end_of_its_positions_drafts_to_the_last(tiny_llama: CausalLM) -> None:
    """Rows with more room give the others more masks than they have positions for."""
    prompts = [[1, 2, 3], list(range(16)) * 4]
    drafter = ParallelDrafter(tiny_parallel_draft(tiny_llama, max_position_embeddings=80))
    texts = Engine(tiny_llama, drafter).decode(prompts, DecodingConfig(16), batch_size=2)
    assert [text.tokens for text in texts] == [naive_greedy(tiny_llama.model, prompt, 16) for prompt in prompts]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_target", [True, False])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0)], ids=["greedy", "T=1"])
def test_static_shapes_write_the_same_texts(tiny_llama: CausalLM, sampling: SamplingConfig, reads_target: bool) -> None:
    """With the same counts: masks left in the cache would spoil the drafts behind them, not the texts."""
    draft, prompts = draft_of(reads_target=reads_target), [[3, 1, 4], [5], [9, 2, 6, 5, 3]]
    static = ParallelDraft(draft.model.with_static("eager"), draft.parts)
    config = DecodingConfig(24, sampling)
    found = [
        [
            (text.tokens, [step.accepted for step in text.steps])
            for text in Engine(target, drafter).decode(prompts, config, batch_size=2)
        ]
        for target, drafter in (
            (tiny_llama, ParallelDrafter(draft)),
            (tiny_llama.with_static("eager"), ParallelDrafter(static)),
        )
    ]
    assert found[0] == found[1] and sum(map(sum, (accepted for _, accepted in found[0]))) > 3


def test_a_target_of_another_width_is_refused(tiny_llama: CausalLM) -> None:
    other = CausalLM(tiny_model("llama", hidden_size=24))
    with pytest.raises(ValueError, match="reads hidden states of size 16 but the target's have size 24: give a draft"):
        Engine(other, ParallelDrafter(draft_of())).decode([1, 2], DecodingConfig(4))
    Engine(other, ParallelDrafter(draft_of(reads_target=False))).decode([1, 2], DecodingConfig(4))
