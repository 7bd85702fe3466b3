import pytest
import torch

from decoding.model.stored import check_finite, non_finite

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_with_a_nan_in_any_dtype_are_named(dtype: torch.dtype) -> None:
    broken = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    assert non_finite({"whole": torch.ones(3).to(dtype), "broken": broken}) == ["broken"]


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_infinities_of_either_sign_count(value: float) -> None:
    assert non_finite({"a": torch.tensor([0.0, value])}) == ["a"]


def test_integers_empty_tensors_and_the_largest_numbers_are_finite() -> None:
    largest = {
        str(dtype): torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype) for dtype in DTYPES
    }
    assert (
        non_finite({"int": torch.tensor([2**62]), "bool": torch.tensor([True]), "none": torch.empty(0), **largest})
        == []
    )


def test_weights_beyond_the_range_of_fp16_are_found_after_the_cast_and_not_before() -> None:
    weights = torch.tensor([65504.0, 65536.0])
    assert non_finite({"w": weights}) == [] and non_finite({"w": weights.half()}) == ["w"]


def test_the_first_broken_tensor_is_named_with_its_values_counted() -> None:
    broken = torch.zeros(2, 3)
    broken[0, 1], broken[1, 2] = float("nan"), float("inf")
    tensors = {"a": torch.ones(2), "b": broken, "c": broken}
    with pytest.raises(ValueError) as error:
        check_finite(tensors, "the draft in runs/x", "train it again")
    assert str(error.value) == (
        "the draft in runs/x holds weights that are no numbers: 2 of the 6 values of b are NaN or infinite, and 1 more "
        "of its tensors hold some; train it again"
    )


def test_finite_weights_pass_and_keep_their_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    check_finite({"weight": weight}, "x", "y")
    assert weight.requires_grad and weight.grad is None
