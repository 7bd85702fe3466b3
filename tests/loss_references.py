"""Inputs of the losses, and reference values of `fused_loss`, computed by autograd from all logits at once."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from trainer.learning.losses import HiddenTeacher, LossMix
from trainer.recipe.common import Divergence, Term

KINDS: tuple[Divergence, ...] = get_args(Divergence)
TOKENS, HIDDEN, VOCAB = 13, 5, 7

MIXES: tuple[dict[Term, float], ...] = (
    *({kind: 1.0} for kind in KINDS),
    {"cross_entropy": -0.5, "acceptance": 0.1, "forward_kl": 1.1},
)


def inputs(dtype: torch.dtype = torch.float64, outputs: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states, an lm_head, and labels from the whole vocabulary."""
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(outputs, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def one(term: Term) -> LossMix:
    return LossMix({term: 1.0})


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


class Anew(torch.autograd.Function):
    """A loss that is computed again for each backward pass, because gradcheck runs two of them and `fused_loss` allows
    one.
    """

    @staticmethod
    def forward(ctx: Any, loss_of: Callable[..., Tensor], *given: Tensor) -> Tensor:
        ctx.loss_of = loss_of
        ctx.save_for_backward(*given)
        return loss_of(*given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            loss = ctx.loss_of(*given)
        return None, *torch.autograd.grad(loss, given, gradient)


def assert_same(loss: Tensor, expected: Tensor, *of: Tensor, tolerance: float = 1e-10) -> None:
    """Compare two losses and their gradients."""
    assert torch.allclose(loss, expected, rtol=0, atol=tolerance)
    for ours, theirs in zip(gradients(loss, *of), gradients(expected, *of), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=tolerance)


def a_teacher(dtype: torch.dtype = torch.float64) -> tuple[HiddenTeacher, Tensor]:
    """Make a teacher; return it with its logits."""
    hidden, weight = torch.randn(TOKENS, HIDDEN + 1, dtype=dtype), torch.randn(VOCAB, HIDDEN + 1, dtype=dtype)
    return HiddenTeacher(hidden, weight), hidden @ weight.T


def all_logits(logits: Tensor) -> HiddenTeacher:
    """Make a teacher with these logits."""
    return HiddenTeacher(logits, torch.eye(logits.shape[1], dtype=logits.dtype))


def divergence(
    draft_logits: Float[Tensor, "tokens outputs"],
    target_logits: Float[Tensor, "tokens vocab"],
    kind: Divergence,
    temperature: float = 1.0,
    *,
    tokens: Int[Tensor, " outputs"] | None = None,
) -> Float[Tensor, ""]:
    """Return the sum over tokens of the divergence between the target's p and the draft's q, both softmaxed in fp32.

    ``tokens[i]`` is the token of the target for which the draft's output i stands; the default is token i.
    """
    wide = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    # For the log of 0 the smallest finite number is used, because 0 times that number is 0 and not NaN.
    lowest = torch.finfo(wide).min
    log_q = (draft_logits.to(wide) / temperature).log_softmax(-1).clamp(min=lowest)
    log_p = (target_logits.to(wide) / temperature).log_softmax(-1).clamp(min=lowest)
    covered = torch.ones_like(log_p[:, 0])
    if tokens is not None or log_q.shape[1] < log_p.shape[1]:
        log_p = log_p[:, : log_q.shape[1]] if tokens is None else log_p[:, tokens]
        covered = log_p.exp().sum(-1)
    if kind == "acceptance":
        return -torch.minimum(log_p, log_q).logsumexp(-1).sum()
    if kind == "total_variation":
        return (1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)).sum()
    return ((log_p.exp() * (log_p - log_q)).sum(-1) - torch.special.xlogy(covered, covered)).sum()


def reference(
    logits: Tensor, labels: Tensor, mix: LossMix, target_logits: Tensor, tokens: Tensor | None = None
) -> Tensor:
    """Compute the same as `fused_loss` from the draft's logits and all logits of the target."""
    draft, target = logits / mix.temperature, target_logits / mix.temperature
    total = torch.zeros((), dtype=logits.dtype)
    for term, factor in mix.weights.items():
        if term == "cross_entropy":
            value = _cross_entropy(logits, labels, tokens)
        else:
            value = divergence(draft, target, term, tokens=tokens)
        total = total + factor * value
    return total


def _cross_entropy(logits: Tensor, labels: Tensor, tokens: Tensor | None) -> Tensor:
    known = list(range(logits.shape[1])) if tokens is None else tokens.tolist()
    rows = [(row, known.index(label)) for row, label in enumerate(labels.tolist()) if label in known]
    at, written = (torch.tensor(part) for part in zip(*rows, strict=True))
    return F.cross_entropy(logits[at], written, reduction="sum")
