"""Random DSpark and DFlash drafts for tiny targets, and their logits by one plain forward of a text, as reference."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.dspark_config import DSparkConfig


def tiny_dspark(
    target: CausalLM,
    tokens: int = 4,
    rank: int = 3,
    spread: float = 0.3,
    seed: int = 1,
    writes: Sequence[int] | None = None,
    **changes: Any,
) -> DSparkDraft:
    """Make a draft of one layer over all taps, with grouped keys; its weights are ``spread`` wide, its bias is too.

    ``writes``: the tokens of an lm_head of its own; None: the target's lm_head.
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
    """Make a draft without a bias, whose masks predict their own places."""
    return tiny_dspark(target, tokens, 0, sample_from_anchor=False, **changes)


def states_at(target: CausalLM, text: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return the target's states behind the layers ``taps`` at a text's tokens, (tokens, taps x hidden)."""
    with torch.no_grad():
        output = target.model(input_ids=torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[tap + 1][0] for tap in taps], -1)


def block_logits(draft: DSparkDraft, target: CausalLM, text: Sequence[int]) -> Tensor:
    """Return the logits of the K tokens behind a text, (K, outputs), without bias: all recomputed from the weights."""
    config, weights = draft.config, dict(draft.named_parameters())
    context, slots = len(text) - 1, config.block_size + (not config.sample_from_anchor)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)

    def rotated(x: Tensor, first: int) -> Tensor:
        """Turn the pairs (i, i + dim / 2) of (heads, positions, dim) by the angle of their position."""
        half = config.head_dim // 2
        angles = torch.arange(first, first + x.shape[1])[:, None] * config.rope_theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    read = states_at(target, text[:-1], config.target_layer_ids) if context else torch.zeros(0, draft.fc.in_features)
    read = norm(read @ weights["fc.weight"].T, "hidden_norm")
    block = torch.tensor([text[-1], *[config.mask_token_id] * (slots - 1)])
    x = target.model.get_input_embeddings().weight.detach()[block]
    for layer in (f"layers.{index}" for index in range(config.num_hidden_layers)):
        own, mine = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        queries = rotated(norm(heads(own, f"{mine}.q_proj"), f"{mine}.q_norm"), context)
        seen = torch.cat((read, own))
        keys = rotated(norm(heads(seen, f"{mine}.k_proj"), f"{mine}.k_norm"), 0)
        values, each = heads(seen, f"{mine}.v_proj"), config.num_attention_heads // config.num_key_value_heads
        scores = queries @ keys.repeat_interleave(each, 0).mT / config.head_dim**0.5
        attended = (scores.softmax(-1) @ values.repeat_interleave(each, 0)).transpose(0, 1).flatten(1)
        x = x + attended @ weights[f"{mine}.o_proj.weight"].T
        own, mine = norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
        gate, up = (own @ weights[f"{mine}.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (nn.functional.silu(gate) * up) @ weights[f"{mine}.down_proj.weight"].T
    own_lm_head = weights.get("lm_head.weight", target.model.get_output_embeddings().weight.detach())
    logits: Tensor = norm(x, "norm")[-config.block_size :] @ own_lm_head.T
    return logits


def logits_after(draft: DSparkDraft, target: CausalLM, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the draft's logits behind a text and a drafted path, (vocab,), its bias by the last token included."""
    logits = block_logits(draft, target, text)[len(path)]
    if draft.markov is not None:
        before = [*text, *path][-1]
        logits = logits + draft.markov.output.weight @ draft.markov.embedding.weight[before]
    if draft.lm_head is None:
        return logits
    whole = [logits.new_tensor(-torch.inf)] * draft.config.vocab_size
    for index, shift in enumerate(draft.d2t.tolist()):
        whole[index + shift] = logits[index]
    return torch.stack(whole)
