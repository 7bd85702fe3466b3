"""From logits to probabilities, beside transformers' own processors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decoding.rules.sampling import (
    ForPromptLength,
    HistoryRows,
    SamplingConfig,
    adjusted_logits,
    best_tokens,
    probabilities,
)


def history_of(text: torch.Tensor, vocab: int, prompt_length: int = 0) -> HistoryRows:
    """Of texts of one length, (rows, length)."""
    rows, length = text.shape
    seen = torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, text, True)
    return HistoryRows(seen, text, (length,) * rows, (prompt_length,) * rows)


def transformers_probabilities(logits: torch.Tensor, sampling: SamplingConfig, text: torch.Tensor) -> torch.Tensor:
    """The same controls by transformers, in the order its `generate` puts them."""
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
