"""Medusa heads as a drafter: trees of a fixed shape or chosen at each step, heads with an lm_head or without one."""

from collections import Counter

import pytest
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from test_medusa_drafter import BOTH_LAYOUTS, PATHS
from tiny_models import naive_greedy

from decoding.drafters import MedusaDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY

PROMPTS = ([1, 2, 3], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


def trained_heads(target: CausalLM, shared: bool, count: int = 3) -> MedusaHeads:
    """Heads that say what the target's lm_head says: right now and then."""
    config = MedusaConfig(target.hidden_size, target.vocab_size, count, tree=((0,),), shared_lm_head=shared)
    return MedusaHeads.for_target(target.model, config)


@BOTH_LAYOUTS
@pytest.mark.parametrize("dynamic", [None, 9])
def test_greedy_output_is_plain_greedy_alone_and_in_batches(
    tiny_llama: CausalLM, shared: bool, dynamic: int | None
) -> None:
    drafter = MedusaDrafter(trained_heads(tiny_llama, shared), None if dynamic else PATHS, dynamic)
    config = DecodingConfig(14)
    plain = [naive_greedy(tiny_llama.model, prompt, 14) for prompt in PROMPTS]
    alone = [Engine(tiny_llama, drafter).decode(prompt, config) for prompt in PROMPTS]
    assert [generation.tokens for generation in alone] == plain
    assert sum(step.accepted for generation in alone for step in generation.steps) > 0
    for batch_size in (2, 3):
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
        assert [generation.tokens for generation in batch] == plain


@pytest.mark.parametrize("dynamic", [None, 9])
def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(
    tiny_llama: CausalLM, dynamic: int | None
) -> None:
    drafter = MedusaDrafter(trained_heads(tiny_llama, True), None if dynamic else PATHS, dynamic)
    config = DecodingConfig(14, SamplingConfig(1.0, top_p=0.95), SAMPLED_VERIFY, seed=3)
    plain = [generation.tokens for generation in Engine(tiny_llama).decode(PROMPTS, config, batch_size=1)]
    for batch_size in (1, 3):
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
        assert [generation.tokens for generation in batch] == plain


@pytest.mark.parametrize("dynamic", [None, 5])
def test_sampled_texts_have_the_targets_distribution_with_a_shared_lm_head(dynamic: int | None) -> None:
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    heads = trained_heads(target, shared=True, count=2)
    drafter = MedusaDrafter(heads, None if dynamic else [[0], [1], [0, 0], [0, 1], [1, 0]], dynamic)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40
