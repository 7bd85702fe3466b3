"""The drafters that tests/test_generate_sampling.py leaves out, in the same test."""

import pytest
import test_generate_sampling as few
from test_generate_sampling import (
    DRAFTERS,
    FALSE_ALARM,
    FEW_DRAFTERS,
    TARGET_SEED,
    TEXTS,
    decode_many,
    drafter_called,
    small_llama,
)

from decoding.rules.sampling import SamplingConfig


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in FEW_DRAFTERS])
def test_the_loop_writes_the_targets_distribution(name: str) -> None:
    few.test_the_loop_writes_the_targets_distribution(name)


def test_the_loop_writes_the_targets_distribution_under_every_control_at_once() -> None:
    sampling = SamplingConfig(1.3, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.3)
    chance, accepted = decode_many(small_llama(TARGET_SEED), drafter_called("chain"), sampling)
    assert chance > FALSE_ALARM and accepted > TEXTS / 10
