"""A cascade drafts exactly what its draft model would, in fewer passes."""

import random

import pytest
import torch
from drafter_checks import (
    accept_some,
    check_bounds,
    check_budgets,
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
    opened,
    request,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from scripted_drafters import HostileDrafter
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama
from tiny_models import full_forward, naive_greedy, tiny_model

from decoding.drafters import CascadeDrafter, DraftModelDrafter, LookaheadDrafter, PromptLookupDrafter
from decoding.drafters.base import TextDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities

SAMPLED = SamplingConfig(1.0, top_p=0.9)
PENALISED = SamplingConfig(0.9, repetition_penalty=1.4, frequency_penalty=0.2)
CONTROLS = [SamplingConfig(), SamplingConfig(repetition_penalty=1.4), SAMPLED, PENALISED]

INNER: dict[str, TextDrafter] = {
    "lookup": PromptLookupDrafter(4),
    "branches": PromptLookupDrafter(3, num_branches=3),
    "lookahead": LookaheadDrafter(2, 3, 2),
    "hostile": HostileDrafter(1, [1, 2, 3, 4] * 20),
}


def passes_of(draft: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each of the draft's passes but the prefills, as they come."""
    passes: list[int] = []
    verify = draft.verify

    def counted(trees, cache, first=None, read=None):  # type: ignore[no-untyped-def]
        passes.append(len(trees[0]))
        return verify(trees, cache, first, read)

    monkeypatch.setattr(draft, "verify", counted)
    return passes


@examples(80)
@given(inner=st.sampled_from(list(INNER)), sampling=st.sampled_from(CONTROLS), seed=st.integers(0, 2**32 - 1))
def test_the_chain_and_its_q_are_the_draft_models_own(
    tiny_llama: CausalLM, tiny_draft: CausalLM, inner: str, sampling: SamplingConfig, seed: int
) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(chance.randint(1, 8))]
    length = len(text)
    cascade = opened(CascadeDrafter(tiny_draft, INNER[inner], 5), tiny_llama, sampling, length, seed)
    alone = opened(DraftModelDrafter(tiny_draft, (1,) * 5), tiny_llama, sampling, length, seed)
    for _ in range(4):
        depth = chance.randint(1, 6)
        ((own,), (expected,)) = (session.propose([request(text, depth)]) for session in (cascade, alone))
        assert own.tree.token_list == expected.tree.token_list and own.kind is expected.kind
        if expected.q is not None:
            assert own.q is not None
            torch.testing.assert_close(own.q, expected.q, rtol=0, atol=1e-5)
        text += accept_some(own, chance)
        text += [chance.randrange(16) for _ in range(chance.choice([0, 3]))]  # steps in which it was not asked


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED])
def test_the_q_recorded_is_the_q_of_a_plain_forward(
    tiny_llama: CausalLM, tiny_draft: CausalLM, sampling: SamplingConfig
) -> None:
    text = [3, 1, 4, 3, 1]
    (proposal,) = opened(CascadeDrafter(tiny_draft, INNER["lookup"], 6), tiny_llama, sampling, 2).propose(
        [request(text)]
    )
    assert proposal.kind is ProposalKind.SAMPLED and proposal.q is not None
    for node in range(6):
        whole = [*text, *proposal.tree.token_list[1 : node + 1]]
        seen, counts = torch.zeros(1, 16, dtype=torch.bool), torch.zeros(1, 16, dtype=torch.int32)
        seen[0, whole] = True
        for token in whole[2:]:
            counts[0, token] += 1
        expected = probabilities(full_forward(tiny_draft.model, whole)[-1:], sampling, HistoryRows(seen, counts))[0]
        torch.testing.assert_close(proposal.q[node], expected, rtol=0, atol=1e-5)
        assert proposal.q[node, proposal.tree.token_list[node + 1]] > 0


