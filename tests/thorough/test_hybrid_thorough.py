"""Two drafters in one tree: what is grafted, what kind it is, and that both sessions keep up."""

import pytest
from drafter_checks import (
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
)
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama
from test_hybrid import NAMES, SAMPLED, hybrids

from decoding.drafters import DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from decoding.model.causal_lm import CausalLM


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, tiny_draft: CausalLM, name: str) -> None:
    check_greedy(tiny_llama, hybrids(tiny_draft)[name])
    check_penalised_greedy(tiny_llama, hybrids(tiny_draft)[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM, tiny_draft: CausalLM, name: str) -> None:
    check_text_of_the_seed(tiny_llama, hybrids(tiny_draft)[name])


def test_the_loop_writes_the_targets_distribution() -> None:
    # Not every pair of tokens occurred before: chains with their q and mixed trees alternate in a text.
    drafter = HybridDrafter(DraftModelDrafter(small_llama(3), (1, 1)), PromptLookupDrafter(2, 2, min_ngram=2))
    chance, accepted = decode_many(small_llama(5), drafter, SAMPLED)
    assert chance > FALSE_ALARM
    assert accepted > 40, "a draft that is never accepted proves little"
