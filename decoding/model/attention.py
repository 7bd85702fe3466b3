"""Scaled dot-product attention without copies of the cache, and without scores outside of a sliding window.

`transformers`' sdpa repeats the keys and values of grouped-query models for every query head as soon as there is more
than one query or a mask: a copy of the whole prefix in every layer of every step. In `grouped_attention` the query
heads of a group become further queries of one head instead, so that the cache is read in place.

The mask of a text of n tokens has n² entries, and torch's attention computes them all. In `banded_attention` the
queries of a layer with a window stand in blocks of one window; a block sees its own keys and those of the block before,
so that a text costs 2 n windows. This is for passes without a cache: a draft's training, and a target that teaches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_GROUPED, _BANDED = "headstart", "headstart_banded"
_LAID_OUT: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("laid_out", default=None)
"""Masks of the running pass and what was made of them, by their ids: a mask serves every layer of its kind."""


def leave_out_cudnn() -> None:
    """Switch off cuDNN's attention in this process, for this project's models and for transformers' peers alike.

    On recent GPUs torch tries it first, and it builds a plan for every new key length: tens of milliseconds in every
    step of a growing text, and for every new padded length of a batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def copy_free_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with sdpa attention use `grouped_attention` inside the context."""
    laid_out = _LAID_OUT.set({})
    try:
        with _attending(model, _GROUPED):
            yield
    finally:
        _LAID_OUT.reset(laid_out)


@contextmanager
def attention_in_bands(model: nn.Module) -> Iterator[None]:
    """Let a model with sdpa attention attend in bands inside the context, wherever a layer has a window.

    Nothing changes for a model that runs layers again in the backward pass, which comes after the context: by
    transformers' flag, or wrapped by torch for FSDP.
    """
    if any(
        getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper"
        for module in model.modules()
    ):
        yield
        return
    with _attending(model, _BANDED):
        yield


@contextmanager
def _attending(model: nn.Module, name: str) -> Iterator[None]:
    """Switch a model with sdpa attention to the attention registered as ``name``.

    Models that do not look their attention up in `transformers`' interface (Falcon among them) keep their own: with a
    name unknown to them they would attend eagerly, by masks made for sdpa.
    """
    config: Any = getattr(model, "config", None)
    heeds = getattr(model, "_supports_attention_backend", False)
    if not heeds or getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = "sdpa"


# --- grouped queries --------------------------------------------------------------------------------------------------


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, by `transformers`' signature: query (batch, heads, queries, dim), key (batch, groups, keys, dim).

    Calls `transformers`' own sdpa if there is no mask (a prefill), if every head has its own keys, or if options other
    than a mask are given (it refuses unknown ones). Returns (batch, queries, heads, dim) and None.
    """
    batch, heads, queries, dim = query.shape
    groups = key.shape[1]
    plain = not any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or heads == groups or attention_mask.shape[1] != 1 or not plain:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended, None
    shared = heads // groups
    packed = query.reshape(batch, groups, shared * queries, dim)
    mask = _for_each_head(attention_mask, shared)
    attended = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return attended.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def _for_each_head(mask: Tensor, shared: int) -> Tensor:
    """Repeat a mask (rows, 1, queries, keys) for a group's ``shared`` query heads, (rows, 1, all queries, keys).

    It is made once in a pass inside `copy_free_attention`.
    """
    known = _LAID_OUT.get()
    if known is not None and id(mask) in known:
        return known[id(mask)][1]
    rows, _, queries, keys = mask.shape
    repeated = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * queries, keys)
    if known is not None:
        known[id(mask)] = mask, repeated  # with the mask, so that no other gets its id
    return repeated


# --- bands ------------------------------------------------------------------------------------------------------------


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


def _banded_mask(*, local_size: int | None = None, config: Any = None, **given: Any) -> Tensor | None:
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


def _banded_forward(
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


AttentionInterface.register(_GROUPED, grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
AttentionInterface.register(_BANDED, _banded_forward)
AttentionMaskInterface.register(_BANDED, _banded_mask)
