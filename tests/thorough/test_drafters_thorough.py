"""Drafts of whole vocabularies, of parts of them, and of paddings: what needs the loop."""

import random

import pytest
from drafter_checks import accept_some, request
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from test_drafters import PENALISED, SAMPLED, assert_same, open_session
from tiny_models import tiny_model

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig


@pytest.mark.parametrize("vocab", [12, 20])
def test_greedy_output_is_plain_greedy_with_a_draft_of_another_padding(tiny_llama: CausalLM, vocab: int) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=2))
    for prompt in ([1, 2], [15, 13, 14]):
        plain = Engine(tiny_llama).decode(prompt, DecodingConfig(16)).tokens
        for branching in ((1, 1), (2, 2)):
            drafter = DraftModelDrafter(draft, branching)
            assert Engine(tiny_llama, drafter).decode(prompt, DecodingConfig(16)).tokens == plain


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    branching=st.sampled_from([(1,), (1, 1, 1), (3, 2), (2, 1, 2)]),
    sampling=st.sampled_from([SamplingConfig(), SAMPLED, PENALISED]),
    rows=st.integers(2, 4),
)
def test_each_row_is_drafted_for_as_if_it_were_alone(
    tiny_draft: CausalLM,
    tiny_llama: CausalLM,
    seed: int,
    branching: tuple[int, ...],
    sampling: SamplingConfig,
    rows: int,
) -> None:
    """Whatever the others accept, however little room they have, in whichever steps nobody is asked."""
    chance = random.Random(seed)
    batch = open_session(tiny_draft, tiny_llama, branching, sampling, seed=seed, rows=rows)
    loners = [open_session(tiny_draft, tiny_llama, branching, sampling, seed=seed + row) for row in range(rows)]
    texts = [[chance.randrange(16) for _ in range(chance.randint(1, 9))] for _ in range(rows)]
    for _ in range(4):
        requests = [request(text, chance.randint(0, 4), chance.choice([1, 4, 99])) for text in texts]
        for row, proposal in enumerate(batch.propose(requests)):
            (wanted,) = loners[row].propose([requests[row]])
            assert_same(proposal, wanted)
            texts[row] += accept_some(proposal, chance)
        if chance.random() < 0.3:  # steps of plain decoding
            for text in texts:
                text += [chance.randrange(16) for _ in range(chance.randint(1, 3))]
