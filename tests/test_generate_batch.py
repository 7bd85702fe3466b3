"""Many texts at once, and one text after another on one cache: each text is the same as alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from drafter_checks import DRAFTERS
from hypothesis_profiles import few
from scripted_drafters import HostileDrafter
from tiny_models import full_forward, naive_greedy, tiny_model

from decoding.drafters import Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY
from decoding.text import Generation

# Prompts of one to 40 tokens; there are more of them than rows in any batch here except the largest.
PROMPTS = ([3, 1, 4, 1, 5], [7], [2, 7, 1, 8] * 10, [6, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1], [0], [5, 5, 5, 5])
COUNT = 14
EVERY_CONTROL = SamplingConfig(1.2, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.3)


@cache
def llama(seed: int = 0) -> CausalLM:
    return CausalLM(tiny_model("llama", seed=seed))


@cache
def plain(place: int) -> tuple[int, ...]:
    return naive_greedy(llama().model, PROMPTS[place], COUNT)


def plain_texts() -> list[tuple[int, ...]]:
    return [plain(place) for place in range(len(PROMPTS))]


def hostile(seed: int = 0, chains: bool = False, texts: Sequence[tuple[int, ...]] = ()) -> HostileDrafter:
    """Make a hostile drafter that knows the right text of every prompt."""
    right = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts or plain_texts(), strict=True)]
    return HostileDrafter(seed, right[0], chains=chains, others=right[1:])


FEW_DRAFTERS = ("chain", "DSpark tree", "lookup", "drawn hybrid")
"""In `make check`, these represent all drafters in tests that would otherwise take too long."""


def drafter_of(name: str) -> Drafter:
    return DRAFTERS[name](llama(), llama(1))


def decoded(
    drafter: Drafter | None,
    config: DecodingConfig,
    batch_size: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    target: CausalLM | None = None,
) -> list[tuple[int, ...]]:
    return [text.tokens for text in Engine(target or llama(), drafter).decode(prompts, config, batch_size=batch_size)]


def alone(
    drafter: Drafter | None, config: DecodingConfig, prompts: Sequence[Sequence[int]], target: CausalLM | None = None
) -> list[tuple[int, ...]]:
    """Decode each prompt separately, with the seed that follows from its place."""
    return [
        Engine(target or llama(), drafter).decode(prompt, replace(config, seed=config.seed + place)).tokens
        for place, prompt in enumerate(prompts)
    ]


# --- a row is what it is alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(DRAFTERS, FEW_DRAFTERS))
def test_every_row_is_sampled_as_it_is_alone_whatever_stands_beside_it(name: str) -> None:
    """The rule is the one that suits the drafter; drafting and acceptance are both random."""
    drafter, config = drafter_of(name), DecodingConfig(7, EVERY_CONTROL, seed=5)
    wanted = alone(drafter, config, PROMPTS[:4])
    assert len(set(wanted)) == 4
    assert decoded(drafter, config, 3, PROMPTS[:4]) == wanted


# --- rows end at different times -------------------------------------------------------------------------------------


def countdown(*lengths: int) -> list[list[int]]:
    """Return prompts for the counting target whose outputs, with 15 as the end token, have these lengths."""
    return [[15 - length] for length in lengths]


def test_a_row_that_ends_makes_room_for_the_next_prompt_in_its_own_place(counting: CausalLM) -> None:
    config = DecodingConfig(14, eos_token_ids=(15,))
    steps = Engine(counting).steps(countdown(1, 3, 2, 1, 2), config, batch_size=2)
    order = [(place, step.tokens[0], step.is_prefill) for place, step in steps]
    assert order == [
        (0, 15, True),  # the first prompt ends with its first token
        (1, 13, True),
        (2, 14, True),  # so the third prompt takes its row, before the second continues
        (2, 15, False),
        (1, 14, False),
        (3, 15, True),  # in the first row again, and again finished at once
        (4, 14, True),
        (4, 15, False),
        (1, 15, False),
    ]


# --- what a step says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingConfig(), EVERY_CONTROL], ids=["greedy", "every control"])
@pytest.mark.parametrize("name", ["hostile", "chain"])
def test_logprobs_are_those_of_the_target_itself_before_any_control(name: str, sampling: SamplingConfig) -> None:
    rule = None if sampling.greedy else SAMPLED_VERIFY
    config = DecodingConfig(COUNT, sampling, rule, eos_token_ids=(plain(0)[5],), logprobs=True)
    drafter = hostile() if name == "hostile" else drafter_of(name)
    for prompt, text in zip(PROMPTS, Engine(llama(), drafter).decode(PROMPTS, config, batch_size=3), strict=True):
        assert [len(step.logprobs) for step in text.steps] == [len(step.tokens) for step in text.steps]
        given = torch.tensor([value for step in text.steps for value in step.logprobs])
        rows = full_forward(llama().model, [*prompt, *text.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(text.tokens)[:, None])[:, 0]
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)


# --- one text after another on one cache -----------------------------------------------------------------------------


def test_a_stream_whose_cache_was_given_to_another_is_not_gone_on_with() -> None:
    kept = llama().new_cache(64)
    first = Engine(llama()).steps([3, 1, 4], DecodingConfig(8), cache=kept)
    next(first), next(first)
    second = list(Engine(llama()).steps([3, 1, 5], DecodingConfig(8), cache=kept))
    assert Generation.of(second).tokens == naive_greedy(llama().model, [3, 1, 5], 8)
    with pytest.raises(ValueError, match=r"another generation has begun on this cache: finish or drop the first"):
        next(first)
