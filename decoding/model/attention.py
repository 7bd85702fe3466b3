"""Scaled dot-product attention without copies of the cache.

With grouped-query models, `transformers`' sdpa repeats keys and values for every query head if there is a mask or more
than one query. This copies the whole prefix, in every layer and every step. `grouped_attention` instead treats the
query heads of a group as more queries of one head, and reads the cache in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_GROUPED = "headstart"
_LAID_OUT: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("laid_out", default=None)
"""Maps ids of the current pass's masks to the mask and its repeated form; layers of one kind share a mask."""


def leave_out_cudnn() -> None:
    """Switch off cuDNN's attention in this process, which includes decoding by transformers.

    On recent GPUs torch tries cuDNN first. cuDNN builds a plan for every new key length, which takes tens of
    milliseconds in each step of a growing text, and for each new padded length of a batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def copy_free_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with sdpa attention use `grouped_attention` inside the context.

    Models that do not look up their attention in `transformers`' interface (such as Falcon) are left unchanged, because
    with an unknown name they would use eager attention with masks made for sdpa.
    """
    if not model._supports_attention_backend or model.config._attn_implementation != "sdpa":
        yield
        return
    laid_out = _LAID_OUT.set({})
    try:
        model.config._attn_implementation = _GROUPED
        yield
    finally:
        model.config._attn_implementation = "sdpa"
        _LAID_OUT.reset(laid_out)


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
    """Attend, with `transformers`' signature: query (batch, heads, queries, dim), key (batch, groups, keys, dim).

    Calls `transformers`' sdpa if there is no mask (a prefill), if heads do not share keys, or if there are options
    other than a mask; sdpa rejects unknown options. Returns (batch, queries, heads, dim) and None.
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

    Inside `copy_free_attention` this happens once per pass.
    """
    known = _LAID_OUT.get()
    if known is not None and id(mask) in known:
        return known[id(mask)][1]
    rows, _, queries, keys = mask.shape
    repeated = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * queries, keys)
    if known is not None:
        known[id(mask)] = mask, repeated  # as long as the mask exists, its id is not reused
    return repeated


AttentionInterface.register(_GROUPED, grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
