"""Drafts with rotary embeddings that differ from the default."""

from typing import Any

VOCABULARY = 128
PROBE = [7 * place % VOCABULARY for place in range(40)]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_SHORT_AND_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.0, 3.0, 4.0]}


def rope(rope_type: str, rope_theta: float = 123.0, **changes: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": rope_theta, **changes}


DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3": ("llama", {"rope_parameters": rope("llama3", 5e5, factor=8.0, **_LLAMA3)}),
    "llama, linear": ("llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "llama, longrope": (
        "llama",
        {"rope_parameters": rope("longrope", factor=4.0, original_max_position_embeddings=24, **_SHORT_AND_LONG)},
    ),
    "mistral, yarn": ("mistral", {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=24)}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=24)}),
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
}
"""Maps names to a family of `tiny_models` and changes to its config."""
