"""What a model's config and its placement say of how it may be run."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def layer_types(text_config: PreTrainedConfig) -> tuple[str, ...]:
    """The type of each layer, where the architecture has several: then it takes a mask for each type.

    Others (Mistral) carry what their config file says of types along, but give every layer the same mask.
    """
    declared = hasattr(type(text_config), "layer_types")
    return tuple(getattr(text_config, "layer_types", None) or ()) if declared else ()


def max_positions(text_config: PreTrainedConfig) -> int | None:
    """How long a text may become.

    Where longrope has other frequencies for long texts than for short ones, no longer than the short ones reach: all
    keys in the cache, of every row, would be void as soon as one row grows beyond.
    """
    longest: int | None = getattr(text_config, "max_position_embeddings", None)
    found = _rope_parameters(text_config)
    limits = [part["original_max_position_embeddings"] for part in found if part.get("rope_type") == "longrope"]
    return min([*limits, *([] if longest is None else [longest])], default=None)


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary embeddings' parameters: one set, or one for each type of layer."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def refuse_changing_rope(text_config: PreTrainedConfig) -> None:
    """Refuse to fix the shapes of a model that asks its positions how far they reach before it turns its keys.

    That is a question to the device, which no CUDA graph can record (transformers' `dynamic_rope_update`; longrope is
    free of it in its latest versions alone).
    """
    kinds = {str(part.get("rope_type", "default")) for part in _rope_parameters(text_config)}
    if changing := sorted(kind for kind in kinds if "dynamic" in kind or kind == "longrope"):
        raise ValueError(
            f"the model's rotary embeddings are {' and '.join(changing)}, which choose their frequencies by a step's "
            "longest position, so that its steps cannot have fixed shapes: leave static out"
        )


def places_of(model: PreTrainedModel) -> frozenset[str]:
    """Where accelerate put the parts of a model; nothing for a model that it did not place (``device_map``)."""
    placed: Any = getattr(model, "hf_device_map", None) or {}
    return frozenset(str(place) for place in placed.values())


def is_spread(model: PreTrainedModel) -> bool:
    """True where accelerate spread the model over several devices."""
    return len(places_of(model)) > 1


@torch.inference_mode()
def key_devices(model: PreTrainedModel) -> tuple[torch.device, ...] | None:
    """Where each layer's keys arrive in a model that is spread over several devices, found by a token; else None."""
    if not is_spread(model):
        return None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    held = model(input_ids=token, use_cache=True).past_key_values
    return tuple(layer.keys.device for layer in held.layers)


def refuse_several_devices(model: PreTrainedModel) -> None:
    """Refuse to fix the shapes of a model that is spread: a CUDA graph holds one device's work."""
    if is_spread(model):
        raise ValueError(
            f"the model is spread over {len(places_of(model))} devices, and steps of fixed shapes run on one: leave "
            "static out, or load the model without device_map"
        )
