"""Checks of token ids given by users, each with an error of one sentence."""

from collections.abc import Iterable, Sized
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_REMEDY = "give tokenizer(text)['input_ids']"


def check_ids(prompt: Any, vocab_size: int | None = None) -> None:
    """Refuse a prompt that is not a list of token ids: a text, a single number, or numbers other than integers.

    Given ``vocab_size`` (None: the target is not known yet), also refuse an empty prompt and ids outside it.
    """
    if isinstance(prompt, str | bytes):
        raise ValueError(f"a prompt is the text {prompt!r:.60}, not token ids: {_REMEDY}")
    if isinstance(prompt, Tensor):
        raise ValueError(f"a prompt is a tensor of shape {tuple(prompt.shape)}: give a list of its ids, ids.tolist()")
    if not isinstance(prompt, Sized) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is {prompt!r:.60}, not a list of token ids: give such a list for each prompt")
    if all(type(token) is int for token in prompt) and len(prompt) and vocab_size is not None:
        low, high = min(prompt), max(prompt)
        if low >= 0 and high < vocab_size:
            return  # a fast path: prompts may have many thousand tokens
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            kind = type(token).__name__
            raise ValueError(f"a prompt holds {token!r:.60}, a {kind}, but token ids are integers: {_REMEDY}")
        if vocab_size is not None and not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"the prompt holds token {token} but the target knows 0 to {vocab_size - 1}: use its own tokenizer"
            )
    if vocab_size is not None and not len(prompt):
        raise ValueError("the prompt is empty: give at least one token (a BOS token will do)")


def check_tensor_of_ids(input_ids: Any) -> None:
    """Refuse anything but a tensor of integers."""
    if not isinstance(input_ids, Tensor):
        kind = type(input_ids).__name__
        raise ValueError(f"input_ids is a {kind}: give a tensor of ids, tokenizer(text, return_tensors='pt').input_ids")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        kind = str(input_ids.dtype).removeprefix("torch.")
        raise ValueError(f"input_ids holds {kind} numbers, but token ids are integers: {_REMEDY}")
