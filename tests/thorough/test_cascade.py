"""A cascade drafts the same as its larger draft alone, in fewer passes of that draft."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_checks import Follower, accept_some, nearly, request
from test_generate import DRAFT_SEED, FALSE_ALARM, TARGET_SEED, TEXTS, decode_many, small_llama
from tiny_models import full_forward, tiny_model

from decoding.drafters import CascadeDrafter, DraftModelDrafter
from decoding.drafters.experimental import cascade
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.verify import Verdict

CONTROLS = [SamplingConfig(), SamplingConfig(repetition_penalty=1.4), SamplingConfig(1.0, top_p=0.9)]
CONTROLS += [replace(CONTROLS[2], repetition_penalty=1.4)]


@pytest.mark.parametrize("sampling", CONTROLS)
def test_the_chain_or_its_q_is_the_larger_drafts_own_whatever_was_rejected(
    tiny_llama: CausalLM, tiny_draft: CausalLM, sampling: SamplingConfig
) -> None:
    chance, text = random.Random(3), [3, 1, 4]
    cascade = Follower(CascadeDrafter(tiny_draft, nearly(tiny_draft), 5, 2), tiny_llama, sampling)
    alone = Follower(DraftModelDrafter(tiny_draft, 5), tiny_llama, sampling)
    for _ in range(12):
        depth = chance.randint(1, 6)
        ((own,), (expected,)) = (each.propose(text, depths=[depth]) for each in (cascade, alone))
        assert own.kind is expected.kind and own.tree.shape == expected.tree.shape
        if own.q is None:
            assert own.tree.token_list == expected.tree.token_list
        else:
            whole = [*text, *own.tree.token_list[1:]]
            seen = torch.stack(
                [torch.bincount(torch.tensor(whole[:end]), minlength=16) > 0 for end in range(len(text), len(whole))]
            )
            logits = full_forward(tiny_draft.model, whole)[len(text) - 1 : -1]
            wanted = probabilities(logits, sampling, HistoryRows(seen))
            torch.testing.assert_close(own.q, wanted, rtol=0, atol=1e-5)
            assert bool((own.q.gather(1, own.tree.tokens[1:, None]) > 0).all())
        text += accept_some(own, chance)
        text += [chance.randrange(16) for _ in range(chance.choice([0, 0, 3, 12]))]  # steps without a call


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_small_draft_guesses_right_takes_no_pass_of_the_larger_one(
    tiny_llama: CausalLM, temperature: float
) -> None:
    large, same = (CausalLM(tiny_model(seed=1)) for _ in range(2))
    sizes: list[int] = []
    embeddings: Any = large.model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    session = Follower(CascadeDrafter(large, same, 8, 3), tiny_llama, SamplingConfig(temperature)).session
    (proposal,) = session.propose([request([1, 2, 3, 4])])
    assert len(proposal.tree) == 9
    assert sizes == [3, 4, 4], "the prompt; then twice the last token and three guesses, each for four tokens"
    sizes.clear()
    text = [1, 2, 3, 4, *proposal.tree.token_list[1:]]
    session.propose([request([*text, 9])])
    assert sizes == [5, 4], "the last token of the chain never ran"
    sizes.clear()
    session.propose([request([*text, 9, 9, 9])])
    assert sizes[0] in (4, 5, 6), "only what was rejected and what is new"


def every_guess_kept(proposals: Any, logits: Any, *rest: Any) -> list[Verdict]:
    """Replace `decide`: every guess is kept, and only the token after the guess comes from the larger draft."""
    last = [len(proposal.tree) - 1 for proposal in proposals]
    return [
        Verdict(tuple(range(1, end + 1)), source.draw(of_row[end].softmax(-1)))
        for end, of_row, source in zip(last, logits, rest[-1], strict=True)
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_the_loop_writes_the_targets_distribution_only_if_the_larger_draft_verifies_the_guesses(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(cascade, "decide", every_guess_kept)
    drafter = CascadeDrafter(small_llama(DRAFT_SEED), small_llama(7), 3, 2)
    chance, accepted = decode_many(small_llama(TARGET_SEED), drafter, SamplingConfig(1.0))
    assert (chance < FALSE_ALARM / 100) if broken else (chance > FALSE_ALARM and accepted > TEXTS / 10)
