"""Properties of a model, read from its config and placement, that limit how it can run."""

import inspect
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.errors import UserError

STATIC_MODES = ("auto", "eager", "graphs")
STATIC_CHOICES = ("auto", "off", "eager", "graphs")
"""Ways to run steps, by the names that users write. In each of `STATIC_MODES`, steps have fixed shapes."""


def layer_types(text_config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the type of each layer if the architecture has one mask per layer type; otherwise return an empty tuple.

    Configs of other architectures (Mistral) may also list types, but every layer gets the same mask.
    """
    declared = hasattr(type(text_config), "layer_types")
    return tuple(getattr(text_config, "layer_types", None) or ()) if declared else ()


def windows(text_config: PreTrainedConfig) -> dict[str, int | None]:
    """Return the sliding window (None: full attention) of each layer type that takes a mask."""
    declared: int | None = getattr(text_config, "sliding_window", None)
    window = declared if getattr(text_config, "use_sliding_window", True) else None
    types = layer_types(text_config)
    if "sliding_attention" in types:
        return {"full_attention": None, "sliding_attention": window}
    return {"full_attention": None if types else window}


def shortest_window(text_config: PreTrainedConfig) -> int | None:
    """Return the shortest window of any layer; None if every layer attends to the whole context."""
    window = min((size for size in windows(text_config).values() if size is not None), default=None)
    positions: int | None = getattr(text_config, "max_position_embeddings", None)
    return None if window is None or (positions is not None and positions <= window) else window


def max_positions(text_config: PreTrainedConfig) -> int | None:
    """Return the greatest length of a text, in tokens; None if the config sets no limit.

    Longrope is limited to its original length: beyond that length the frequencies change, and all cached keys would be
    wrong.
    """
    longest: int | None = getattr(text_config, "max_position_embeddings", None)
    ropes = _rope_parameters(text_config)
    limits = [part["original_max_position_embeddings"] for part in ropes if part.get("rope_type") == "longrope"]
    return min([*limits, *([] if longest is None else [longest])], default=None)


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings: one set, or one per layer type."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def why_not_static(model: PreTrainedModel) -> str | None:
    """Return why the steps of a model cannot have fixed shapes, with a remedy; return None if they can.

    Some rotary embeddings choose their frequencies by the largest position in a step. The host must read this position
    from the device, which a CUDA graph cannot record (`dynamic_rope_update` in transformers, whose latest version
    avoids this for longrope). Also, a graph covers only one device.
    """
    if reason := why_no_trees(model):
        return f"{reason}, so its steps cannot have fixed shapes: leave static out"
    text_config = model.config.get_text_config(decoder=True)
    kinds = {str(part.get("rope_type", "default")) for part in _rope_parameters(text_config)}
    if changing := sorted(kind for kind in kinds if "dynamic" in kind or kind == "longrope"):
        return (
            f"the model's rotary embeddings are {' and '.join(changing)}: their frequencies depend on a step's longest "
            "position, so the model's steps cannot have fixed shapes; leave static out"
        )
    if is_spread(model):
        return (
            f"the model is spread over {len(devices_of(model))} devices, but steps of fixed shapes run on one device: "
            "leave static out, or use a GPU large enough for the whole model"
        )
    return None


def check_static(static: str, device: torch.device) -> None:
    """Raise UserError for a choice that is unknown or that the device does not support."""
    if static not in STATIC_CHOICES:
        raise UserError(f"static is {static!r}: use one of {', '.join(STATIC_CHOICES)}")
    if static == "graphs" and device.type != "cuda":
        raise UserError(f"static is graphs, which need a CUDA device, not {device.type}: use auto or eager")


def static_of(choice: str, model: PreTrainedModel) -> str | None:
    """Translate the user's ``choice`` into the value of `CausalLM`'s argument ``static``.

    ``auto`` means graphs if the device is a CUDA device and the model allows them, and dynamic shapes otherwise. Raises
    UserError for a choice that `check_static` rejects. `CausalLM` itself rejects a model that cannot run in this way.
    """
    check_static(choice, model.device)
    if choice == "auto":
        return choice if model.device.type == "cuda" and why_not_static(model) is None else None
    return None if choice == "off" else choice


def devices_of(model: PreTrainedModel) -> frozenset[str]:
    """Return the devices (GPUs, ``cpu``, ``disk``) on which accelerate placed a model; empty if it placed none."""
    placed: Any = getattr(model, "hf_device_map", None) or {}
    return frozenset(str(device) for device in placed.values())


def is_spread(model: PreTrainedModel) -> bool:
    """Return True if accelerate spread the model over several devices."""
    return len(devices_of(model)) > 1


@torch.inference_mode()
def key_devices(model: PreTrainedModel) -> tuple[torch.device, ...] | None:
    """Run one token, and return the device of each layer's keys; None if the model is on one device."""
    if not is_spread(model):
        return None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    held = model(input_ids=token, use_cache=True).past_key_values
    return tuple(layer.keys.device for layer in held.layers)


class Abilities(NamedTuple):
    """Abilities of a causal LM. A field is None if the model has the ability, and otherwise says why it does not."""

    training: str | None
    plain: str | None
    chains: str | None
    trees: str | None
    static: str | None

    def __str__(self) -> str:
        able = [name for name, reason in self._asdict().items() if reason is None]
        return ", ".join("static shapes" if name == "static" else name for name in able) or "nothing"


def abilities(model: PreTrainedModel) -> Abilities:
    """Return a model's abilities, as docs/reference/targets.md lists them for all families.

    The abilities are: ``training`` of heads and drafts, ``plain`` decoding, drafted ``chains`` and ``trees``, and steps
    with ``static`` shapes. Weights are not read, so they may be on the meta device.
    """
    unfit = why_unfit(model)
    chains = unfit or why_no_chains(model)
    trees = chains or why_no_trees(model)
    return Abilities(unfit, unfit, chains, trees, trees or why_not_static(model))


RESTARTING = ("falcon_mamba", "jamba", "mamba", "roformer", "trocr", "zamba")
"""Families whose `transformers` code starts the text again when several tokens follow a cache."""
CACHE_OF_THEIR_OWN = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
"""Families that keep their states outside a `DynamicCache`. Every pass must process the whole text again."""


def why_no_chains(model: PreTrainedModel) -> str | None:
    """Return why a model cannot verify several tokens in one pass; return None if it can."""
    kind = model.config.model_type
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if kind in RESTARTING:
        return f"{kind} in transformers cannot run several tokens after a cached text"
    if kind in CACHE_OF_THEIR_OWN:
        return f"{kind} keeps its state outside transformers' DynamicCache and runs the whole text in every pass"
    if "indexed_attention" in types or kind == "doge":
        return f"{kind} attends to the best-scoring keys, and longer passes break ties differently"
    return None


def why_unfit(model: PreTrainedModel) -> str | None:
    """Return why a model is not a causal LM, with a remedy; return None if it is one."""
    config, kind = model.config, model.config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder model: use a decoder-only causal LM"
    # Old config files set is_decoder for any model. The GPT-NeoX family declares is_decoder but does not read it.
    text_config = config.get_text_config(decoder=True)
    declared = hasattr(type(text_config), "is_decoder") and not kind.startswith("gpt_neox")
    if declared and not text_config.is_decoder:
        return f"{kind} reads texts in both directions: use a causal LM, or set is_decoder in its config"
    if model.get_output_embeddings() is None:
        return f"{type(model).__name__} lacks an lm_head: load the model with AutoModelForCausalLM"
    return None


def why_no_trees(model: PreTrainedModel) -> str | None:
    """Return why a model cannot run the branches of a tree in one pass; return None if it can.

    Without trees, texts run one by one on `transformers`' own cache and masks (`decoding.model.sequential`).
    """
    kind, text_config = model.config.model_type, model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        return f"{kind} keeps a recurrent state, which can follow only one path"
    types = {*(getattr(text_config, "layer_types", None) or ()), *getattr(text_config, "attention_layers", ())}
    layers = getattr(text_config, "per_layer_config", None) or ()
    if len({getattr(layer, "head_dim", None) for layer in layers}) > 1 or kind == "mimo_v2_flash":
        return f"{kind} has keys of several widths, which do not fit into one buffer"
    if other := sorted(types - {"full_attention", "sliding_attention", "global"}):
        return f"{kind} has {' and '.join(other)} layers that do not take a tree's mask"
    accepted = inspect.signature(type(model).forward).parameters
    alibi = kind in ("bloom", "mpt") or getattr(text_config, "alibi", False)
    if alibi or "position_ids" not in accepted:
        order = f"{kind} places tokens by their order{' (ALiBi)' * alibi}"
        return f"{order}, so a tree's branches cannot share a position"
    if "past_key_values" not in accepted:
        return f"{kind} does not keep a key-value cache"
    attention = text_config._attn_implementation
    if attention not in (None, "eager", "sdpa"):
        return f"the model's attention is {attention!r}, which does not take a tree's mask (sdpa and eager do)"
    return None
