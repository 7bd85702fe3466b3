"""A trimmed vocabulary changes the drafted tokens but never the target's output."""

from collections import Counter

from test_generate import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from test_vocabulary import KEPT, PROMPTS, drafters
from tiny_models import naive_greedy, tiny_model

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import trimmed_vocabulary
from decoding.rules.sampling import SamplingConfig


def test_greedy_output_is_plain_greedy_with_a_trimmed_draft_alone_and_in_batches(tiny_llama: CausalLM) -> None:
    plain = [naive_greedy(tiny_llama.model, prompt, 12) for prompt in PROMPTS]
    for draft in (trimmed_vocabulary(tiny_model(seed=1), KEPT), trimmed_vocabulary(tiny_llama.model, KEPT)):
        for drafter in drafters(draft):
            for batch_size in (1, 3):
                batch = Engine(tiny_llama, drafter).decode(PROMPTS, DecodingConfig(12), batch_size=batch_size)
                assert [generation.tokens for generation in batch] == plain


def test_sampled_texts_have_the_targets_distribution_though_the_draft_lacks_tokens() -> None:
    """A chi-square test of 400 texts with fixed seeds; with random seeds it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    drafter = DraftModelDrafter(trimmed_vocabulary(small_llama(3).model, (0, 2, 3)), 2)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert any(1 in tokens for tokens in counts), "the target writes what the draft cannot"
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40
