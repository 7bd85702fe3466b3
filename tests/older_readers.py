"""Drafts whose rotary embeddings are not the default ones, and how transformers 4.57 finds theirs in a config."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

VOCABULARY = 128
PROBE = [7 * place % VOCABULARY for place in range(40)]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_SHORT_AND_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.0, 3.0, 4.0]}


def rope(rope_type: str, rope_theta: float = 123.0, **changes: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": rope_theta, **changes}


DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, theta": ("llama", {"rope_parameters": rope("default")}),
    "llama, llama3": ("llama", {"rope_parameters": rope("llama3", 5e5, factor=8.0, **_LLAMA3)}),
    "llama, linear": ("llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "llama, longrope": (
        "llama",
        {"rope_parameters": rope("longrope", factor=4.0, original_max_position_embeddings=24, **_SHORT_AND_LONG)},
    ),
    "mistral, yarn": (
        "mistral",
        {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=24)},
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=24)}),
    "qwen3-moe, theta": ("qwen3-moe", {"rope_parameters": rope("default")}),
    "gemma3": ("gemma3", {}),
    "gemma3, both": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": rope("linear", 321.0, factor=8.0),
                "sliding_attention": rope("default", 77.0),
            }
        },
    ),
    "phi3, half": ("phi3", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}),
    "phi3, longrope": (
        "phi3",
        {"original_max_position_embeddings": 8, "rope_parameters": rope("longrope", **_SHORT_AND_LONG)},
    ),
    "gpt2": ("gpt2", {}),
    "gpt-neox, half": ("gpt-neox", {"rope_parameters": rope("linear", factor=4.0, partial_rotary_factor=0.5)}),
    "olmo2, linear": ("olmo2", {"rope_parameters": rope("linear", factor=4.0)}),
    "falcon, linear": ("falcon", {"rope_parameters": rope("linear", factor=4.0)}),
}
"""Name -> family of `tiny_models`, changes to its config."""


def frequencies_of_version_4(config: dict[str, Any], head_dim: int) -> Float[Tensor, " frequencies"]:
    """The inverse frequencies that transformers 4.57 forms of a Llama's config.json, by its modeling_rope_utils.

    It knows no ``rope_parameters``: ``rope_theta`` is 10000 where it is missing, and so is ``rope_scaling`` None.
    """
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if scaling is None:
        return plain
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return plain / scaling["factor"]
    assert kind == "llama3", "the only other one needed here"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    scaled = torch.where(waves > old / low, plain / scaling["factor"], plain)
    smooth = (old / waves - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling["factor"] + smooth * scaled
    medium = ~(waves < old / high) * ~(waves > old / low)
    return torch.where(medium, smoothed, scaled)
