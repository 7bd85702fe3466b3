"""A model as GGUF's metadata and tensors, by llama.cpp's names: sizes, rotary embeddings, weights.

llama.cpp reads a file of an architecture that it knows and ignores what it has no key for. So only settings that have a
key are written, and any other that changes the logits is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.model.architecture import shortest_window

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""Model type -> llama.cpp's architecture, for models whose every tensor it holds under one name of its own."""
_YARN_UNWRITTEN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Settings of yarn for which llama.cpp's defaults, transformers' own, are kept."""
_ROPE_FREQUENCIES = "rope_freqs.weight"
_REMEDY = "serve it with a program that reads transformers folders, such as vLLM"


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return GGUF's keys for the model's sizes and rotary embeddings; ValueError for what llama.cpp would misread."""
    config = model.config
    architecture = _architecture(config)
    _check_settings(config)
    prefix = MODEL_ARCH_NAMES[architecture]
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": _head_size(config),
        "attention.value_length": _head_size(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": _head_size(config),
        **_rope(config, architecture),
    }
    return {"general.architecture": prefix, **{f"{prefix}.{key}": value for key, value in sizes.items()}}


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor of the file, in the stored dtype, as llama.cpp lays it out.

    A tied lm_head is left out: llama.cpp then takes the embeddings.
    """
    config = model.config
    architecture = _architecture(config)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        if theirs is None or suffix not in ("weight", "bias"):
            raise ValueError(
                f"llama.cpp's {MODEL_ARCH_NAMES[architecture]} has no place for the tensor {name}: {_REMEDY}"
            )
        values = tensor.detach().cpu()
        if architecture == MODEL_ARCH.LLAMA and ".q_proj." in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == MODEL_ARCH.LLAMA and ".k_proj." in name:
            values = _interleaved(values, config.num_key_value_heads)
        yield f"{theirs}.{suffix}", values
    if _rope_type(config) == "llama3":
        yield _ROPE_FREQUENCIES, _slowing(config)


def _architecture(config: PreTrainedConfig) -> MODEL_ARCH:
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"a model of type {config.model_type} cannot be written as GGUF here, only {', '.join(ARCHITECTURES)}: "
            "convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    return ARCHITECTURES[config.model_type]


def _check_settings(config: PreTrainedConfig) -> None:
    """Refuse settings that llama.cpp has no key for in these architectures."""
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act}, and llama.cpp computes silu: {_REMEDY}")
    if (window := shortest_window(config)) is not None:
        raise ValueError(
            f"the model attends to a window of {window} tokens, which llama.cpp would not: set sliding_window to null, "
            f"and max_position_embeddings to at most {window}, in its config.json"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantised: give its folder before that, and choose --type q8_0")


def _head_size(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rope_type(config: PreTrainedConfig) -> str:
    return str((config.rope_parameters or {}).get("rope_type", "default"))


def _rope(config: PreTrainedConfig, architecture: MODEL_ARCH) -> dict[str, Any]:
    """Return the keys of the rotary embeddings."""
    rope, kind = config.rope_parameters, _rope_type(config)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"the model turns {rope['partial_rotary_factor']} of each head only: {_REMEDY}")
    base = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default" or (kind == "llama3" and architecture == MODEL_ARCH.LLAMA):
        return base
    if kind == "linear":
        return {**base, "rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn" and not any(rope.get(key) is not None for key in _YARN_UNWRITTEN):
        original = rope["original_max_position_embeddings"]
        scaling = {"factor": float(rope["factor"]), "original_context_length": original}
        return {**base, "rope.scaling.type": kind, **{f"rope.scaling.{key}": value for key, value in scaling.items()}}
    raise ValueError(
        f"the model's rotary embeddings are scaled by {kind} ({rope}), which a GGUF file of a {config.model_type} "
        f"written here cannot say: {_REMEDY}"
    )


def _slowing(config: PreTrainedConfig) -> Tensor:
    """Return the numbers by which llama.cpp divides the rotary frequencies, (head size / 2,)."""
    size = _head_size(config)
    unscaled: Tensor = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    scaled, _ = ROPE_INIT_FUNCTIONS[_rope_type(config)](config, torch.device("cpu"))
    return unscaled / scaled


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of q or k: transformers turns row i with i + half a head, llama.cpp's llama with i + 1."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
