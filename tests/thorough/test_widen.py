"""Stand-ins compute the same as their source, and every added weight costs time."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dspark import block_logits, tiny_dspark
from tiny_models import full_forward, tiny_model
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from widen import widened, widened_dspark, widened_heads

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-mixed", "qwen3")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
"""Longer than every sliding window."""


def source(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Make a tiny model with random norms and biases and a large eps, so that no mistake can stay hidden."""
    model = tiny_model(family, **{"rms_norm_eps": 0.1, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model


def random_heads(layers: int = 1) -> MedusaHeads:
    heads = MedusaHeads(
        MedusaConfig(hidden_size=16, vocab_size=16, num_heads=2, num_layers=layers, tree=((0,), (0, 0)))
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("layers", [1, 2])
def test_widened_heads_predict_what_the_heads_predict(layers: int) -> None:
    heads = random_heads(layers).double()
    wide = widened_heads(heads, 4)
    hidden = torch.randn(5, 16, dtype=torch.float64)
    with torch.inference_mode():
        assert (wide(torch.nn.functional.pad(hidden, (0, 48))) - heads(hidden)).abs().max() < 1e-9
    assert wide.config.hidden_size == 64 and wide.config.tree == heads.config.tree
    for name, parameter in wide.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter[:16].all() and parameter[16:].any() == (".blocks." not in name and len(parameter) > 16), name


@pytest.mark.parametrize("extra_layers", [0, 3])
def test_a_widened_dspark_draft_drafts_what_the_draft_drafts(extra_layers: int) -> None:
    model = source(num_hidden_layers=3)
    target, wide_target = CausalLM(model), CausalLM(widened(model, 4, extra_layers))
    draft = tiny_dspark(target)
    wide = widened_dspark(draft, wide_target, 4)
    found, wanted = block_logits(wide, wide_target, TEXT), block_logits(draft, target, TEXT)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max() and wide.config.hidden_size == 64
    assert wide.layers[0].self_attn.q_proj.weight[:, 16:].all(), "the added columns cost as much"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "extra_layers"), [(4, 0), (1, 3), (4, 3), (16, 1)])
def test_a_stand_in_has_the_logits_of_its_source(family: str, width: int, extra_layers: int) -> None:
    model = source(family)
    wide = widened(model, width, extra_layers)
    exact = full_forward(model, TEXT)
    assert exact.std() > 0.1 and torch.allclose(full_forward(wide, TEXT), exact, rtol=1e-5, atol=1e-5)
