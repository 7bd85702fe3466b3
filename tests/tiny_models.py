"""Random models whose forward pass takes under a millisecond,
and as a reference plain greedy decoding without a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

WINDOW = 5
"""Width of every sliding window, smaller than the decoded texts."""

_SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 96,
}
_COMMON: dict[str, Any] = {
    # Large weights make logits that are far from uniform and far apart, so rounding cannot decide near-ties.
    "initializer_range": 0.5,
    # Tied embeddings would make a random model repeat its last token forever.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _of(config: type[PreTrainedConfig], **own: Any) -> Callable[..., PreTrainedConfig]:
    return lambda **changes: config(**{**_SIZE, **own, **changes})


_MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_SCALES: dict[str, float] = {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.35}

FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _of(LlamaConfig, num_key_value_heads=1),
    "mistral": _of(MistralConfig, num_key_value_heads=1, sliding_window=WINDOW),
    "qwen2": _of(Qwen2Config, num_key_value_heads=2),
    "qwen2-mixed": _of(
        Qwen2Config,
        **{**_MIXED, "layer_types": _MIXED["layer_types"][::-1]},
        num_key_value_heads=2,
        use_sliding_window=True,
    ),
    "qwen3": _of(Qwen3Config, num_key_value_heads=1, head_dim=8),
    "gpt2": lambda **changes: GPT2Config(**{"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 96, **changes}),
    "gpt-neox": _of(GPTNeoXConfig),
    # Two of four experts per token; the choice must not depend on other rows.
    "qwen3-moe": _of(Qwen3MoeConfig, num_key_value_heads=1, head_dim=8, **_EXPERTS),
    # Soft capping, which only eager attention supports; the cap is low enough to change the scores of these large
    # weights.
    "gemma2": _of(Gemma2Config, **_GEMMA, attn_logit_softcapping=5.0),
    # Separate rotary embeddings for each type of layer.
    "gemma3": _of(Gemma3TextConfig, **_GEMMA),
    "phi3": _of(Phi3Config, num_key_value_heads=1, sliding_window=WINDOW),
    # Learned positions, and an lm_head narrower than the model.
    "opt": _of(OPTConfig, ffn_dim=24, word_embed_proj_dim=12),
    # One key for all heads, and a separate attention, which cannot be replaced in `transformers`.
    "falcon": _of(FalconConfig, ffn_hidden_size=24, multi_query=True, alibi=False),
    "olmo2": _of(Olmo2Config, num_key_value_heads=1),
    # Scales everything: embeddings, residuals, scores and logits.
    "granite": _of(GraniteConfig, num_key_value_heads=1, logits_scaling=8.0, **_SCALES),
}

ATTENTIONS = [(family, attention) for family in FAMILIES for attention in ("eager", "sdpa")]
ATTENTIONS.remove(("gemma2", "sdpa"))
"""Every family with every attention that it supports."""

FEW_ATTENTIONS = [("llama", "sdpa"), ("gpt2", "eager"), ("gemma3", "sdpa"), ("qwen3-moe", "eager")]
"""Four that represent all in `make check`: plain; learned positions; masks and frequencies by layer type; experts."""
FEW_FAMILIES = [family for family, _ in FEW_ATTENTIONS]

# Seeds for families that, with seed 0, repeat one token forever or write the same text for every prompt.
_FIRST_SEED = {"qwen3-moe": 18, "gemma2": 20, "gemma3": 1, "phi3": 1, "falcon": 2, "olmo2": 21}


def tiny_model(
    family: str = "llama", vocab: int = 16, seed: int = 0, attention: str | None = None, **changes: Any
) -> PreTrainedModel:
    """Make a model of the family with random fp32 weights, the same for the same arguments."""
    torch.manual_seed(seed + _FIRST_SEED.get(family, 0))
    config = FAMILIES[family](vocab_size=vocab, **{**_COMMON, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.eval()
    return model


def counting_model(vocab: int = 16) -> PreTrainedModel:
    """Make a Llama whose next token is always the last token plus one: its layers add nothing, and its lm_head shifts
    by one. The last hidden state is 4 at the index of the last token and 0 elsewhere (a one-hot, normalised to rms 1).
    """
    model = tiny_model("llama", vocab=vocab, hidden_size=vocab)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embeddings: Any = model.get_input_embeddings()
        lm_head: Any = model.get_output_embeddings()
        embeddings.weight.copy_(torch.eye(vocab))
        lm_head.weight.copy_(torch.eye(vocab).roll(1, dims=0))
    return model


@torch.inference_mode()
def full_forward(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits at every position of a text, of shape (positions, vocab), from one forward pass without cache
    and masks.
    """
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def naive_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int, penalty: float = 1.0) -> tuple[int, ...]:
    """Decode ``count`` tokens by argmax, each with a forward pass over the whole text."""
    text = list(prompt)
    for _ in range(count):
        logits = full_forward(model, text)[-1].clone()
        for token in set(text):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        text.append(int(logits.argmax()))
    return tuple(text[len(prompt) :])


@contextmanager
def positions_run(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield a list to which every forward pass of the model appends its number of positions."""
    run: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: run.append(args[0].shape[1]))
    try:
        yield run
    finally:
        handle.remove()
