"""From logits to probabilities to tokens, beside transformers' own processors."""

import itertools

import pytest
import torch
from enumeration import distribution
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.sampling import (
    GeneratorSource,
    RandomSource,
    SamplingConfig,
    draw_without_replacement,
    penalised_logits,
    probabilities,
    seen_tokens,
)
from decoding.tree import TokenTree, TreeShape


def transformers_probabilities(logits: torch.Tensor, sampling: SamplingConfig, text: torch.Tensor) -> torch.Tensor:
    """The same controls by transformers, in the order its `generate` puts them."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.repetition_penalty != 1:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(text, logits.clone()).softmax(-1)


def assert_same_as_transformers(sampling: SamplingConfig, seed: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, vocab, generator=generator)
    text = torch.randint(vocab, (4, 5), generator=generator)
    seen = torch.zeros(4, vocab, dtype=torch.bool).scatter(1, text, True)
    ours = probabilities(logits, sampling, seen)
    theirs = transformers_probabilities(logits, sampling, text)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


GRID = list(itertools.product([0.3, 1.0, 1.7], [0, 1, 5, 99], [1.0, 0.9, 0.2], [0.0, 0.1], [1.0, 1.3, 0.8]))


def test_probabilities_are_those_of_transformers_over_a_grid_of_settings() -> None:
    assert len(GRID) == 216
    for seed, settings in enumerate(GRID):
        assert_same_as_transformers(SamplingConfig(*settings), seed, vocab=16)


@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
    penalty=st.floats(0.5, 2),
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(2, 40),
)
def test_probabilities_are_those_of_transformers_for_any_settings(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int, vocab: int
) -> None:
    assert_same_as_transformers(SamplingConfig(temperature, top_k, top_p, min_p, penalty), seed, vocab)


def test_top_k_by_hand() -> None:
    logits = torch.tensor([[4.0, 2.0, 1.0, 0.0]]).log()  # the last is -inf
    assert probabilities(logits, SamplingConfig(1.0, top_k=2))[0].tolist() == pytest.approx([4 / 6, 2 / 6, 0, 0])


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (probabilities(logits, SamplingConfig(1.0, top_p=0.75)) > 0).tolist() == [[True, True, False, False]]
    assert (probabilities(logits, SamplingConfig(1.0, top_p=0.85)) > 0).tolist() == [[True, True, True, False]]
    assert probabilities(logits, SamplingConfig(1.0, top_p=1e-9))[0].tolist() == [1, 0, 0, 0]


def test_top_p_drops_the_token_that_is_not_needed_to_reach_the_mass() -> None:
    # Four tokens of exactly a quarter: two reach one half, as in transformers.
    logits, sampling = torch.zeros(1, 4), SamplingConfig(1.0, top_p=0.5)
    theirs = transformers_probabilities(logits, sampling, torch.zeros(1, 1, dtype=torch.long))
    assert torch.equal(probabilities(logits, sampling), theirs)
    assert theirs.count_nonzero() == 2


def test_min_p_is_a_share_of_the_best() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (probabilities(logits, SamplingConfig(1.0, min_p=0.25)) > 0).tolist() == [[True, True, True, False]]


def test_temperature_zero_puts_everything_on_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert probabilities(logits, SamplingConfig()).tolist() == [[0, 1, 0]]


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[True, True, False, False]])
    penalised = penalised_logits(logits, SamplingConfig(repetition_penalty=2.0), seen)
    assert penalised.tolist() == [[1, -4, 2, -2]]


def test_without_a_penalty_the_logits_pass_untouched() -> None:
    logits = torch.randn(2, 3)
    assert penalised_logits(logits, SamplingConfig(), None) is logits


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.7, 3, 0.9, 0.05, 1.2)])
def test_probabilities_of_bf16_logits_are_computed_in_fp32(sampling: SamplingConfig) -> None:
    logits = torch.randn(3, 8).bfloat16()
    seen = torch.rand(3, 8) < 0.5
    result = probabilities(logits, sampling, seen)
    assert result.dtype == torch.float32
    assert torch.equal(result, probabilities(logits.float(), sampling, seen))


def test_float64_stays_float64() -> None:
    logits = torch.randn(2, 4, dtype=torch.float64)
    seen = torch.ones(2, 4, dtype=torch.bool)
    assert probabilities(logits, SamplingConfig(0.7, 3, 0.9, 0.05, 1.2), seen).dtype == torch.float64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"min_p": 1.0}, r"min_p is 1\.0"),
        ({"min_p": -0.1}, r"min_p is -0\.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)  # type: ignore[arg-type]  # one field at a time


def test_a_node_has_seen_the_prefix_and_its_own_path() -> None:
    # Root 1 -> {2 -> {4}, 3}, behind a prefix that holds 0.
    tree = TokenTree(torch.tensor([1, 2, 3, 4]), TreeShape((-1, 0, 0, 1)))
    seen = seen_tokens(torch.tensor([True, False, False, False, False]), tree)
    assert seen.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1]]


def test_seeing_a_tree_leaves_the_prefix_as_it_was() -> None:
    prefix = torch.zeros(3, dtype=torch.bool)
    seen_tokens(prefix, TokenTree.chain([0, 1]))
    assert not prefix.any()


# --- drawing --------------------------------------------------------------------------------------------------------


class FixedUniform(GeneratorSource):
    """A source whose uniform is always the same."""

    def __init__(self, uniform: float) -> None:
        super().__init__(torch.Generator())
        self._fixed = uniform

    def _uniform(self) -> float:
        return self._fixed


JUST_BELOW_ONE = 1 - 2**-53


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.25, 0.5, 0.75, JUST_BELOW_ONE])
@pytest.mark.parametrize(
    "weights", [[0, 1, 0, 3, 0], [0, 0, 1e-30, 0], [0, 0.1, 0.2, 0], [1, 0], [0, 1e30, 0, 1e-30, 0]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_never_returns_an_index_of_weight_zero(weights: list[float], uniform: float, dtype: torch.dtype) -> None:
    drawn = FixedUniform(uniform).draw(torch.tensor(weights, dtype=dtype))
    assert weights[drawn] > 0


def test_the_extremes_of_the_uniform_give_the_first_and_the_last_index() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0])
    assert FixedUniform(0.0).draw(weights) == 1
    assert FixedUniform(JUST_BELOW_ONE).draw(weights) == 3
    # Weights 1, 2, 1: the second begins at a quarter, which is included.
    assert [FixedUniform(u).draw(weights) for u in (0.2499, 0.25, 0.7499, 0.75)] == [1, 2, 2, 3]


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 50), uniform=st.floats(0, JUST_BELOW_ONE))
def test_a_draw_of_random_weights_with_zeros_is_never_of_weight_zero(seed: int, size: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.4)
    weights[int(torch.randint(size, (), generator=generator))] = 1e-6
    assert weights[FixedUniform(uniform).draw(weights)] > 0


def test_accept_is_strict_and_bounded() -> None:
    assert not FixedUniform(0.0).accept(0.0)
    assert not FixedUniform(0.25).accept(0.25)
    assert FixedUniform(0.25).accept(0.2500001)
    assert FixedUniform(JUST_BELOW_ONE).accept(1.0)


def test_a_generator_draws_in_proportion() -> None:
    # 4,000 draws; chi-square with 2 degrees of freedom is above 27.6 with probability 1e-6.
    source = GeneratorSource(torch.Generator().manual_seed(0))
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[source.draw(torch.tensor([1.0, 0.0, 2.0, 5.0]))] += 1
    expected = torch.tensor([500.0, 1000.0, 2500.0])
    assert counts[1] == 0
    assert float(((counts[[0, 2, 3]] - expected) ** 2 / expected).sum()) < 27.6


def test_a_generator_accepts_in_proportion() -> None:
    # 4,000 trials at 0.3: five standard deviations are 5 * sqrt(4000 * 0.3 * 0.7) = 145; beyond with 6e-7.
    source = GeneratorSource(torch.Generator().manual_seed(0))
    assert abs(sum(source.accept(0.3) for _ in range(4000)) - 1200) < 145


def test_a_seed_gives_the_same_choices() -> None:
    def choices(seed: int) -> list[int]:
        source = GeneratorSource(torch.Generator().manual_seed(seed))
        return [source.draw(torch.ones(100)) for _ in range(10)]

    assert choices(3) == choices(3) != choices(4)


# --- without replacement --------------------------------------------------------------------------------------------


def drawn_in_order(weights: list[float], count: int) -> dict[tuple[int, ...], float]:
    def program(source: RandomSource) -> tuple[int, ...]:
        tensor = torch.tensor(weights, dtype=torch.float64)
        drawn = tuple(draw_without_replacement(tensor, count, source).tolist())
        assert tensor.tolist() == weights, "the weights given must stay as they are"
        return drawn

    return distribution(program)


def test_drawing_without_replacement_draws_each_from_what_is_left() -> None:
    weights = [0.5, 0.25, 0.25, 0.0]
    expected = {
        (first, second): weights[first] * weights[second] / (1 - weights[first])
        for first, second in itertools.permutations(range(3), 2)
    }
    assert drawn_in_order(weights, 2) == pytest.approx(expected, abs=1e-15)
    assert expected[0, 1] == 0.25 and expected[1, 0] == pytest.approx(1 / 6)


def test_drawing_more_than_the_mass_holds_gives_fewer() -> None:
    assert drawn_in_order([0.0, 0.75, 0.25], 3) == pytest.approx({(1, 2): 0.75, (2, 1): 0.25})
    assert drawn_in_order([0.0, 0.0], 2) == {(): 1.0}
