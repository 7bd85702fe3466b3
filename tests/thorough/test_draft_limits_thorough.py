"""Where a draft model's drafting ends: tokens it does not know, caches it shares, targets it does not fit."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
import pytest
from drafter_checks import PROMPTS
from test_draft_limits import (
    KNOWN,
    NAMES,
    controls,
    drafters,
    small_draft,  # noqa: F401  # fixtures
)

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.verify import SAMPLED_VERIFY


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_seed_is_plain_decodings_where_drafts_break_off(
    tiny_llama: CausalLM, small_draft: CausalLM, name: str
) -> None:
    sampling = controls(1, 3)
    plain = Engine(tiny_llama).decode(PROMPTS, DecodingConfig(14, sampling, seed=3), batch_size=3)
    drafted = Engine(tiny_llama, drafters(small_draft)[name]).decode(
        PROMPTS, DecodingConfig(14, sampling, SAMPLED_VERIFY, seed=3), batch_size=3
    )
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert {token for text in plain for token in text.tokens} & set(range(KNOWN, 16))


def test_a_cascade_breaks_off_where_its_draft_model_does(tiny_llama: CausalLM, small_draft: CausalLM) -> None:
    config = DecodingConfig(20, controls(1), seed=5)
    texts = [
        Engine(tiny_llama, drafters(small_draft)[name]).decode(PROMPTS, config, batch_size=2)
        for name in ("chain", "cascade")
    ]
    assert [text.tokens for text in texts[0]] == [text.tokens for text in texts[1]]
