"""What the fused loss does not do: hold more logits than a chunk's, compute anything twice, or in the wrong dtype."""

from typing import Any, get_args

import pytest
import torch
from loss_references import HIDDEN, a_teacher, gradients, inputs, one
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.learning.fused import fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix, SampledTailTeacher
from trainer.recipe.common import Term


class LargestTensor(TorchDispatchMode):
    """Counts the numbers in the largest tensor that any operation makes, and the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)  # with ``out`` or without
        return made


def sample(logits: Tensor, kept: int, drawn: int) -> SampledTailTeacher:
    """The best logits, and others as if they had been drawn."""
    best = logits.topk(kept + drawn)
    (tokens, tail), (known, tail_known) = (part.split((kept, drawn), 1) for part in (best.indices, best.values))
    return SampledTailTeacher(tokens, known, logits.logsumexp(-1), tail, tail_known)


@pytest.mark.parametrize("kind", ["hidden", "sample"])
@pytest.mark.parametrize("term", get_args(Term))
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(kind: str, term: Term) -> None:
    tokens, vocab, chunk = 60, 100, 8
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    target, lm_head = torch.randn(tokens, HIDDEN), weight.detach()
    if kind == "hidden":
        teacher: Any = HiddenTeacher(target, lm_head)
    else:
        teacher = sample(target @ lm_head.T, 4, 3)
    with LargestTensor() as watched:
        fused_loss(hidden, weight, torch.randint(vocab, (tokens,)), one(term), teacher, chunk=chunk).loss.backward()
    assert watched.numbers == chunk * vocab  # and hidden states and weight are smaller
    with LargestTensor() as watched:
        F.cross_entropy(hidden @ weight.T, torch.randint(vocab, (tokens,))).backward()
    assert watched.numbers == tokens * vocab  # the plain way is seen


@pytest.mark.parametrize("weights", [{"cross_entropy": 1.0}, {"cross_entropy": 0.5, "forward_kl": 1.0}])
def test_under_autocast_products_run_in_bf16_and_come_out_close_to_fp32(weights: dict[Term, float]) -> None:
    hidden, weight, labels = inputs(torch.float32)
    teacher, _ = a_teacher(torch.float32)
    mix = LossMix(weights)
    exact = fused_loss(hidden, weight, labels, mix, teacher, chunk=4).loss
    exact_gradients = gradients(exact, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_loss(hidden, weight, labels, mix, teacher, chunk=4).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-2)
    assert loss.item() != exact.item()  # bf16 it was
    for ours, theirs in zip(gradients(loss, hidden, weight), exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()
