"""Scaled dot-product attention that never copies the cached keys and values.

`transformers`' sdpa repeats the keys and values of grouped-query models for every query head as soon as there is more
than one query or a mask: a copy of the whole prefix in every layer of every step. Here the query heads of a group
become further queries of one head instead, so that the cache is read in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "headstart"


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
    mask = (
        attention_mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(len(attention_mask), 1, shared * queries, -1)
    )
    attended = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return attended.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def leave_out_cudnn() -> None:
    """Switch off cuDNN's attention in this process, for this project's models and for transformers' peers alike.

    On recent GPUs torch tries it first, and it builds a plan for every new key length: tens of milliseconds in every
    step of a growing text, and for every new padded length of a batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def copy_free_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with sdpa attention use `grouped_attention` inside the context.

    Models that do not look their attention up in `transformers`' interface (Falcon among them) keep their own: with a
    name unknown to them they would attend eagerly, by masks made for sdpa.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        yield
        return
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = "sdpa"
