"""Lookahead decoding: its window and pool beside a naive Jacobi iteration, and the loop with it."""

import pytest
from drafter_checks import (
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
)
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama

from decoding.drafters import LookaheadDrafter
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY, TRAVERSAL_VERIFICATION, Rule


def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, counting: CausalLM) -> None:
    for sizes in ((4, 4, 3), (1, 2, 1), (3, 2, 2)):
        check_greedy(tiny_llama, LookaheadDrafter(*sizes))
    check_greedy(counting, LookaheadDrafter(5, 4, 4))
    check_penalised_greedy(tiny_llama, LookaheadDrafter(4, 3, 3))


def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM) -> None:
    check_text_of_the_seed(tiny_llama, LookaheadDrafter(4, 3, 3))


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TRAVERSAL_VERIFICATION])
def test_the_loop_writes_the_targets_distribution(rule: Rule) -> None:
    chance, accepted = decode_many(small_llama(5), LookaheadDrafter(2, 3, 2), SamplingConfig(1.0), rule)
    assert chance > FALSE_ALARM
    assert accepted > 40, "a draft that is never accepted proves little"
