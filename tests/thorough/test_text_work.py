"""A step takes Python as long after a long text as after a short one: nothing copies or reads the text again.

`tracemalloc` sees the eight bytes of each copied token, but no tensors.
"""

import tracemalloc

import pytest
from test_generate import Letters
from tiny_models import counting_model, tiny_model

from decoding.drafters import Drafter, DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

SHORT, LONG = 512, 4096


def least_peak(engine: Engine, length: int) -> int:
    """Return the fewest bytes that a step allocates after a prompt of this length; lists grow only now and then."""
    config = DecodingConfig(60, SamplingConfig(repetition_penalty=1 + 1e-9), stop_strings=("zz",))
    cache = engine.target.new_cache(LONG + 128)  # a cache that is passed on keeps its text
    steps, peaks = engine.steps([place % 16 for place in range(length)], config, cache=cache), list[int]()
    for _ in range(3):  # the drafter reads the prompt
        next(steps)
    tracemalloc.start()
    for _ in range(6):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        next(steps)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return min(peaks)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_a_step_copies_as_little_of_a_long_text_as_of_a_short_one(name: str) -> None:
    model = counting_model()  # the text and its lookups are the same wherever a text begins
    model.config.max_position_embeddings = 2 * LONG
    draft = CausalLM(tiny_model("llama", seed=1, num_hidden_layers=1, max_position_embeddings=2 * LONG))
    hybrid = HybridDrafter(DraftModelDrafter(draft, 2), PromptLookupDrafter(2), least_gain=0)
    drafter: Drafter | None = None if name == "plain" else hybrid
    engine = Engine(CausalLM(model), drafter, tokenizer=Letters())
    short, long = (least_peak(engine, length) for length in (SHORT, LONG))
    assert long - short < 8 * (LONG - SHORT) / 4, "not a quarter of a copy"
