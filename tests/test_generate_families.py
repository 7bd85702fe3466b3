"""Greedy decoding is `transformers`' own `generate`, family by family; what could not be is refused by name."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scripted_drafters import HostileDrafter
from tiny_models import FEW_ATTENTIONS, FEW_FAMILIES, WINDOW, naive_greedy, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM

PROMPT = [3, 1, 4, 1, 5, 9]
# From one token to far past the window.
RAGGED = [PROMPT, [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [6, 6]]
COUNT = 16


@cache
def model_of(family: str, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    return tiny_model(family, attention=attention, seed=seed)


@cache
def plain_texts(family: str) -> list[tuple[int, ...]]:
    """Of the prompts in RAGGED, each by itself and without any cache."""
    return [naive_greedy(model_of(family), prompt, COUNT) for prompt in RAGGED]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int, **settings: float) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # which nn.Module's getattr hides
    with torch.inference_mode():
        output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **settings)
    return tuple(output[0, len(prompt) :].tolist())


# --- families that decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_plain_decoding_is_transformers_generate(family: str, attention: str) -> None:
    model = model_of(family, attention)
    wanted = transformers_greedy(model, PROMPT, COUNT)
    assert len(wanted) == COUNT > WINDOW
    assert Engine(CausalLM(model)).decode(PROMPT, DecodingConfig(COUNT)).tokens == wanted


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_the_texts_of_these_tests_need_their_context(family: str) -> None:
    """Else nothing here would notice a wrong mask: change the far past and the text changes."""
    model = model_of(family)
    texts = {naive_greedy(model, [first, *PROMPT[1:]], 8) for first in range(4)}
    assert len(texts) > 1
    assert len(set(plain_texts(family))) == len(RAGGED)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_ragged_batches_under_a_hostile_drafter_are_plain_greedy(family: str, attention: str) -> None:
    """Mixtures of experts among them: which rows stand beside a row does not change its text."""
    target, plain = CausalLM(model_of(family, attention)), plain_texts(family)
    right = [[*prompt, *text] for prompt, text in zip(RAGGED, plain, strict=True)]
    drafter = HostileDrafter(1, right[0], others=right[1:])
    generations = Engine(target, drafter).decode(RAGGED, DecodingConfig(COUNT), batch_size=3)
    assert [generation.tokens for generation in generations] == plain
    assert all(sum(step.accepted for step in generation.steps) > 0 for generation in generations)


# --- longrope: as long as the keys in the cache stay what they are ---------------------------------------------------


@cache
def longrope() -> PreTrainedModel:
    """Phi-3 with other frequencies for texts of more than 24 tokens."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    return tiny_model("phi3", sliding_window=None, original_max_position_embeddings=24, rope_scaling=factors)


def test_longrope_decodes_up_to_where_its_frequencies_change() -> None:
    target = CausalLM(longrope())
    assert target.max_positions == 24
    wanted = transformers_greedy(longrope(), PROMPT, 18)
    for drafter in (None, HostileDrafter(0, [*PROMPT, *wanted])):
        assert Engine(target, drafter).decode(PROMPT, DecodingConfig(18)).tokens == wanted


def test_longrope_is_refused_beyond() -> None:
    """One row that grows beyond would change the frequencies of all rows, and those of the keys in the cache."""
    target = CausalLM(longrope())
    with pytest.raises(ValueError, match=r"prompt of 6 tokens and 19 new ones exceed .* context of 24"):
        Engine(target).decode(PROMPT, DecodingConfig(19))
    with pytest.raises(ValueError, match="may grow to 25 tokens, more than the draft's context of 24"):
        Engine(CausalLM(model_of("phi3")), DraftModelDrafter(target)).decode(PROMPT, DecodingConfig(19))


# --- models that are refused, each by name and with the reason -------------------------------------------------------

_TINY: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def config_of(kind: str, settings: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**_TINY, **settings})
    return config


def of(kind: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(kind, settings))
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
        ),
        "^t5 is an encoder-decoder model: give a decoder-only",
    ),
    "both directions": (lambda: of("bert"), "^bert reads texts in both directions: give a causal LM"),
    "no lm_head": (lambda: LlamaModel(LlamaConfig(**_TINY)), "LlamaModel lacks an lm_head: load the model with Auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_causal_lm_is_refused_by_name(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(ValueError, match=problem):
        CausalLM(make())
