"""Liger's cross entropy kernel (Triton) in place of the softmax of `trainer.learning.fused`, on a GPU.

One kernel reads a chunk's logits twice and writes their gradient once, where torch's operations pass over fp32 copies.
Its losses, hits and ignored labels are those of the fused loss; the products around it, the bias, the tokens that a
draft writes and the sums in fp32 stay the fused loss's own (Liger's own linear cross entropy knows none of them).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_IGNORED = -1


def check_liger(device: torch.device) -> None:
    """Raise ValueError where the kernel cannot run: without a GPU, or without Liger."""
    if device.type != "cuda":
        raise ValueError(
            f"loss.backend is liger, whose kernels run on a GPU, but this runs on {device.type}: use torch"
        )
    _kernel()


def _kernel() -> tuple[Any, int]:
    """Return the kernel, and the most logits that it reads at once; ValueError without Liger."""
    try:
        from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    except ImportError as error:
        raise ValueError(
            f"loss.backend is liger, which cannot be imported ({error}): pip install 'headstart[liger]', or use torch"
        ) from error
    return liger_cross_entropy_kernel, MAX_FUSED_SIZE


def cross_entropy_into_gradient(
    logits: Float[Tensor, "rows outputs"],
    labels: Int[Tensor, " rows"],
    factor: float,
    row_weights: Float[Tensor, " rows"] | None,
    soft_cap: float | None,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Overwrite products with the cross entropy's gradient with respect to them; return its sum, and the hits.

    A label of -1 adds nothing. The loss and its gradient are multiplied by ``factor`` and each row's weight; hits are
    not. The gradient is rounded to the products' dtype once, and once more where it is multiplied.
    """
    kernel, most = _kernel()
    rows, outputs = logits.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    predicted = torch.full((rows,), _IGNORED, device=logits.device)
    labels = labels.contiguous()
    if rows:
        kernel[(rows,)](
            X_ptr=logits,
            X_stride=logits.stride(0),
            Y_ptr=labels,
            Y_stride=1,
            n_cols=outputs,
            loss_ptr=losses,
            loss_stride=1,
            predicted_tokens_ptr=predicted,
            predicted_tokens_stride=1,
            ignore_index=_IGNORED,
            softcap=soft_cap,
            HAS_SOFTCAPPING=soft_cap is not None,
            weight_ptr=None,
            weight_sum=0.0,
            HAS_WEIGHT=False,
            label_smoothing=0.0,
            z_loss_ptr=None,
            lse_square_scale=0.0,
            RETURN_Z_LOSS=False,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            RETURN_TOKEN_ACCURACY=False,
            n_non_ignore=rows,
            sum_non_ignore_weight=rows,
            reduction="sum",
            RETURN_PREDICTED_TOKENS=True,
            HAS_GRADIENTS=True,
            BLOCK_SIZE=min(most, 1 << (outputs - 1).bit_length()),
            num_warps=32,
        )
    if factor != 1:
        losses, logits = losses.mul_(factor), logits.mul_(factor)
    if row_weights is not None:
        losses = losses.mul_(row_weights)
        logits.mul_(row_weights[:, None])
    return losses.sum(), ((predicted == labels) & (labels != _IGNORED)).sum()
