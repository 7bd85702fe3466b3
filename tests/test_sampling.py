"""From logits to probabilities, compared with the processors of transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decoding import controls
from decoding.controls import sampling_from_generation_config
from decoding.rules.sampling import (
    ForPromptLength,
    History,
    HistoryRows,
    SamplingConfig,
    adjusted_logits,
    best_tokens,
    probabilities,
)
from decoding.rules.tree import TokenTree


def history_of(text: torch.Tensor, vocab: int, prompt_length: int = 0) -> HistoryRows:
    """Make the history of texts with equal lengths, of shape (rows, length)."""
    rows, length = text.shape
    seen = torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, text, True)
    return HistoryRows(seen, text, (length,) * rows, (prompt_length,) * rows)


def transformers_probabilities(logits: torch.Tensor, sampling: SamplingConfig, text: torch.Tensor) -> torch.Tensor:
    """Apply the same controls by transformers, in the order of its `generate`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors += list(sampling.processors)
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        processors.append(TypicalLogitsWarper(sampling.typical_p))
    return processors(text, logits.clone()).softmax(-1)


def assert_same_as_transformers(sampling: SamplingConfig, seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, vocab, generator=generator)
    text = torch.randint(vocab, (4, 5), generator=generator)
    ours = probabilities(logits, sampling, history_of(text, vocab))
    theirs = transformers_probabilities(logits, sampling, text)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
    typical_p=st.floats(0.01, 1),
    penalty=st.floats(0.5, 2),
    bad_word=st.lists(st.integers(0, 3), max_size=2),
    ngram=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(4, 40),
)
def test_probabilities_are_those_of_transformers_for_any_settings(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    penalty: float,
    bad_word: list[int],
    ngram: int,
    seed: int,
    vocab: int,
) -> None:
    processors: tuple[Any, ...] = (NoBadWordsLogitsProcessor([bad_word]),) if bad_word else ()
    processors += (NoRepeatNGramLogitsProcessor(ngram),) if ngram > 1 else ()
    sampling = SamplingConfig(temperature, top_k, top_p, min_p, typical_p, penalty, processors=processors)
    assert_same_as_transformers(sampling, seed, vocab)


def test_temperature_zero_puts_everything_on_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert probabilities(logits, SamplingConfig()).tolist() == [[0, 1, 0]]


# --- penalties and processors ---------------------------------------------------------------------------------------


def test_the_repetition_penalty_comes_before_processors_and_the_temperature_after_them() -> None:
    given_scores = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        given_scores.append(scores.clone())
        return scores

    sampling = SamplingConfig(0.5, repetition_penalty=2.0, processors=(note,))
    probabilities(torch.tensor([[4.0, 3.0]]), sampling, history_of(torch.tensor([[0, 0]]), 2))
    assert [scores.tolist() for scores in given_scores] == [[[2, 3]]]


def test_a_processor_can_know_the_length_of_each_prompt() -> None:
    def build(prompt_length: int) -> Any:
        return lambda input_ids, scores: scores + 100 * prompt_length + input_ids.shape[1]

    history = HistoryRows(texts=torch.zeros(3, 5, dtype=torch.long), lengths=(5, 5, 4), prompt_lengths=(1, 3, 1))
    sampling = SamplingConfig(processors=(ForPromptLength(build),))
    assert adjusted_logits(torch.zeros(3, 1), sampling, history).tolist() == [[105], [305], [104]]


def test_adjusting_rows_together_is_adjusting_them_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [history_of(torch.randint(9, (2, length), generator=generator), 9, 1) for length in (3, 1, 3, 4)]
    logits = torch.randn(8, 9, generator=generator)
    sampling = SamplingConfig(
        0.8, 0, 0.9, 0.01, 0.9, 1.3, (NoRepeatNGramLogitsProcessor(2), NoBadWordsLogitsProcessor([[1, 2]]))
    )
    together = probabilities(logits, sampling, HistoryRows.cat(parts))
    alone = [probabilities(logits[2 * i : 2 * i + 2], sampling, part) for i, part in enumerate(parts)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_best_of_tied_tokens_is_the_one_with_the_lowest_id_however_wide_the_vocabulary(dtype: torch.dtype) -> None:
    for vocab in (3, 17, 4096):
        logits = torch.randint(4, (40, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
        lowest = [row.index(max(row)) for row in logits.tolist()]
        assert best_tokens(logits).tolist() == best_tokens(logits.T.contiguous().T).tolist() == lowest
        assert probabilities(logits, SamplingConfig()).argmax(-1).tolist() == lowest


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
    """Compare the scores of every step of `generate` with our scores for the same logits and text."""
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


def test_the_callers_processor_takes_the_location_of_one_of_its_type(model: PreTrainedModel) -> None:
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
    setattr(config, name, value)  # bypasses its validation
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
    with pytest.raises(ValueError, match=f"{name} is .* but eos_token_id is not set: set eos_token_id"):
        sampling_from_generation_config(with_setting(name, value, do_sample=False))
