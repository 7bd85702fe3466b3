"""The tests of tests/test_generate_families.py for the remaining families and attentions."""

import pytest
import test_generate_families as few
from tiny_models import OTHER_ATTENTIONS, OTHER_FAMILIES


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_plain_decoding_is_transformers_generate(family: str, attention: str) -> None:
    few.test_plain_decoding_is_transformers_generate(family, attention)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_the_texts_of_these_tests_need_their_context(family: str) -> None:
    few.test_the_texts_of_these_tests_need_their_context(family)


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_ragged_batches_under_a_hostile_drafter_are_plain_greedy(family: str, attention: str) -> None:
    few.test_ragged_batches_under_a_hostile_drafter_are_plain_greedy(family, attention)
