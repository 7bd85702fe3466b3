"""A cascade drafts exactly what its draft model would, in fewer passes."""

import pytest
from drafter_checks import (
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
)
from test_cascade import INNER, PENALISED, SAMPLED
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama
from tiny_models import naive_greedy, tiny_model

from decoding.drafters import CascadeDrafter, DraftModelDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig


@pytest.mark.parametrize("inner", ["lookup", "lookahead"])
def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, tiny_draft: CausalLM, inner: str) -> None:
    check_greedy(tiny_llama, CascadeDrafter(tiny_draft, INNER[inner], 4))
    check_penalised_greedy(tiny_llama, CascadeDrafter(tiny_draft, INNER[inner], 4))


def test_a_cascade_in_a_cascade_is_still_the_draft_model(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    middle = CascadeDrafter(CausalLM(tiny_model("llama", seed=4)), PromptLookupDrafter(3), 3)
    for sampling in (SamplingConfig(), SamplingConfig(repetition_penalty=1.4)):
        texts = [
            Engine(tiny_llama, drafter).decode([1, 2, 1], DecodingConfig(30, sampling))
            for drafter in (CascadeDrafter(tiny_draft, middle, 5), DraftModelDrafter(tiny_draft, (1,) * 5))
        ]
        assert [step.accepted for step in texts[0].steps] == [step.accepted for step in texts[1].steps]
    assert Engine(tiny_llama, CascadeDrafter(tiny_draft, middle, 5)).decode([1, 2, 1], DecodingConfig(30)).tokens == (
        naive_greedy(tiny_llama.model, [1, 2, 1], 30)
    )


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED])
def test_sampled_texts_are_those_of_the_draft_model_with_the_same_seed(
    tiny_llama: CausalLM, tiny_draft: CausalLM, sampling: SamplingConfig
) -> None:
    prompts = [[1, 2, 1, 2], [5], [7, 7, 0, 7], [3, 1]]
    config = DecodingConfig(24, sampling, seed=5)
    own = Engine(tiny_llama, CascadeDrafter(tiny_draft, PromptLookupDrafter(3), 4)).decode(
        prompts, config, batch_size=3
    )
    expected = Engine(tiny_llama, DraftModelDrafter(tiny_draft, (1,) * 4)).decode(prompts, config, batch_size=2)
    assert [text.tokens for text in own] == [text.tokens for text in expected]


def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    check_text_of_the_seed(tiny_llama, CascadeDrafter(tiny_draft, PromptLookupDrafter(3), 4))


def test_the_loop_writes_the_targets_distribution() -> None:
    drafter = CascadeDrafter(small_llama(3), PromptLookupDrafter(2, 2), 2)
    chance, accepted = decode_many(small_llama(5), drafter, SamplingConfig(1.0))
    assert chance > FALSE_ALARM
    assert accepted > 40, "a draft that is never accepted proves little"
