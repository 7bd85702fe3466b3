"""Losses as sums over the trained tokens, chunked over tokens so that no [heads, tokens, vocabulary] tensor exists.

Sums, not means: the loop divides by the count over the whole batch of all processes and accumulation steps, which is
what makes accumulation and data parallelism exact.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd"]


def linear_cross_entropy(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, " tokens"],
    chunk: int = 1024,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum of cross entropies of ``softmax(hidden @ weight.T)`` at ``labels``, and how many argmaxes are right.

    Gradients of a chunk are formed while its logits exist, so that at most ``chunk`` rows of logits are ever held and
    nothing is computed twice. Products run in autocast's dtype, the softmax in fp32. A frozen weight gets no gradient.
    """
    loss, correct = _LinearCrossEntropy.apply(hidden, weight, labels, chunk)  # type: ignore[no-untyped-call]  # torch's
    return loss, correct


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            compute_hidden, compute_weight = hidden.to(dtype), weight.to(dtype)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            loss = torch.zeros((), dtype=wide, device=hidden.device)
            correct = torch.zeros((), dtype=torch.long, device=hidden.device)
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
            for start in range(0, len(labels), chunk):
                rows = slice(start, start + chunk)
                logits = (compute_hidden[rows] @ compute_weight.T).to(wide)
                correct += (logits.argmax(-1) == labels[rows]).sum()
                log_total = logits.logsumexp(-1, keepdim=True)
                loss += (log_total.squeeze(1) - logits.gather(1, labels[rows, None]).squeeze(1)).sum()
                gradient = (logits - log_total).exp_()
                gradient.scatter_add_(1, labels[rows, None], -torch.ones_like(log_total))
                gradient = gradient.to(dtype)
                hidden_gradient[rows] = (gradient @ compute_weight).to(hidden.dtype)
                if weight_gradient is not None:
                    weight_gradient += gradient.T @ compute_hidden[rows]
        ctx.save_for_backward(hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            weight_gradient = weight_gradient * loss_gradient.to(weight_gradient.dtype)
        return hidden_gradient * loss_gradient.to(hidden_gradient.dtype), weight_gradient, None, None


def divergence(
    draft_logits: Float[Tensor, "tokens vocab"],
    target_logits: Float[Tensor, "tokens vocab"],
    kind: Divergence,
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Sum over tokens of the divergence between the target's p and the draft's q, both softmaxed in fp32.

    ``forward_kl`` KL(p‖q) · ``reverse_kl`` KL(q‖p) · ``jsd`` the mean of both KLs to the midpoint ·
    ``tvd`` half the L1 distance, which is 1 - acceptance of token rejection (DistillSpec, 2310.08461, section 3.2).
    """
    wide = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    log_q = (draft_logits.to(wide) / temperature).log_softmax(-1)
    log_p = (target_logits.to(wide) / temperature).log_softmax(-1)
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum()
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum()
    p, q = log_p.exp(), log_q.exp()
    if kind == "tvd":
        return (p - q).abs().sum() / 2
    log_middle = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=wide))
    return ((p * (log_p - log_middle)).sum() + (q * (log_q - log_middle)).sum()) / 2


def chunked_divergence(
    draft_logits: Float[Tensor, "tokens vocab"],
    target_logits: Float[Tensor, "tokens vocab"],
    kind: Divergence,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Float[Tensor, ""]:
    """`divergence` with its fp32 copies made for one chunk at a time, and made again in the backward pass."""
    # A sum over no rows is 0 and yet hangs on the draft, so a batch without a labelled token can be differentiated too.
    total = draft_logits[:0].sum(dtype=torch.promote_types(draft_logits.dtype, torch.float32))
    # split, not slices: the gradients of slices are each as large as the whole.
    for draft_rows, target_rows in zip(draft_logits.split(chunk), target_logits.split(chunk), strict=True):
        total = total + checkpoint(divergence, draft_rows, target_rows, kind, temperature, use_reentrant=False)
    return total


def acceptance_rate(
    draft_logits: Float[Tensor, "tokens vocab"], target_logits: Float[Tensor, "tokens vocab"], chunk: int = 1024
) -> Float[Tensor, ""]:
    """Sum over tokens of Σ min(p, q): what token rejection would accept at T=1."""
    total = draft_logits.new_zeros((), dtype=torch.promote_types(draft_logits.dtype, torch.float32))
    for draft_rows, target_rows in zip(draft_logits.split(chunk), target_logits.split(chunk), strict=True):
        total += torch.minimum(target_rows.to(total.dtype).softmax(-1), draft_rows.to(total.dtype).softmax(-1)).sum()
    return total
