"""Attention in a sliding window over a whole text, without the scores outside of the window.

The mask of a text of n tokens has n² entries, and torch's attention computes them all. Here the queries stand in blocks
of one window; a block sees its own keys and those of the block before, so that a text costs 2 n windows. For passes
without a cache: a draft's training, and a target that teaches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "headstart_banded"


def band(queries: int, keys: int, window: int, device: torch.device | str) -> Bool[Tensor, "1 1 queries keys"]:
    """Mark the keys that each query sees: itself and the ``window`` - 1 before it; the last query is the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


def banded_attention(
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch groups tokens dim"],
    value: Float[Tensor, "batch groups tokens dim"],
    block: Bool[Tensor, "1 1 window keys"],
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Float[Tensor, "batch heads tokens dim"]:
    """Attend causally within a window; ``block`` is the `band` of one window's queries over two windows' keys."""
    tokens, window = query.shape[2], block.shape[2]
    if (shared := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    padding = (0, 0, 0, -tokens % window)  # behind the text, where none of its tokens looks
    query, key, value = (F.pad(each, padding) for each in (query, key, value))
    settings: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    first, rest = slice(window), slice(window, None)
    begin = F.scaled_dot_product_attention(
        query[:, :, first], key[:, :, first], value[:, :, first], is_causal=True, **settings
    )
    behind = F.scaled_dot_product_attention(
        _in_blocks(query[:, :, rest], window), _pairs(key, window), _pairs(value, window), attn_mask=block, **settings
    )
    behind = behind.unflatten(1, (query.shape[1], -1)).flatten(2, 3)
    attended: Tensor = torch.cat((begin, behind), 2)[:, :, :tokens]
    return attended


def _in_blocks(states: Tensor, window: int) -> Tensor:
    """Make every block of every head a head of its own, (batch, heads * blocks, window, dim)."""
    blocks: Tensor = states.unflatten(2, (-1, window)).flatten(1, 2)
    return blocks


def _pairs(states: Tensor, window: int) -> Tensor:
    """Return each block from the second on behind the one before it, (batch, heads * blocks, 2 * window, dim)."""
    return torch.cat((_in_blocks(states[:, :, :-window], window), _in_blocks(states[:, :, window:], window)), 2)


def _mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Tensor | None:
    """Make transformers' mask, or one block's for a window alone over more than two of its lengths.

    A mask that packed documents or padding have a part in is never skipped, by ``allow_is_causal_skip``, or is given.
    """
    length = given["kv_length"]
    is_window = local_size is not None and local_size == getattr(config, "sliding_window", None)
    alone = given.get("allow_is_causal_skip", True) and given.get("attention_mask") is None
    if local_size is None or not is_window or not alone or not given["q_length"] == length > 2 * local_size:
        whole: Tensor | None = sdpa_mask(local_size=local_size, config=config, **given)
        return whole
    return band(local_size, 2 * local_size, local_size, given["device"])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, by transformers' signature; returns (batch, tokens, heads, dim) and None."""
    if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:  # one block's
        if kwargs.get("position_bias") is None and kwargs.get("softcap") is None:
            attended = banded_attention(query, key, value, attention_mask, dropout, scaling)
            return attended.transpose(1, 2).contiguous(), None
        attention_mask = band(query.shape[2], key.shape[2], attention_mask.shape[2], key.device)
    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return attended, None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def attention_in_bands(model: nn.Module) -> Iterator[None]:
    """Let a model with sdpa attention attend in bands inside the context, wherever a layer has a window.

    Nothing changes for models that do not look their attention up in transformers' interface, nor for one that runs
    layers again in the backward pass, which comes after the context.
    """
    config: Any = getattr(model, "config", None)
    heeds = getattr(model, "_supports_attention_backend", False)
    if getattr(config, "_attn_implementation", None) != "sdpa" or not heeds or _runs_again(model):
        yield
        return
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = "sdpa"


def _runs_again(model: nn.Module) -> bool:
    """Return True if layers run again in the backward pass: by transformers' flag, or wrapped by torch for FSDP."""
    return any(
        getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper"
        for module in model.modules()
    )
