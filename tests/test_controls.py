"""Controls by transformers: every one beside `generate` itself, step by step, in its own order."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from decoding import controls
from decoding.controls import sampling_from_generation_config
from decoding.rules.sampling import History, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree

PROMPT = [1, 5, 5, 9, 2, 5]
VOCAB = 16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def assert_same_as_generate(
    model: PreTrainedModel, config: GenerationConfig, processors: tuple[Any, ...] = ()
) -> SamplingConfig:
    """Compares the scores of every step of `generate` with ours for the same logits and text."""
    input_ids = torch.tensor([PROMPT])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sampling = sampling_from_generation_config(config, processors)
    history = History(sampling, len(PROMPT), VOCAB, "cpu")
    text = output.sequences[0].tolist()
    changed = False
    for length, logits, scores in zip(range(len(PROMPT), len(text)), output.logits, output.scores, strict=True):
        rows = history.at(text[:length], TokenTree.chain(text[length - 1 : length]))
        changed |= not torch.equal(logits, scores)
        if sampling.greedy:
            assert torch.equal(adjusted_logits(logits, sampling, rows).float(), scores)
        else:
            ours, theirs = probabilities(logits, sampling, rows), scores.softmax(-1)
            assert torch.equal(ours > 0, theirs > 0)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert changed, "a control that changes nothing proves nothing"
    return sampling


FREE_ORDER: list[dict[str, Any]] = [
    {"sequence_bias": [[[7], 3.0], [[5, 4], -4.5], [[2, 5, 11], 9.0]]},
    {"sequence_bias": [[[7], 3.0]], "repetition_penalty": 0.6},
    {"bad_words_ids": [[4], [5, 6], [3]], "eos_token_id": 3},
    {"min_length": len(PROMPT) + 3, "eos_token_id": [3, 8]},
    {"min_new_tokens": 3, "eos_token_id": [3, 8]},
    {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 3},
    {"bad_words_ids": [[4]], "remove_invalid_values": True},
    {
        "sequence_bias": [[[7], 3.0], [[5, 4], -4.5]],
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4], [5, 6]],
        "min_new_tokens": 4,
        "exponential_decay_length_penalty": (1, 1.2),
        "suppress_tokens": [0],
        "begin_suppress_tokens": [9],
        "eos_token_id": 3,
    },
]


@pytest.mark.parametrize("settings", FREE_ORDER, ids=lambda settings: "+".join(settings))
def test_greedy_scores_are_those_of_generate(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=8, pad_token_id=0, do_sample=False, **settings)
    assert assert_same_as_generate(model, config).greedy


@pytest.mark.parametrize("controls", FREE_ORDER, ids=lambda settings: "+".join(settings))
def test_sampling_distributions_are_those_of_generate(model: PreTrainedModel, controls: dict[str, Any]) -> None:
    config = GenerationConfig(
        max_new_tokens=8, pad_token_id=0, do_sample=True, temperature=1.4, top_p=0.95, typical_p=0.9, **controls
    )
    assert_same_as_generate(model, config)


def test_the_callers_processor_takes_the_place_of_one_of_its_type(model: PreTrainedModel) -> None:
    config = GenerationConfig(
        max_new_tokens=6, pad_token_id=0, repetition_penalty=1.5, no_repeat_ngram_size=3, suppress_tokens=[2]
    )
    given = (RepetitionPenaltyLogitsProcessor(0.5), NoRepeatNGramLogitsProcessor(1))
    sampling = assert_same_as_generate(model, config, given)
    assert sampling.repetition_penalty == 1, "the caller's alone"


NAMES = " ".join((*controls._REFUSED.values(), *controls._REFUSED_IF_SAMPLING.values())).split()


def test_every_setting_transformers_has_is_known() -> None:
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert len(settings) > 60
    assert settings <= controls._KNOWN | set(NAMES)


def with_setting(name: str, value: object, do_sample: bool) -> GenerationConfig:
    config = GenerationConfig(do_sample=do_sample)
    setattr(config, name, value)  # past its own validation
    return config


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_had_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .* not supported: .*; unset it$"):
        sampling_from_generation_config(with_setting(name, 2, do_sample=True))


def test_a_setting_at_the_value_that_switches_it_off_changes_nothing() -> None:
    without = sampling_from_generation_config(GenerationConfig(do_sample=True))
    for name in NAMES:
        neutral = 1 if name in controls._OFF_AT_ONE else None
        assert sampling_from_generation_config(with_setting(name, neutral, do_sample=True)) == without, name


def test_a_setting_of_a_later_transformers_is_refused_and_a_stranger_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sampling_from_generation_config(GenerationConfig(chat_format="chatml")) == SamplingConfig()
    monkeypatch.setattr(controls, "_KNOWN", controls._KNOWN - {"max_time"})
    with pytest.raises(ValueError, match=r"max_time is 2.5, which is not supported: unset it"):
        sampling_from_generation_config(GenerationConfig(max_time=2.5))


@pytest.mark.parametrize("name", ["min_length", "min_new_tokens", "exponential_decay_length_penalty"])
def test_what_holds_back_the_end_of_a_text_needs_to_know_it(name: str) -> None:
    value = (1, 1.5) if name.startswith("exponential") else 5
    with pytest.raises(ValueError, match=f"{name} is .* but eos_token_id is not set: set it"):
        sampling_from_generation_config(with_setting(name, value, do_sample=False))
