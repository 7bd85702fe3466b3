"""What stands around Liger's kernel: its arguments, labels that no row writes, weights, hits; and where it is refused.

The kernel itself runs on a GPU: see tests/gpu. Here its readable twin takes the same arguments. With liger-kernel and
triton installed, ``TRITON_INTERPRET=1 pytest tests/test_liger.py`` runs the kernel too, on the CPU.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from loss_references import TOKENS, VOCAB, gradients, inputs, one

from trainer.learning import fused, liger
from trainer.learning.fused import fused_loss
from trainer.learning.liger import check_liger
from trainer.learning.losses import LossMix
from trainer.recipe.loss import LossSection

# fmt: off
ARGUMENTS = {
    "X_ptr", "X_stride", "Y_ptr", "Y_stride", "weight_ptr", "loss_ptr", "z_loss_ptr", "loss_stride",
    "token_accuracy_ptr", "token_accuracy_stride", "predicted_tokens_ptr", "predicted_tokens_stride", "n_cols",
    "n_non_ignore", "sum_non_ignore_weight", "weight_sum", "ignore_index", "lse_square_scale", "label_smoothing",
    "reduction", "softcap", "RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS", "BLOCK_SIZE",
    "HAS_WEIGHT", "HAS_SOFTCAPPING", "HAS_GRADIENTS", "num_warps",
}
# fmt: on
"""Of liger_cross_entropy_kernel in liger-kernel 0.8.5, and of its launch."""


class Twin:
    """The kernel as its source says: a program per row, which overwrites the row's logits."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, programs: int, **given: Any) -> None:
        assert given.keys() == ARGUMENTS and given["reduction"] == "sum" and given["n_cols"] <= given["BLOCK_SIZE"]
        logits, labels = given["X_ptr"], given["Y_ptr"]
        assert (logits.stride(0), labels.stride(0)) == (given["X_stride"], given["Y_stride"])
        for row in range(programs):
            label = int(labels[row])
            if label == given["ignore_index"]:
                logits[row] = 0
                given["predicted_tokens_ptr"][row] = -1
                continue
            with torch.enable_grad():
                products = logits[row].float().requires_grad_()
                cap = given["softcap"]
                scores = cap * (products / cap).tanh() if given["HAS_SOFTCAPPING"] else products
                loss = -scores.log_softmax(-1)[label]
            given["predicted_tokens_ptr"][row] = scores.argmax()
            given["loss_ptr"][row] = loss.detach()
            logits[row] = torch.autograd.grad(loss, products)[0]


needs_interpreter = pytest.mark.skipif(
    find_spec("liger_kernel") is None or find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs liger-kernel, triton and TRITON_INTERPRET=1",
)


@pytest.fixture(params=["twin", pytest.param("interpreted", marks=needs_interpreter)])
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The kernel's twin, or the kernel itself by Triton's interpreter."""
    if request.param == "twin":
        monkeypatch.setattr(liger, "_kernel", lambda: (Twin(), 32_768))
    monkeypatch.setattr(fused, "check_liger", lambda device: None)
    return str(request.param)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [None, [6, 0, 3, 4]])  # labels that no row writes are left out
def test_around_ligers_kernel_losses_gradients_and_hits_are_the_fused_losss(
    kernel: str, soft_cap: float | None, factor: float, weighted: bool, tokens: list[int] | None
) -> None:
    if kernel == "interpreted" and soft_cap is not None:
        pytest.skip("the interpreter hands the cap to the kernel as Python's float, which has no dtype")
    hidden, weight, labels = inputs(torch.float32, outputs=VOCAB if tokens is None else len(tokens))
    options: dict[str, Any] = {"soft_cap": soft_cap, "chunk": 5}
    if tokens is not None:
        options["tokens"] = torch.tensor(tokens)
    if weighted:
        options["row_weights"] = torch.linspace(0, 2, TOKENS)
    theirs, ours = (
        fused_loss(hidden, weight, labels, LossMix({"cross_entropy": factor}, backend=backend), **options)
        for backend in ("torch", "liger")
    )
    assert ours.correct == theirs.correct and ours.accepted == 0
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-5)
    for mine, expected in zip(*(gradients(each.loss, hidden, weight) for each in (ours, theirs)), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_no_tokens_launch_no_kernel() -> None:
    hidden, weight, labels = inputs(torch.float32)
    found = fused_loss(hidden[:0], weight, labels[:0], LossMix({"cross_entropy": 1.0}, backend="liger"))
    assert found.loss == 0 and found.correct == 0 and not gradients(found.loss, weight)[0].any()


def test_liger_without_a_gpu_or_uninstalled_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"liger, whose kernels run on a GPU, but this runs on cpu: use torch"):
        check_liger(torch.device("cpu"))
    with pytest.raises(ValueError, match="run on a GPU"):
        fused_loss(*inputs(), LossMix({"cross_entropy": 1.0}, backend="liger"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", None)
    with pytest.raises(ValueError, match=r"cannot be imported .*: pip install 'headstart\[liger\]', or use torch"):
        check_liger(torch.device("cuda"))


def test_liger_computes_a_cross_entropy_alone() -> None:
    section = LossSection(cross_entropy=1, hidden=0.5, backend="liger")
    assert LossMix.of(section).backend == "liger" and one("cross_entropy").backend == "torch"
    with pytest.raises(ValueError, match=r"computes cross_entropy and not forward_kl, jsd: set backend to torch"):
        LossSection(cross_entropy=1, forward_kl=0.5, jsd=1, backend="liger")
