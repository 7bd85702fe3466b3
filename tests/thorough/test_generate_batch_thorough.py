"""The tests of tests/test_generate_batch.py for the remaining drafters, families and batch sizes."""

import pytest
import test_generate_batch as few
from scripted_drafters import RandomPolicy
from test_generate_batch import COUNT, DRAFTERS, FEW_DRAFTERS, PROMPTS, drafter_of, llama, plain_texts

from decoding.generate import DecodingConfig, Engine

OTHER_DRAFTERS = [name for name in DRAFTERS if name not in FEW_DRAFTERS]


@pytest.mark.parametrize("name", OTHER_DRAFTERS)
def test_every_row_is_sampled_as_it_is_alone_whatever_stands_beside_it(name: str) -> None:
    few.test_every_row_is_sampled_as_it_is_alone_whatever_stands_beside_it(name)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_rows_stay_plain_greedy_where_a_policy_drafts_now_and_then(name: str) -> None:
    texts = Engine(llama(), drafter_of(name), RandomPolicy(0)).decode(PROMPTS[:5], DecodingConfig(COUNT), batch_size=3)
    assert [text.tokens for text in texts] == plain_texts()[:5]
