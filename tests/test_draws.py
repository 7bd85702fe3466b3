"""From probabilities to tokens: every threshold is exact, and no token of weight 0 is drawn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.rules.drawing import GeneratorSource, _monotone, draw_rows_without_replacement, in_parts, inverse_cdf


class FixedUniform(GeneratorSource):
    """A source whose uniform number is always the same."""

    def __init__(self, uniform: float) -> None:
        super().__init__(torch.Generator())
        self._fixed = uniform

    def uniform(self) -> float:
        return self._fixed


JUST_BELOW_ONE = 1 - 2**-53
FIRST_OF_SEED_0 = 0.3035332959245841


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.25, 0.5, 0.75, JUST_BELOW_ONE])
@pytest.mark.parametrize(
    "weights",
    [[0, 1, 0, 3, 0], [0, 0, 1e-30, 0], [0, 0.1, 0.2, 0], [1, 0], [0, 1e30, 0, 1e-30, 0], [-0.0, 1, -0.0, 1, -0.0]],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_never_returns_an_index_of_weight_zero(weights: list[float], uniform: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(weights, dtype=dtype)
    drawn = FixedUniform(uniform).draw(tensor)
    assert weights[drawn] > 0
    assert tensor.tolist() == torch.tensor(weights, dtype=dtype).tolist(), "the weights given must stay as they are"
    assert inverse_cdf(tensor[None], torch.tensor([uniform], dtype=torch.float64)).tolist() == [drawn]
    assert in_parts(tensor[None], torch.tensor([uniform], dtype=torch.float64), 2).tolist() == [drawn], "as on a GPU"


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    size=st.integers(1, 50),
    uniforms=st.lists(st.floats(0, JUST_BELOW_ONE), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_drawing_many_rows_is_drawing_each_and_never_a_weight_of_zero(
    seed: int, rows: int, size: int, uniforms: list[float], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, size, generator=generator, dtype=dtype).pow(8)
    weights *= torch.rand(rows, size, generator=generator) < 0.4
    weights[:, int(torch.randint(size, (), generator=generator))] = 1e-6
    tokens = inverse_cdf(weights, torch.tensor(uniforms[:rows], dtype=torch.float64)).tolist()
    assert tokens == [FixedUniform(uniform).draw(row) for uniform, row in zip(uniforms, weights, strict=False)]
    assert all(weights[row, token] > 0 for row, token in enumerate(tokens))


def test_sums_that_fall_or_rise_where_there_is_no_weight_are_put_right() -> None:
    # A parallel sum may have such differences in the last bits at a weight of 0.
    up, down = 0.5 + 2**-53, 0.5 - 2**-54
    weights = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0])
    sums = torch.tensor([2.0**-60, 0.5, up, down, 1.0, 1 + 2**-52], dtype=torch.float64)
    assert _monotone(sums, weights).tolist() == [0, 0.5, 0.5, 0.5, 1, 1]


def test_a_row_without_weight_gives_no_token() -> None:
    weights = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [0.0, 1.0]])
    for draw in (inverse_cdf, in_parts):
        assert draw(weights, torch.zeros(3, dtype=torch.float64)).tolist() == [2, 2, 1]


@pytest.mark.parametrize("weight", [0.0, torch.nan])
def test_a_single_draw_without_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="no token has any weight: loosen the sampling controls"):
        FixedUniform(0.5).draw(torch.full((3,), weight))


def test_a_seed_has_independent_streams_that_are_the_same_in_every_run() -> None:
    def uniforms(seed: int, stream: int | str) -> list[float]:
        source = GeneratorSource.from_seed(seed, stream)
        return [source.uniform() for _ in range(3)]

    assert uniforms(0, "draft") == uniforms(0, "draft")
    keys = [(seed, stream) for seed in (-1, 0, 1, 2**32, 2**64) for stream in ("", "draft", "verify", 0, 1, -1)]
    assert len({uniforms(*key)[0] for key in keys}) == len(keys) == 30
    # The numbers are the same on every machine, so texts can be reproduced from their seed.
    assert uniforms(0, "draft")[0] == pytest.approx(FIRST_OF_SEED_0)


# --- without replacement --------------------------------------------------------------------------------------------


def test_rows_are_drawn_without_replacement_by_hand() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 3.0, 0.0, 1.0]])
    uniforms = torch.tensor([[0.6, 0.7, 0.0], [0.0, 0.99, 0.5]], dtype=torch.float64)
    # Row 0: 0.6 is token 1; of the 0.75 left, 0.525 is token 2; token 0 remains. Row 1: tokens 1 and 3, then none.
    assert draw_rows_without_replacement(weights, uniforms).tolist() == [[1, 2, 0], [1, 3, 4]]
    assert weights.tolist() == [[0.5, 0.25, 0.25, 0.0], [0.0, 3.0, 0.0, 1.0]], "the caller's weights stay"
