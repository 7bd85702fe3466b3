"""Fixtures of every test: shapes enforced in the pure modules, a fixed seed, one thread, and tiny random models."""

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook
from tiny_models import counting_model, tiny_model

# Before anything imports them: from here on every jaxtyping annotation in these modules is checked at each call.
_PURE = [f"decoding.rules.{name}" for name in ("tree", "proposal", "sampling", "history", "verify")]
with install_import_hook(_PURE, "shape_checks.check"):
    import decoding.rules.history
    import decoding.rules.proposal
    import decoding.rules.sampling
    import decoding.rules.tree
    import decoding.rules.verify  # noqa: F401  # imported for the hook

from decoding.model.causal_lm import CausalLM  # noqa: E402

settings.register_profile("exact", max_examples=30, deadline=None, derandomize=True, database=None)
settings.load_profile("exact")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, whichever test ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama() -> CausalLM:
    """A random Llama of two layers and 16 tokens."""
    return CausalLM(tiny_model("llama"))


@pytest.fixture(scope="session")
def tiny_draft() -> CausalLM:
    """Another random Llama with the same vocabulary, which knows nothing of the first."""
    return CausalLM(tiny_model("llama", seed=1))


@pytest.fixture(scope="session")
def counting() -> CausalLM:
    """A Llama that counts: after token x, whatever came before, it writes x + 1 (mod 16)."""
    return CausalLM(counting_model())
