"""A draft with another tokenizer: what it writes is translated, aligned, and never changes the target's text."""

from collections import Counter

import pytest
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from test_other_tokenizer import DOUBLE, SINGLE, target_as_draft, tokenizer
from tiny_models import naive_greedy, tiny_model

from decoding.drafters import OtherTokenizerDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY

PROMPTS = ([1, 2, 3], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


def random_drafter(count: int = 3) -> OtherTokenizerDrafter:
    return OtherTokenizerDrafter(CausalLM(tiny_model(vocab=24, seed=1)), tokenizer(DOUBLE), tokenizer(SINGLE), count)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_output_is_plain_greedy_alone_and_in_batches(tiny_llama: CausalLM, penalty: float) -> None:
    config = DecodingConfig(12, SamplingConfig(repetition_penalty=penalty))
    plain = [naive_greedy(tiny_llama.model, prompt, 12, penalty) for prompt in PROMPTS]
    for drafter in (random_drafter(), target_as_draft(tiny_llama)):
        assert [Engine(tiny_llama, drafter).decode(prompt, config).tokens for prompt in PROMPTS] == plain
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=3)
        assert [generation.tokens for generation in batch] == plain


def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(tiny_llama: CausalLM) -> None:
    config = DecodingConfig(12, SamplingConfig(1.0), SAMPLED_VERIFY, seed=3)
    plain = [generation.tokens for generation in Engine(tiny_llama).decode(PROMPTS, config, batch_size=1)]
    for drafter in (random_drafter(), target_as_draft(tiny_llama)):
        for batch_size in (1, 3):
            batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
            assert [generation.tokens for generation in batch] == plain


def test_sampled_texts_have_the_targets_distribution() -> None:
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    draft = CausalLM(tiny_model(vocab=6, seed=3))
    drafter = OtherTokenizerDrafter(draft, tokenizer([*"abcd", "ab", "cd"]), tokenizer([*"abcd"]), 2)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40
