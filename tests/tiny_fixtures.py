"""Fixtures for all tests: shape checks in the pure modules, a fixed seed, one thread, and tiny random models."""

import sys

import pytest
import torch
from shape_checks import enforce_shapes
from tiny_models import counting_model, tiny_model

enforce_shapes()  # before anything imports the pure modules

from decoding.model.causal_lm import CausalLM  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, whichever test ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def own_accelerator() -> None:
    """Make accelerate forget the precision of trainings by other files in this process."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def tiny_llama() -> CausalLM:
    """Make a random Llama of two layers and 16 tokens."""
    return CausalLM(tiny_model("llama"))


@pytest.fixture(scope="session")
def tiny_draft() -> CausalLM:
    """Make another random Llama with the same vocabulary, independent of the first."""
    return CausalLM(tiny_model("llama", seed=1))


@pytest.fixture(scope="session")
def counting() -> CausalLM:
    """Make a Llama that counts: after token x, whatever came before, it writes x + 1 (mod 16)."""
    return CausalLM(counting_model())
