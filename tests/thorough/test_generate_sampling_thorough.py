"""The drafters that tests/test_generate_sampling.py leaves out, in the same test."""

import pytest
import test_generate_sampling as few
from test_generate_sampling import DRAFTERS, FEW_DRAFTERS


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in FEW_DRAFTERS])
def test_the_loop_writes_the_targets_distribution(name: str) -> None:
    few.test_the_loop_writes_the_targets_distribution(name)
