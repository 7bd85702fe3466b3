"""Trees that grow where the draft is surest: against all trees there are, in batches, and through the whole loop."""

import itertools
from collections import Counter

import pytest
from test_draft_tree import PENALISED, naive_scores, opened, paths, propose
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from tiny_models import naive_greedy

from decoding.drafters import DraftTreeDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION

PROMPTS = ([1, 2, 3], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


@pytest.mark.parametrize(
    ("sizes", "penalty"), [((3, 3, 12), 1.0), ((3, 3, 12), 1.5), ((1, 4, 5), 1.0), ((5, 1, 6), 1.0), ((4, 2, 9), 1.5)]
)
def test_greedy_output_is_plain_greedy_alone_and_in_batches(
    tiny_llama: CausalLM, tiny_draft: CausalLM, sizes: tuple[int, int, int], penalty: float
) -> None:
    drafter = DraftTreeDrafter(tiny_draft, *sizes)
    config = DecodingConfig(14, SamplingConfig(repetition_penalty=penalty))
    plain = [naive_greedy(tiny_llama.model, prompt, 14, penalty) for prompt in PROMPTS]
    assert [Engine(tiny_llama, drafter).decode(prompt, config).tokens for prompt in PROMPTS] == plain
    for batch_size in (2, 4):
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
        assert [generation.tokens for generation in batch] == plain


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0), PENALISED])
def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(
    tiny_llama: CausalLM, sampling: SamplingConfig
) -> None:
    drafter = DraftTreeDrafter(tiny_llama, 3, 3, 12)
    config = DecodingConfig(14, sampling, SAMPLED_VERIFY, seed=3)
    plain = [generation.tokens for generation in Engine(tiny_llama).decode(PROMPTS, config, batch_size=1)]
    for batch_size in (1, 3):
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
        assert [generation.tokens for generation in batch] == plain
        assert sum(step.accepted for generation in batch for step in generation.steps) > 8


@pytest.mark.parametrize("rule", [None, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION])
def test_sampled_texts_have_the_targets_distribution(rule) -> None:  # type: ignore[no-untyped-def]
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    drafter = DraftTreeDrafter(small_llama(3), 2, 2, 6)
    config = DecodingConfig(LENGTH, sampling, rule)
    generations = Engine(target, drafter).decode([PROMPT] * 400, config, batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    accepted = sum(step.accepted for generation in generations for step in generation.steps)
    assert accepted > 40, "a draft that is never accepted proves little"


@pytest.mark.parametrize("nodes", [4, 9, 17])
def test_a_beam_as_wide_as_the_vocabulary_and_the_tree_finds_the_best_of_all_trees(
    tiny_draft: CausalLM, tiny_llama: CausalLM, nodes: int
) -> None:
    """The likeliest of all 16 + 256 + 4,096 paths, which are a tree, since a product falls along a path."""
    text, scores = [1, 2, 1], {(): 0.0}
    for length in (1, 2, 3):
        for before in itertools.product(range(16), repeat=length - 1):
            following = naive_scores(tiny_draft, [*text, *before], SamplingConfig())
            scores |= {(*before, token): scores[before] + following[token] for token in following}
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:nodes]
    assert best[0] == () and max(map(len, best)) > 1
    (proposal,) = propose(opened(DraftTreeDrafter(tiny_draft, 3, 16, nodes), tiny_llama, SamplingConfig()), text)
    assert paths(proposal) == set(best[1:])
