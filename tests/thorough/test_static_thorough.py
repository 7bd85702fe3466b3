"""Steps of fixed shapes decode what steps of any shape decode, and nothing is left over from one step to the next."""

import pytest
import test_static as few
import torch
from test_static import FEW, GREEDY, PROMPTS, SAMPLED, THESE, drafters
from tiny_models import tiny_model

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig


def test_compiled_steps_decode_the_texts_of_dynamic_ones() -> None:
    """Target and draft are compiled; the hidden state that Medusa reads comes out of the compiled function too."""
    prompts, config = PROMPTS[:2], DecodingConfig(10, SAMPLED)
    drafts = [CausalLM(tiny_model("llama", seed=1, num_hidden_layers=1), static=mode) for mode in (None, "compile")]
    dynamic, static = (CausalLM(tiny_model("llama", num_hidden_layers=1), static=mode) for mode in (None, "compile"))
    heads = drafters("llama", None)["medusa"]
    for theirs, ours in ((heads, heads), *[[DraftModelDrafter(draft, (1, 1, 1)) for draft in drafts]]):
        expected = [text.tokens for text in Engine(dynamic, theirs).decode(prompts, config, batch_size=1)]
        assert [text.tokens for text in Engine(static, ours).decode(prompts, config, batch_size=1)] == expected
    cache, other = static.new_cache(32), dynamic.new_cache(32)
    for model, own in ((static, cache), (dynamic, other)):
        model.prefill([[3, 1, 4]], own)
    for block in ([[5, 9, 2]], [[6, 5]]):  # both pad to buckets of their own
        ours, theirs = static.append(block, cache), dynamic.append(block, other)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
        assert torch.allclose(ours.hidden, theirs.hidden, atol=1e-5)


OTHERS = [(family, sampling) for family in THESE for sampling in (GREEDY, SAMPLED) if (family, sampling) not in FEW]


@pytest.mark.parametrize(("family", "sampling"), OTHERS)
def test_static_steps_decode_the_texts_of_dynamic_ones(family: str, sampling: SamplingConfig) -> None:
    few.test_static_steps_decode_the_texts_of_dynamic_ones(family, sampling)
