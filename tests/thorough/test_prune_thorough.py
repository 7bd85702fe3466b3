"""Narrower models: what is silent goes without a trace, what is most active stays, and the result is a plain model."""

import pytest
import torch
from test_prune import TEXT, narrowed, source
from tiny_models import full_forward

from decoding.measure.widen import widened


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen2-mixed", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_a_widened_model_is_pruned_back_to_itself(family: str, tied: bool, width: int) -> None:
    model = source(family, tie_word_embeddings=tied)
    back = narrowed(widened(model, width), 16)
    assert torch.equal(full_forward(back, TEXT), full_forward(model, TEXT))
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(back.config, name) == getattr(model.config, name)
