"""Random DSpark and DFlash drafts for tiny targets, and as a reference their logits from one plain forward pass."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import DSparkConfig
from decoding.model.dspark_draft import DSparkDraft


def tiny_dspark(
    target: CausalLM,
    tokens: int = 4,
    rank: int = 3,
    spread: float = 0.3,
    seed: int = 1,
    writes: Sequence[int] | None = None,
    **changes: Any,
) -> DSparkDraft:
    """Make a draft of one layer over all taps, with grouped keys; weights and bias have the standard deviation
    ``spread``. ``writes``: the tokens of a separate lm_head; None means the target's lm_head.
    """
    sizes: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": target.vocab_size,
        "block_size": tokens,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": tuple(range(target.num_layers - 1)),
        "num_target_layers": target.num_layers,
        "markov_rank": rank,
        "draft_vocab_size": None if writes is None else len(writes),
    }
    draft = DSparkDraft(DSparkConfig(**sizes | changes)).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        nn.init.normal_(parameter, float("norm" in name), spread, generator=generator)
    if writes is not None:
        draft.d2t.copy_(torch.tensor([token - index for index, token in enumerate(writes)]))
    return draft


def tiny_dflash(target: CausalLM, tokens: int = 4, **changes: Any) -> DSparkDraft:
    """Make a draft without a bias, in which each mask predicts the token at its own position."""
    return tiny_dspark(target, tokens, 0, sample_from_anchor=False, **changes)


def states_at(target: CausalLM, text: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return the target's states after the layers ``taps`` at a text's tokens, of shape (tokens, taps x hidden)."""
    decoder: Any = target.model
    whole = taps[-1] < target.num_layers - 1  # the last entry of transformers' states is taken after the final norm
    with torch.no_grad(), nullcontext() if whole else patch.object(decoder.model, "norm", nn.Identity()):
        output = target.model(input_ids=torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[tap + 1][0] for tap in taps], -1)


def block_logits(draft: DSparkDraft, target: CausalLM, text: Sequence[int]) -> Tensor:
    """Return the logits of the K tokens after a text, of shape (K, outputs), without the bias, computed anew from the
    weights.
    """
    own = dict(draft.named_parameters()).get("lm_head.weight", target.model.get_output_embeddings().weight.detach())
    return block_states(draft, target, text)[-draft.config.block_size :] @ own.T


def block_states(draft: DSparkDraft, target: CausalLM, text: Sequence[int]) -> Tensor:
    """Return the lm_head's input in all slots of the block after a text, of shape (slots, hidden)."""
    config, weights = draft.config, dict(draft.named_parameters())
    context, slots = len(text) - 1, config.block_size + (not config.sample_from_anchor)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)

    def rotated(x: Tensor, first: int) -> Tensor:
        """Rotate the pairs (i, i + dim / 2) of (heads, positions, dim) by the angle of their position."""
        half = config.head_dim // 2
        if config.rope_scaling:
            rope = {**config.rope_scaling, "rope_theta": config.rope_theta}
            sizes = {"head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings}
            module = Qwen3RotaryEmbedding(Qwen3Config(rope_parameters=rope, **sizes))
            cosine, sine = module(x, torch.arange(first, first + x.shape[1])[None])
            return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine
        angles = torch.arange(first, first + x.shape[1])[:, None] * config.rope_theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    read = states_at(target, text[:-1], config.target_layer_ids) if context else torch.zeros(0, draft.fc.in_features)
    read = norm(read @ weights["fc.weight"].T, "hidden_norm")
    block = torch.tensor([text[-1], *[config.mask_token_id] * (slots - 1)])
    x = target.model.get_input_embeddings().weight.detach()[block]
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        own, mine = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        queries = rotated(norm(heads(own, f"{mine}.q_proj"), f"{mine}.q_norm"), context)
        seen = torch.cat((read, own))
        keys = rotated(norm(heads(seen, f"{mine}.k_proj"), f"{mine}.k_norm"), 0)
        values, each = heads(seen, f"{mine}.v_proj"), config.num_attention_heads // config.num_key_value_heads
        scores = queries @ keys.repeat_interleave(each, 0).mT / config.head_dim**0.5
        slides = bool(config.layer_types) and config.layer_types[index] == "sliding_attention"
        for i in range(slots):
            for key in range(context + slots):
                too_early = slides and context + i - key >= (config.sliding_window or 0)
                too_late = key > context + i and (slides if config.is_causal is None else config.is_causal)
                if too_early or too_late:
                    scores[:, i, key] = -torch.inf
        attended = (scores.softmax(-1) @ values.repeat_interleave(each, 0)).transpose(0, 1).flatten(1)
        x = x + attended @ weights[f"{mine}.o_proj.weight"].T
        own, mine = norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
        gate, up = (own @ weights[f"{mine}.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (nn.functional.silu(gate) * up) @ weights[f"{mine}.down_proj.weight"].T
    return norm(x, "norm")


def bias_after(draft: DSparkDraft, hidden: Tensor, newest: int, path: Sequence[int]) -> Tensor:
    """Return the bias after a drafted path, of shape (outputs,): computed from the block's states, slot by slot, as the
    bias is defined.
    """
    weights = {name.removeprefix("markov."): weight for name, weight in draft.named_parameters()}
    memory, factor = torch.zeros(draft.config.markov_rank), torch.zeros(0)
    tokens = [newest, *path] if draft.config.sample_from_anchor else [newest, newest, *path]
    for state, token in zip(hidden[: len(tokens)], tokens, strict=True):
        factor = weights["embedding.weight"][token]
        if draft.config.markov_head_type == "gated":
            read = torch.cat((state, factor))
            factor = torch.sigmoid(weights["gate_proj.weight"] @ read + weights["gate_proj.bias"]) * factor
        if draft.config.markov_head_type == "rnn":
            read = torch.cat((memory, factor, state))
            keep, fresh, shown = (weights["joint_proj.weight"] @ read + weights["joint_proj.bias"]).view(3, -1)
            memory = torch.sigmoid(keep) * memory + (1 - torch.sigmoid(keep)) * torch.tanh(fresh)
            factor = torch.tanh(shown)
    return weights["output.weight"] @ factor


def logits_after(draft: DSparkDraft, target: CausalLM, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the draft's logits after a text and a drafted path, of shape (vocab,), including the bias after the last
    token.
    """
    logits = block_logits(draft, target, text)[len(path)]
    if draft.markov is not None:
        logits = logits + bias_after(draft, block_states(draft, target, text), text[-1], path)
    if draft.lm_head is None:
        return logits
    whole = [logits.new_tensor(-torch.inf)] * draft.config.vocab_size
    for index, shift in enumerate(draft.d2t.tolist()):
        whole[index + shift] = logits[index]
    return torch.stack(whole)