def test_what_the_inner_drafter_guesses_right_takes_no_pass_of_its_own(
    counting: CausalLM, tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(counting, monkeypatch)
    round_and_on = [*range(16), *range(8)]
    (proposal,) = opened(CascadeDrafter(counting, PromptLookupDrafter(3), 8), tiny_llama).propose(
        [request(round_and_on)]
    )
    assert proposal.tree.token_list == list(range(7, 16))
    assert passes == [4, 4], "twice three guesses and the root, of which each pass emits all and one more"
    passes.clear()
    opened(CascadeDrafter(counting, PromptLookupDrafter(3), 8), tiny_llama).propose([request([3, 5])])
    assert passes == [1] * 8, "there is nothing to look up"


def test_the_inner_drafter_is_not_asked_for_more_than_the_chain_still_lacks(
    counting: CausalLM, tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(counting, monkeypatch)
    session = opened(CascadeDrafter(counting, PromptLookupDrafter(9), 8), tiny_llama)
    for depth in (1, 2, 5):
        passes.clear()
        (proposal,) = session.propose([request([*range(16), *range(8)], depth)])
        assert len(proposal.tree) == depth + 1 and passes == [depth]


def test_keys_of_what_was_accepted_are_not_run_again(
    counting: CausalLM, tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(counting, monkeypatch)
    session = opened(CascadeDrafter(counting, PromptLookupDrafter(3), 4), tiny_llama)
    text = [*range(16), *range(8)]
    session.propose([request(text)])
    passes.clear()
    session.propose([request([*text, 8, 9, 10, 11, 12])])
    assert passes[0] == 5, "11, the draft's last own token, then the root 12 and three guesses"
    passes.clear()
    session.propose([request([*text, 8, 3])])
    assert passes[0] == 4, "8 was kept; the root 3 and three guesses"


def test_logits_are_written_for_the_guesses_alone(counting: CausalLM, tiny_llama: CausalLM) -> None:
    """Not for the tokens before them that only enter the cache."""
    written: list[int] = []
    hook = counting.model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: written.append(out.shape[1])
    )
    try:
        session = opened(CascadeDrafter(counting, PromptLookupDrafter(3), 4), tiny_llama)
        text = [*range(16), *range(8)]
        session.propose([request(text)])
        written.clear()
        session.propose([request([*text, 8, 9, 10, 11, 12])])
        assert written == [4], "for the root 12 and three guesses; 11 runs with them"
    finally:
        hook.remove()


@given(seed=st.integers(0, 2**32 - 1), inner=st.sampled_from(["lookup", "branches", "lookahead"]))
def test_a_chain_stays_within_its_bounds(tiny_llama: CausalLM, tiny_draft: CausalLM, seed: int, inner: str) -> None:
    for sampling in (SamplingConfig(), PENALISED):
        check_bounds(CascadeDrafter(tiny_draft, INNER[inner], 6), tiny_llama, sampling, seed)


def test_its_budgets_are_those_of_chains(tiny_draft: CausalLM) -> None:
    check_budgets(CascadeDrafter(tiny_draft, INNER["lookup"]))
    assert CascadeDrafter(tiny_draft, INNER["lookup"]).budgets == DraftModelDrafter(tiny_draft, (1,) * 8).budgets


@pytest.mark.parametrize("vocab", [12, 20])
@pytest.mark.parametrize("sampling", CONTROLS)
def test_a_draft_of_another_padding_is_the_draft_model_too(
    tiny_llama: CausalLM, vocab: int, sampling: SamplingConfig
) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=2))
    # The lookup guesses 15, which a draft of 12 does not know.
    for text in ([1, 15, 2, 1], [15, 13, 15], [1, 15, 1, 15]):
        cascade = opened(CascadeDrafter(draft, INNER["branches"], 5), tiny_llama, sampling)
        alone = opened(DraftModelDrafter(draft, (1,) * 5), tiny_llama, sampling)
        ((own,), (expected,)) = (session.propose([request(text)]) for session in (cascade, alone))
        assert own.tree.token_list == expected.tree.token_list
        assert max(own.tree.token_list[1:]) < min(vocab, 16)


