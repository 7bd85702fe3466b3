"""Batch-invariant passes: the logits at a token do not depend on the other tokens and rows in its pass.

Kernels choose the order of their additions by the shapes of their inputs, so in bf16 a pass over a tree rounds
differently from passes over single tokens. Here every product with weights has the same shape, so the same kernel
computes it. Every other sum over many numbers runs in fp64, where the order changes only bits that rounding to the
model's dtype removes. Kernels with fixed tiles do not need fp64, but they must be written for each device, as in vLLM
(https://docs.vllm.ai/en/stable/features/batch_invariance/).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

POSITIONS = 32
"""Number of positions in one product with weights. For a tree of up to 31 drafted tokens the weights are read once."""

_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_PRODUCTS: dict[Any, int] = {F.linear: 0, torch.addmm: 1, **dict.fromkeys(_MATMULS, 0)}
"""Functions that may multiply by weights, and the index of the states among their arguments; the weights come next."""
_SUMS: tuple[Any, ...] = (
    *(*_MATMULS, torch.bmm, Tensor.bmm, torch.baddbmm, F.scaled_dot_product_attention),
    *(F.softmax, torch.softmax, Tensor.softmax, torch.mean, Tensor.mean, torch.sum, Tensor.sum),
)


class BatchInvariant(TorchFunctionMode):
    """A context in which this thread's torch functions are batch-invariant.

    Kernels outside torch, such as those of quantised weights, are not changed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, index = kwargs or {}, _PRODUCTS.get(func)
        if index is not None and len(args) > index + 1 and args[index + 1].dim() == 2:
            before, after = args[:index], args[index + 1 :]
            return _in_blocks(lambda states: func(*before, states, *after, **kwargs), args[index])
        if func is getattr(torch, "_grouped_mm", None):  # the products of experts
            return _by_expert(*args, **kwargs)
        return _in_fp64(func, args, kwargs) if func in _SUMS else func(*args, **kwargs)


def _in_blocks(product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Apply a product to blocks of `POSITIONS` states (*positions, hidden); the last block is padded."""
    flat = states.reshape(-1, states.shape[-1])
    padded = F.pad(flat, (0, 0, 0, -len(flat) % POSITIONS))
    whole = torch.cat([product(block) for block in padded.split(POSITIONS)])
    return whole[: len(flat)].reshape(*states.shape[:-1], -1)


def _by_expert(states: Tensor, weights: Tensor, offs: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Multiply each expert's states by the expert's weights (experts, hidden, width); ``offs`` are the ends of the
    experts' states.
    """
    assert bias is None, "transformers adds biases of experts itself"
    starts = [0, *offs.tolist()]
    parts = [
        _in_blocks(partial(torch.matmul, other=weight), states[start:end])
        for weight, (start, end) in zip(weights, pairwise(starts), strict=True)
        if end > start
    ]
    return torch.cat(parts)


def _in_fp64(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with fp64 instead of narrower floats; round its result as the function itself would."""
    values = (*args, *kwargs.values())
    asked = next((value for value in values if isinstance(value, torch.dtype)), None)
    dtype = asked or next((value.dtype for value in values if isinstance(value, Tensor)), torch.long)
    if not dtype.is_floating_point:
        return func(*args, **kwargs)

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return torch.float64 if value is asked and asked else value

    return func(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()}).to(dtype)
