"""A model in llama.cpp's terms: the GGUF keys for the model's sizes, and the model's tensors in llama.cpp's layout."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.errors import UserError
from decoding.model.architecture import shortest_window
from decoding.model.dspark_config import DSparkConfig
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_config import Eagle3Config
from decoding.model.eagle3_draft import Eagle3Draft

_Config = PreTrainedConfig | DSparkConfig | Eagle3Config
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""Maps model types to architectures of llama.cpp. For each tensor of these models, llama.cpp has exactly one name."""
_OF_DRAFTS = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "markov.embedding": "markov_w1",
    "markov.output": "markov_w2",
    "confidence": "conf_proj",
    "lm_head": "output",
    "input_norm": "enc.output_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
}
"""Maps our names of tensors in DSpark and EAGLE-3 drafts to llama.cpp's names; other tensors are named as in Qwen3."""
_YARN_UNWRITTEN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Settings of yarn that have the same default in llama.cpp and transformers. The defaults are not written, and other
values are rejected."""
_OTHER_PROGRAM = "serve it with a program that reads transformers folders, such as vLLM"


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return GGUF's keys for a model's sizes and rotary embeddings.

    Raises UserError if llama.cpp would misread the model.
    """
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"the model's type is {config.model_type}, but only {', '.join(ARCHITECTURES)} can be written as GGUF: "
            "convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    if config.hidden_act != "silu":
        raise UserError(f"hidden_act is {config.hidden_act}, but llama.cpp computes silu: {_OTHER_PROGRAM}")
    if (window := shortest_window(config)) is not None:
        raise UserError(
            f"the model attends to a window of {window} tokens, but llama.cpp would attend to all tokens: in "
            f"config.json set sliding_window to null and max_position_embeddings to at most {window}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError("the model is quantised: use the folder of the unquantised model, with --type q8_0")
    return _keys(
        MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]], config, _rope(config.rope_parameters, config.model_type)
    )


