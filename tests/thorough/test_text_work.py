"""The Python of a step costs as much after a long text as after a short one: nothing copies or reads the text anew.

A copy of a text's tokens takes eight bytes each, which `tracemalloc` sees; tensors, the models' own work, it does not.
"""

import tracemalloc
from collections.abc import Iterator

import pytest
from tiny_models import counting_model, tiny_model

from decoding.drafters import Drafter, DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

SHORT, LONG = 512, 4096
COPY = 8 * (LONG - SHORT)
"""Bytes by which a copy of the long text is larger than one of the short text."""


class Letters:
    def decode(self, token_ids: list[int]) -> str:
        return "".join("abcdefghijklmnop"[token] for token in token_ids)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    """It counts, so that its text, and the lookups of it, are the same wherever a text begins."""
    model = counting_model()
    model.config.max_position_embeddings = 2 * LONG
    return CausalLM(model)


@pytest.fixture(scope="module")
def draft() -> CausalLM:
    return CausalLM(tiny_model("llama", seed=1, num_hidden_layers=1, max_position_embeddings=2 * LONG))


def least_peak(steps: Iterator[Step], count: int = 6) -> int:
    """Return the fewest bytes that a step holds at its peak beyond those before it.

    Lists that grow get new memory now and then: such a step is not the fewest.
    """
    peaks = []
    for _ in range(3):  # the drafter reads the prompt
        next(steps)
    tracemalloc.start()
    for _ in range(count):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        next(steps)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return min(peaks)


def prompt_of(length: int) -> list[int]:
    return [place % 16 for place in range(length)]


@pytest.mark.parametrize("name", ["plain", "lookup", "hybrid"])
def test_a_step_copies_as_little_of_a_long_text_as_of_a_short_one(target: CausalLM, draft: CausalLM, name: str) -> None:
    lookup = PromptLookupDrafter(2)
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "lookup": lookup,
        "hybrid": HybridDrafter(DraftModelDrafter(draft, 2), lookup, least_gain=0),
    }
    config = DecodingConfig(60, SamplingConfig(repetition_penalty=1 + 1e-9), stop_strings=("zz",))
    engine = Engine(target, drafters[name], tokenizer=Letters())
    peaks = []
    for length in (SHORT, LONG):
        cache = target.new_cache(LONG + 128)  # handed on, so that the loop also keeps its text
        peaks.append(least_peak(engine.steps(prompt_of(length), config, cache=cache)))
    assert peaks[1] - peaks[0] < COPY / 4, peaks
