"""Random EAGLE-3 drafts for tiny targets, and the readable forward pass with which sessions are compared."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_dspark import states_at
from torch import Tensor, nn

from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import Eagle3Config
from decoding.model.eagle3_draft import Eagle3Draft


def tiny_eagle3(
    target: CausalLM, writes: Sequence[int] | None = None, spread: float = 0.3, seed: int = 1, **changes: Any
) -> Eagle3Draft:
    """Make a draft over all taps, with grouped keys; weights have the standard deviation ``spread``.

    ``writes``: the tokens of its lm_head; None means all.
    """
    sizes: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if writes is None else len(writes),
        "target_layer_ids": tuple(range(target.num_layers - 1)),
    }
    draft = Eagle3Draft(Eagle3Config(**sizes | changes)).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        nn.init.normal_(parameter, float("norm" in name), spread, generator=generator)
    if writes is not None:
        draft.write_only(writes)
    return draft


def logits_after(draft: Eagle3Draft, target: CausalLM, text: Sequence[int], path: Sequence[int] = ()) -> Tensor:
    """Return the draft's logits after a text and a drafted path, of shape (vocab,), computed slot by slot without a
    cache.

    Each slot is a pair of a token's embedding and a state. For tokens of the text these are the target's states before
    the token; for drafted tokens it is the draft's own state of the previous slot.
    """
    config, weights = draft.config, dict(draft.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] @ x

    def rotated(x: Tensor, position: int) -> Tensor:
        """Rotate the pairs (i, i + dim / 2) of (heads, dim) by the angle of the position."""
        half = config.head_dim // 2
        angles = position * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def read(states: Tensor) -> Tensor:
        if config.norm_before_fc:
            states = norm(states, "input_norm")
        if config.fc_norm:
            parts = states.split(config.hidden_size)
            states = torch.cat([norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)])
        return product(states, "fc")

    embedding = target.model.get_input_embeddings().weight.detach()
    tapped = states_at(target, text[:-1], config.target_layer_ids) if len(text) > 1 else ()
    pairs = [(text[place + 1], read(states)) for place, states in enumerate(tapped)]
    keys, values, state = list[Tensor](), list[Tensor](), torch.zeros(config.hidden_size)
    for position, (token, given) in enumerate([*pairs, *((token, None) for token in path)]):
        # A text of one token has no slot: its first drafted token is at position 0, with a state of zeros.
        g = given if given is not None else (norm(state, "norm") if config.norm_output else state)
        normed = norm(g, "midlayer.hidden_norm")
        pair = torch.cat((norm(embedding[token], "midlayer.input_layernorm"), normed))
        q, k, v = (
            product(pair, f"midlayer.self_attn.{name}_proj").unflatten(0, (-1, config.head_dim)) for name in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, "midlayer.self_attn.q_norm"), norm(k, "midlayer.self_attn.k_norm")
        keys.append(rotated(k, position))
        values.append(v)
        each, window = config.num_attention_heads // config.num_key_value_heads, config.sliding_window or 0
        every_key, every_value = (torch.stack(held[-window:]).repeat_interleave(each, 1) for held in (keys, values))
        scores = torch.einsum("hd,phd->hp", rotated(q, position), every_key) / config.head_dim**0.5
        attended = torch.einsum("hp,phd->hd", scores.softmax(-1), every_value).flatten()
        s = (normed if config.norm_before_residual else g) + product(attended, "midlayer.self_attn.o_proj")
        n = norm(s, "midlayer.post_attention_layernorm")
        gate, up = product(n, "midlayer.mlp.gate_proj"), product(n, "midlayer.mlp.up_proj")
        state = s + product(nn.functional.silu(gate) * up, "midlayer.mlp.down_proj")
    whole = torch.full((config.vocab_size,), -torch.inf)
    for index, logit in enumerate(product(norm(state, "norm"), "lm_head")):
        whole[index + int(draft.d2t[index])] = logit
    return whole
