"""Tiny random models of families beyond plain attention: hybrids, recurrences, chunks, experts, latent attention."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

VOCAB = 16


def _settings(*shared: dict[str, Any], **own: Any) -> dict[str, Any]:
    return {key: value for part in (*shared, own) for key, value in part.items()}


_BASE = _settings(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_DELTA = _settings(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
_EXPERTS = _settings(
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
)
_MAMBA = _settings(
    mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
)
_LATENT = _settings(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    head_dim=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_SLIDING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_KDA = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8}
_JAMBA: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "mamba_dt_rank": 4}
_INDEXED: dict[str, Any] = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
_COMPRESSED = _settings(
    _INDEXED,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
)
_GEMMA4: dict[str, Any] = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_NEMOTRON = _settings(
    mamba_num_heads=8,
    mamba_head_dim=8,
    ssm_state_size=8,
    n_groups=1,
    chunk_size=8,
    layers_block_type=["mamba", "attention"],
)
_ZAMBA2 = _settings(
    mamba_d_state=8,
    mamba_ngroups=1,
    n_mamba_heads=8,
    chunk_size=8,
    num_hidden_layers=3,
    layers_block_type=["mamba", "hybrid", "mamba"],
    num_mem_blocks=1,
    adapter_rank=4,
    attention_hidden_size=64,
    attention_head_dim=16,
)
_ZAMBA = _settings(
    mamba_d_state=8,
    n_mamba_heads=2,
    mamba_dt_rank=4,
    num_hidden_layers=3,
    attn_layer_period=2,
    attn_layer_offset=1,
    attention_hidden_size=64,
    attention_head_dim=16,
)
_CHUNKED: dict[str, Any] = {"layer_types": ["chunked_attention", "full_attention"]}
_GRIFFIN: dict[str, Any] = {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8}
_GEMMA3N = _settings(
    sliding_window=5,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    laurel_rank=4,
    activation_sparsity_pattern=None,
)

CHAINS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "kimi_linear": {**_LATENT, **_EXPERTS, "linear_attn_config": _KDA, "num_experts_per_token": 2},
    "nemotron_h": _NEMOTRON,
    "granitemoehybrid": {**_MAMBA, **_EXPERTS, "layer_types": ["mamba", "attention"]},
    "falcon_h1": _MAMBA,
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "olmo_hybrid": _DELTA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "zamba2": _ZAMBA2,
    "zaya": {**_EXPERTS, "num_experts_per_tok": 1},
    "bailing_hybrid": {**_LATENT, **_EXPERTS, "layer_group_size": 2},
    "deepseek_v4": {**_LATENT, **_COMPRESSED, "sliding_window": 4},
    "gemma4_text": {**_SLIDING, **_GEMMA4, "vocab_size_per_layer_input": VOCAB},
    "llama4_text": _settings(
        _CHUNKED, attention_chunk_size=6, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1
    ),
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
}
"""Families that decode chains but no trees."""

TREES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 8},
    "gemma3n_text": _GEMMA3N,
    "cohere2": _SLIDING,
    "minimax_m2": _EXPERTS,
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
}
"""Families that decode trees."""

PLAIN: dict[str, dict[str, Any]] = {
    "jamba": {**_JAMBA, "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "zamba": _ZAMBA,
    "minimax": {**_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "doge": {"keep_window_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": _GRIFFIN,
    "deepseek_v32": {**_LATENT, **_INDEXED},
}
"""Families that can be trained on and decoded plainly, but cannot verify drafts."""

_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "image_size": 16, "patch_size": 8, "depth": 1}
_VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2, "out_hidden_size": 32, "head_dim": 8}
_VISION |= {"deepstack_visual_indexes": [0]}

SIDES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_vl": ("", {"rope_parameters": _MROPE}, ""),
    "qwen3_vl_moe": ("", {"rope_parameters": _MROPE, **_EXPERTS}, ""),
    "qwen2_5_vl": ("", {"rope_parameters": _MROPE}, ""),
    "glm4v": ("", {"rope_parameters": _MROPE}, ""),
    "mistral3": ("mistral", {}, "pixtral"),
    "llava": ("llama", {}, "clip_vision_model"),
    "internvl": ("qwen2", {}, ""),
    "gemma3": ("", TREES["gemma3_text"], ""),
    "gemma4": ("", {**CHAINS["gemma4_text"], "pad_token_id": 0}, ""),
    "qwen3_5": ("", _DELTA, ""),
    "qwen3_5_moe": ("", {**_DELTA, **_EXPERTS}, ""),
    "llama4": ("", CHAINS["llama4_text"], ""),
    "lfm2_vl": ("lfm2", _CONV, ""),
}
"""Models of images and text: the kind and settings of the text part, and the kind of the image part."""


def write_sides(family: str, folder: Path) -> PreTrainedModel:
    """Write a complete random model of images and text."""
    torch.manual_seed(0)
    text, settings, vision = SIDES[family]
    settings = {**_BASE, **settings, **({"model_type": text} if text else {})}
    images = {**_VISION, **({"model_type": vision} if vision else {})}
    given = {"text_config": settings, "vision_config": images, "tie_word_embeddings": False}
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **given))
    model.save_pretrained(folder)
    return model.eval()


@cache
def family_model(family: str, vocab: int = VOCAB) -> PreTrainedModel:
    """Return a model of the family with random fp32 weights, which are always the same."""
    torch.manual_seed(0)
    settings = {**_BASE, **(CHAINS | TREES | PLAIN)[family], "vocab_size": vocab}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    return model.eval()