# --- the loop -------------------------------------------------------------------------------------------------------


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_chain_of_nothing_is_refused(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 0: give at least 1"):
        CascadeDrafter(tiny_draft, INNER["lookup"], 0)


def test_an_inner_drafter_of_batches_is_refused(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="the inner draft model drafts for batches: give one that takes text by text"):
        CascadeDrafter(tiny_draft, DraftModelDrafter(tiny_draft))  # type: ignore[arg-type]  # what is tested


def test_a_draft_with_static_shapes_serves_several_texts_without_them(tiny_llama: CausalLM) -> None:
    drafter = CascadeDrafter(CausalLM(tiny_model("llama", seed=1), static="eager"), INNER["lookup"], 3)
    for prompt in ([1, 2, 1], [5]):
        text = Engine(tiny_llama, drafter).decode(prompt, DecodingConfig(12))
        assert text.tokens == naive_greedy(tiny_llama.model, prompt, 12)
    texts = Engine(tiny_llama, drafter).decode([[1, 2, 1], [5]], DecodingConfig(12), batch_size=2)
    assert [text.tokens for text in texts] == [naive_greedy(tiny_llama.model, p, 12) for p in ([1, 2, 1], [5])]


def test_a_text_longer_than_the_drafts_context_is_refused(tiny_llama: CausalLM) -> None:
    draft = CausalLM(tiny_model("llama", max_position_embeddings=8))
    with pytest.raises(ValueError, match="may grow to 12 tokens but the draft's context holds 8"):
        Engine(tiny_llama, CascadeDrafter(draft, INNER["lookup"])).decode([1, 2], DecodingConfig(10))


@pytest.mark.parametrize("inner", ["lookup", "lookahead"])
def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, tiny_draft: CausalLM, inner: str) -> None:
    check_greedy(tiny_llama, CascadeDrafter(tiny_draft, INNER[inner], 4))
    check_penalised_greedy(tiny_llama, CascadeDrafter(tiny_draft, INNER[inner], 4))


def test_a_cascade_in_a_cascade_is_still_the_draft_model(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    middle = CascadeDrafter(CausalLM(tiny_model("llama", seed=4)), PromptLookupDrafter(3), 3)
    for sampling in (SamplingConfig(), SamplingConfig(repetition_penalty=1.4)):
        texts = [
            Engine(tiny_llama, drafter).decode([1, 2, 1], DecodingConfig(30, sampling))
            for drafter in (CascadeDrafter(tiny_draft, middle, 5), DraftModelDrafter(tiny_draft, (1,) * 5))
        ]
        assert [step.accepted for step in texts[0].steps] == [step.accepted for step in texts[1].steps]
    assert Engine(tiny_llama, CascadeDrafter(tiny_draft, middle, 5)).decode([1, 2, 1], DecodingConfig(30)).tokens == (
        naive_greedy(tiny_llama.model, [1, 2, 1], 30)
    )


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED])
def test_sampled_texts_are_those_of_the_draft_model_with_the_same_seed(
    tiny_llama: CausalLM, tiny_draft: CausalLM, sampling: SamplingConfig
) -> None:
    prompts = [[1, 2, 1, 2], [5], [7, 7, 0, 7], [3, 1]]
    config = DecodingConfig(24, sampling, seed=5)
    own = Engine(tiny_llama, CascadeDrafter(tiny_draft, PromptLookupDrafter(3), 4)).decode(
        prompts, config, batch_size=3
    )
    expected = Engine(tiny_llama, DraftModelDrafter(tiny_draft, (1,) * 4)).decode(prompts, config, batch_size=2)
    assert [text.tokens for text in own] == [text.tokens for text in expected]


def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    check_text_of_the_seed(tiny_llama, CascadeDrafter(tiny_draft, PromptLookupDrafter(3), 4))


def test_the_loop_writes_the_targets_distribution() -> None:
    drafter = CascadeDrafter(small_llama(3), PromptLookupDrafter(2, 2), 2)
    chance, accepted = decode_many(small_llama(5), drafter, SamplingConfig(1.0))
    assert chance > FALSE_ALARM
    assert accepted > 40, "a draft that is never accepted proves little"
