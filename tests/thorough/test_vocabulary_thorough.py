"""A trimmed vocabulary changes the drafted tokens, never the target's output."""

from collections import Counter

import pytest
import torch
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from test_vocabulary import KEPT, PROMPTS, drafters
from tiny_models import full_forward, naive_greedy, tiny_model

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import (
    trimmed_vocabulary,
    with_whole_vocabulary,
)
from decoding.rules.sampling import SamplingConfig


def test_greedy_output_is_plain_greedy_with_a_trimmed_draft_alone_and_in_batches(tiny_llama: CausalLM) -> None:
    plain = [naive_greedy(tiny_llama.model, prompt, 12) for prompt in PROMPTS]
    for draft in (trimmed_vocabulary(tiny_model(seed=1), KEPT), trimmed_vocabulary(tiny_llama.model, KEPT)):
        for drafter in drafters(draft):
            for batch_size in (1, 3):
                batch = Engine(tiny_llama, drafter).decode(PROMPTS, DecodingConfig(12), batch_size=batch_size)
                assert [generation.tokens for generation in batch] == plain


def test_sampled_texts_have_the_targets_distribution_though_the_draft_lacks_tokens() -> None:
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    drafter = DraftModelDrafter(trimmed_vocabulary(small_llama(3).model, (0, 2, 3)), 2)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert any(1 in tokens for tokens in counts), "the target writes what the draft cannot"
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("vocab_size", [14, 16, 20])
def test_a_trimmed_draft_decodes_on_its_own_and_never_writes_what_it_cannot(family: str, vocab_size: int) -> None:
    """Gemma-2 bends its logits, so that -inf would not be -inf any more if it came before."""
    draft = trimmed_vocabulary(tiny_model(family), KEPT)
    alone = with_whole_vocabulary(draft, vocab_size)
    logits = full_forward(alone.model, [3, 15, 4])
    assert logits.shape == (3, vocab_size) and alone.vocab_size == vocab_size and alone.output_tokens is None
    assert torch.equal(logits[:, list(KEPT)], full_forward(draft.model, [3, 15, 4]))
    assert bool(logits[:, [token for token in range(vocab_size) if token not in KEPT]].eq(-torch.inf).all())
    assert full_forward(draft.model, [1]).shape == (1, 6), "the draft given stays as it is"
    assert alone.model.get_input_embeddings().weight is draft.model.get_input_embeddings().weight
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        texts = Engine(alone).decode(PROMPTS, DecodingConfig(12, sampling, seed=1), batch_size=2)
        assert all(len(text.tokens) == 12 and set(text.tokens) <= set(KEPT) for text in texts)
    greedy = Engine(alone).decode([1, 2], DecodingConfig(8)).tokens
    text = [1, 2]
    while len(text) < 10:
        text.append(KEPT[int(full_forward(draft.model, text)[-1].argmax())])
    assert list(greedy) == text[2:]
