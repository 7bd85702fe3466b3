"""Every drafter in the whole loop with sampling: the text for a seed, and the target's distribution."""

import pytest
from drafter_checks import DRAFTERS, check_text_of_the_seed
from test_generate import FALSE_ALARM, TARGET_SEED, TEXTS, decode_many, drafter_called, small_llama

from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_verify_writes_plain_decodings_text_of_the_seed(
    tiny_llama: CausalLM, tiny_draft: CausalLM, name: str
) -> None:
    check_text_of_the_seed(tiny_llama, DRAFTERS[name](tiny_llama, tiny_draft))


# Every check decodes the first two; the other drafters consist of parts that are tested separately here.
@pytest.mark.parametrize(
    "name", sorted(DRAFTERS.keys() - {"chain", "Markov heads", "likeliest heads", "likeliest DFlash", "DSpark hybrid"})
)
def test_the_loop_writes_the_targets_distribution(name: str) -> None:
    target, drafter = small_llama(TARGET_SEED), None
    if any(
        kind in name for kind in ("DSpark", "DFlash", "EAGLE")
    ):  # a target with one layer has no states that a server reads
        target = small_llama(10, layers=2)
        drafter = DRAFTERS[name](target, target)
    chance, accepted = decode_many(target, drafter or drafter_called(name), SamplingConfig(1.0))
    assert chance > FALSE_ALARM
    assert accepted > TEXTS / 10, "a draft that is never accepted proves little"


@pytest.mark.parametrize("name", ["chain", "Markov heads"])
def test_the_loop_writes_the_targets_distribution_under_every_control_at_once(name: str) -> None:
    sampling = SamplingConfig(1.3, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.3)
    chance, accepted = decode_many(small_llama(TARGET_SEED), drafter_called(name), sampling)
    assert chance > FALSE_ALARM and accepted > TEXTS / 10
