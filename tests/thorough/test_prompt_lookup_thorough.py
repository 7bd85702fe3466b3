"""Prompt lookup: which continuations it finds, in which order, and that it keeps up with any text."""

import pytest
from drafter_checks import (
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
)

from decoding.drafters import PromptLookupDrafter
from decoding.model.causal_lm import CausalLM


@pytest.mark.parametrize("branches", [1, 3])
def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, counting: CausalLM, branches: int) -> None:
    drafter = PromptLookupDrafter(5, num_branches=branches)
    check_greedy(tiny_llama, drafter)
    check_greedy(counting, drafter)
    check_penalised_greedy(tiny_llama, drafter)


@pytest.mark.parametrize("branches", [1, 3])
def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM, branches: int) -> None:
    check_text_of_the_seed(tiny_llama, PromptLookupDrafter(5, num_branches=branches))
