"""The options of `generate` that tests/test_model.py leaves out for batches, in the same test."""

import pytest
import test_model as few
from test_model import FEW_OPTIONS, OPTIONS, drafters, target  # noqa: F401  # two fixtures

from decoding.drafters import Drafter
from decoding.model.causal_lm import CausalLM


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in FEW_OPTIONS])
def test_a_greedy_batch_is_that_of_generate(
    target: CausalLM,  # noqa: F811
    drafters: dict[str, Drafter | None],  # noqa: F811
    name: str,
) -> None:
    few.test_a_greedy_batch_is_that_of_generate(target, drafters, OPTIONS[name])
