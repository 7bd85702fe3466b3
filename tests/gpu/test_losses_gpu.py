"""The fused losses on a GPU have the values and gradients of the CPU, and sums that are never rounded."""

from typing import Any

import pytest
import torch
from loss_references import MIXES, VOCAB, a_teacher, gradients, inputs
from torch import Tensor

from trainer.learning.fused import add_product, fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix, Teacher
from trainer.recipe.common import Term

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def on_gpu(given: Any) -> Any:
    if isinstance(given, HiddenTeacher):
        return type(given)(*(on_gpu(part) for part in given))
    if isinstance(given, Tensor):
        return given.detach().cuda().requires_grad_(given.requires_grad)
    return given


def check_same(mix: LossMix, reference: LossMix, teacher: Teacher | None = None, **options: Any) -> None:
    """Compare a loss on the GPU with one on the CPU, both in fp32."""
    hidden, weight, labels = inputs(torch.float32, outputs=len(options.get("tokens", range(VOCAB))))
    expected = fused_loss(hidden, weight, labels, reference, teacher, **options)
    given = [on_gpu(each) for each in (hidden, weight, labels)]
    found = fused_loss(*given, mix, on_gpu(teacher), **{name: on_gpu(each) for name, each in options.items()})
    assert found.correct.tolist() == expected.correct.tolist()
    assert torch.allclose(found.loss.cpu(), expected.loss, rtol=1e-5)
    assert torch.allclose(found.accepted.cpu(), expected.accepted, rtol=1e-5)
    ours, theirs = gradients(found.loss, *given[:2]), gradients(expected.loss, hidden, weight)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", MIXES, ids="+".join)
@pytest.mark.parametrize("chunk", [5, None])
def test_a_fused_loss_is_the_cpus(weights: dict[Term, float], chunk: int | None) -> None:
    check_same(LossMix(weights), LossMix(weights), a_teacher(torch.float32)[0], chunk=chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_summed_without_rounding(dtype: torch.dtype) -> None:
    left, right = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((300, 4, 64), (4, 64, 200)))
    sums = torch.full((300, 200), torch.nan, device="cuda")
    for chunk in range(4):
        add_product(sums, left[:, chunk], right[chunk], onto=chunk > 0)
    exact = torch.einsum("ack,ckb->ab", left.double(), right.double())
    assert torch.allclose(sums.double(), exact, rtol=0, atol=1e-4)  # one product rounded to bf16 is off by 0.05