def _keys(architecture: str, config: _Config, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that every model has, plus ``others``."""
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
        **others,
    }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": held for key, held in sizes.items()}}


def draft_metadata(config: DSparkConfig | Eagle3Config) -> dict[str, Any]:
    """Return GGUF's keys for a draft that reads its target's states. llama.cpp numbers the inputs of layers, not their
    outputs.

    Raises UserError for settings that llama.cpp lacks or ignores; for example, llama.cpp has one causal flag for all
    layers.
    """
    if isinstance(config, Eagle3Config):
        return _eagle3_metadata(config)
    if (head := config.markov_head_type) != "vanilla":
        raise UserError(f"the draft has a {head} Markov head, which llama.cpp cannot compute: use --format dspark")
    causal = {sight.causal for sight in config.sights}
    if len(causal) > 1:
        raise UserError(
            "blocks are causal in some of the draft's layers and not in others, but llama.cpp treats all layers alike: "
            f"{_OTHER_PROGRAM}"
        )
    rope = {"original_max_position_embeddings": config.max_position_embeddings, **config.rope_scaling}
    own = {
        **_rope({"rope_theta": config.rope_theta, **rope}, "DSpark drafts"),
        "block_size": config.slots,
        "target_layers": [tap + 1 for tap in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "has_confidence_head": config.enable_confidence_head,
        "attention.causal": causal.pop(),
    }
    if config.sliding_window is not None:
        own["attention.sliding_window"] = config.sliding_window
        own["attention.sliding_window_pattern"] = [sight.window is not None for sight in config.sights]
    return {**_keys("dflash", config, own), "tokenizer.ggml.mask_token_id": config.mask_token_id}


def _eagle3_metadata(config: Eagle3Config) -> dict[str, Any]:
    lacking = {
        "norms of single taps (fc_norm)": config.fc_norm,
        "a norm of its recycled states (norm_output)": config.norm_output,
        "norms of queries and keys": config.qk_norm,
        f"a window of {config.sliding_window} tokens": config.sliding_window is not None,
        f"{config.taps} taps instead of 3": config.taps != 3,
    }
    for what in (what for what, is_set in lacking.items() if is_set):
        raise UserError(f"the draft has {what}, which llama.cpp cannot compute: {_OTHER_PROGRAM}")
    rope = {"original_max_position_embeddings": config.max_position_embeddings, **config.rope_parameters}
    own = {
        **_rope(rope, "llama"),
        "target_layers": [tap + 1 for tap in config.target_layer_ids],
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    return _keys("eagle3", config, own)


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor, in the stored dtype and in llama.cpp's layout.

    A tied lm_head is omitted, and llama.cpp then uses the embeddings.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        if theirs is None or suffix not in ("weight", "bias"):
            raise UserError(f"a GGUF file of {config.model_type} cannot store the tensor {name}: {_OTHER_PROGRAM}")
        values = tensor.detach().cpu()
        if architecture == MODEL_ARCH.LLAMA and ".q_proj." in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == MODEL_ARCH.LLAMA and ".k_proj." in name:
            values = _interleaved(values, config.num_key_value_heads)
        yield f"{theirs}.{suffix}", values
    if config.rope_parameters.get("rope_type") == "llama3":  # llama.cpp divides the frequencies by these numbers
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        yield "rope_freqs.weight", _divisors(config.rope_parameters["rope_theta"], scaled)


def draft_tensors(draft: DSparkDraft | Eagle3Draft) -> dict[str, Tensor]:
    """Return the tensors of a draft that reads its target's states, by llama.cpp's names and in its layout.

    Here ``d2t`` contains token ids; in folders it contains the difference between each token id and the number of its
    output.
    """
    names, weights = draft_names(draft), dict(draft.named_parameters())
    tensors = {names[name]: weight.detach()[row_order(draft, name)] for name, weight in weights.items()}
    if (tokens := draft.output_tokens) is not None and len(tokens) < draft.config.vocab_size:
        tensors["d2t"] = tokens
    if isinstance(draft, Eagle3Draft) and (rope := draft.config.rope_parameters)["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _divisors(rope["rope_theta"], draft.config.frequencies()[0])
    return tensors


def draft_names(draft: DSparkDraft | Eagle3Draft) -> dict[str, str]:
    """Map the names of a draft's weights to llama.cpp's names."""
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, draft.config.num_hidden_layers)
    theirs = {}
    for name, _ in draft.named_parameters():
        stem, _, suffix = name.rpartition(".")
        other = names.get_name(f"model.{stem.replace('midlayer', 'layers.0')}")
        theirs[name] = f"{_OF_DRAFTS.get(stem) or other}.{suffix}"
    return theirs


def row_order(draft: DSparkDraft | Eagle3Draft, name: str) -> Int[Tensor, " rows"] | slice:
    """Return the order of a weight's rows in llama.cpp: q and k of an EAGLE-3 draft are reordered as in a Llama."""
    config, projections = draft.config, ("self_attn.q_proj", "self_attn.k_proj")
    if isinstance(config, DSparkConfig) or not any(projection in name for projection in projections):
        return slice(None)
    heads = config.num_attention_heads if projections[0] in name else config.num_key_value_heads
    return _interleaved(torch.arange(heads * config.head_dim), heads)


def _divisors(base: float, scaled: Tensor) -> Tensor:
    """Return, for each pair of dimensions, the unscaled rotary frequency divided by the scaled one. llama.cpp divides
    its frequencies by these numbers.
    """
    unscaled: Tensor = 1.0 / base ** (torch.arange(len(scaled)).float() / len(scaled))
    return unscaled / scaled


def _head_size(config: _Config) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rope(rope: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the keys of the rotary embeddings of a model type."""
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"the model rotates only {rope['partial_rotary_factor']} of each head: {_OTHER_PROGRAM}")
    base = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default" or (kind == "llama3" and ARCHITECTURES.get(family) == MODEL_ARCH.LLAMA):
        return base
    scaled = {**base, "rope.scaling.type": kind, "rope.scaling.factor": float(rope.get("factor", 1.0))}
    if kind == "linear":
        return scaled
    if kind == "yarn" and not any(rope.get(key) is not None for key in _YARN_UNWRITTEN):
        return {**scaled, "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    raise UserError(
        f"the model scales its rotary embeddings by {kind} ({rope}), which this export cannot write for "
        f"{family}: {_OTHER_PROGRAM}"
    )


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of q or k: transformers rotates row i together with row i + half a head, and llama.cpp's code
    for Llama rotates row i together with row i + 1.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
