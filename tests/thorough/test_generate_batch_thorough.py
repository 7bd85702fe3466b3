"""Every drafter in batches, under a policy that drafts now and then."""

import pytest
from scripted_drafters import RandomPolicy
from test_generate_batch import COUNT, DRAFTERS, PROMPTS, drafter_of, llama, plain_texts

from decoding.generate import DecodingConfig, Engine


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_rows_stay_plain_greedy_where_a_policy_drafts_now_and_then(name: str) -> None:
    texts = Engine(llama(), drafter_of(name), RandomPolicy(0)).decode(PROMPTS[:5], DecodingConfig(COUNT), batch_size=3)
    assert [text.tokens for text in texts] == plain_texts()[:5]
