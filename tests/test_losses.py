"""The chunked losses against the plain formulas, gradients included."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from trainer.losses import Divergence, acceptance_rate, chunked_divergence, divergence, linear_cross_entropy

KINDS: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd", "tvd")
TOKENS, HIDDEN, VOCAB = 13, 5, 7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 13, 14, 1024])
def test_linear_cross_entropy_is_the_cross_entropy_of_a_linear_layer(chunk: int) -> None:
    hidden, weight, labels = inputs()
    reference = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk)
    assert torch.allclose(loss, reference, rtol=0, atol=1e-10)
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(reference, hidden, weight), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


def test_linear_cross_entropy_scales_its_gradients_with_the_one_from_above() -> None:
    hidden, weight, labels = inputs()
    loss, _ = linear_cross_entropy(hidden, weight, labels, 4)
    once = gradients(loss, hidden, weight)
    loss, _ = linear_cross_entropy(hidden, weight, labels, 4)
    for scaled, plain in zip(gradients(-0.3 * loss, hidden, weight), once, strict=True):
        assert torch.allclose(scaled, -0.3 * plain, rtol=1e-12, atol=0)


def test_linear_cross_entropy_passes_gradcheck() -> None:
    hidden, weight, labels = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, 3)[0], (hidden, weight))


def test_linear_cross_entropy_by_hand() -> None:
    """Logits (ln 3, 0): the probabilities are 3/4 and 1/4, the losses ln(4/3) and ln 4."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    loss, correct = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4)) and correct.item() == 1


def test_correct_counts_the_argmaxes_that_are_right() -> None:
    hidden, weight, labels = inputs()
    best = (hidden @ weight.T).argmax(-1)
    labels = torch.where(torch.arange(TOKENS) < 9, best, (best + 1) % VOCAB)
    for chunk in (2, 13):
        _, correct = linear_cross_entropy(hidden, weight, labels, chunk)
        assert correct.item() == 9 and not correct.requires_grad


def test_no_tokens_cost_nothing_and_can_be_differentiated() -> None:
    hidden, weight, labels = inputs()
    loss, correct = linear_cross_entropy(hidden[:0], weight, labels[:0])
    assert loss.item() == 0 and correct.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_under_autocast_products_run_in_bf16_and_come_out_close_to_fp32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    exact, _ = linear_cross_entropy(hidden, weight, labels, 4)
    exact_gradients = gradients(exact, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, labels, 4)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-2)
    assert loss.item() != exact.item()  # bf16 it was
    for ours, theirs in zip(gradients(loss, hidden, weight), exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


# Two tokens whose distributions can be told by hand, and one on which both agree.
P = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.1, 0.9]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)


def test_divergences_by_hand() -> None:
    ln = math.log
    forward = 0.5 * ln(2) + 0.5 * ln(2 / 3) + 0.75 * ln(1.5) + 0.25 * ln(0.5)
    reverse = 0.25 * ln(0.5) + 0.75 * ln(1.5) + 0.5 * ln(2 / 3) + 0.5 * ln(2)
    # Midpoints (3/8, 5/8) and (5/8, 3/8): the second token is the first one turned round, with p and q exchanged.
    to_middle = 0.5 * ln(4 / 3) + 0.5 * ln(4 / 5), 0.25 * ln(2 / 3) + 0.75 * ln(6 / 5)
    expected = {"forward_kl": forward, "reverse_kl": reverse, "jsd": sum(to_middle), "tvd": 0.25 + 0.25}
    for kind in KINDS:
        assert divergence(Q.log(), P.log(), kind).item() == pytest.approx(expected[kind], abs=1e-12)
    assert acceptance_rate(Q.log(), P.log()).item() == pytest.approx(3 - 0.5)


def test_a_temperature_divides_both_sides_logits() -> None:
    draft, target = torch.randn(2, 4, VOCAB, dtype=torch.float64)
    for kind in KINDS:
        assert torch.equal(divergence(draft, target, kind, 2.0), divergence(draft / 2, target / 2, kind))


SEEDS = st.integers(0, 2**31)


@given(SEEDS, st.floats(0.01, 20.0))
def test_divergences_are_positive_and_zero_only_between_equals(seed: int, spread: float) -> None:
    draft, target = torch.randn(2, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread
    for kind in KINDS:
        assert divergence(draft, target, kind) > 0
        # Logits matter up to a constant only.
        assert divergence(target + 3.0, target, kind).item() == pytest.approx(0, abs=1e-12)


@given(SEEDS)
def test_jsd_and_tvd_are_symmetric_and_the_kls_are_each_others_mirror(seed: int) -> None:
    draft, target = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    for kind in ("jsd", "tvd"):
        assert divergence(draft, target, kind).item() == pytest.approx(divergence(target, draft, kind).item())
    assert torch.equal(divergence(draft, target, "forward_kl"), divergence(target, draft, "reverse_kl"))


@given(SEEDS)
def test_tvd_is_one_minus_the_acceptance_of_token_rejection(seed: int) -> None:
    draft, target = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed)) * 3
    minimum = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum()
    assert divergence(draft, target, "tvd").item() == pytest.approx(4 - minimum.item(), abs=1e-5)
    assert acceptance_rate(draft, target).item() == pytest.approx(minimum.item(), abs=1e-6)


@given(SEEDS)
def test_jsd_is_at_most_ln_2_and_tvd_at_most_1(seed: int) -> None:
    draft, target = torch.randn(2, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 100
    assert divergence(draft, target, "jsd") <= math.log(2) + 1e-12
    assert divergence(draft, target, "tvd") <= 1 + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 1024])
def test_chunks_change_neither_a_divergence_nor_its_gradient(kind: Divergence, chunk: int) -> None:
    draft = torch.randn(8, VOCAB, dtype=torch.float64, requires_grad=True)
    target = torch.randn(8, VOCAB, dtype=torch.float64)
    whole = divergence(draft, target, kind, 1.5)
    chunked = chunked_divergence(draft, target, kind, 1.5, chunk)
    assert torch.allclose(chunked, whole, rtol=1e-12)
    assert torch.allclose(*gradients(chunked, draft), *gradients(whole, draft), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_pass_gradcheck(kind: Divergence) -> None:
    draft = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: divergence(logits, target, kind), (draft,))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_compared_in_fp32(kind: Divergence) -> None:
    draft, target = torch.randn(2, 6, VOCAB).bfloat16()
    ours = divergence(draft, target, kind)
    assert ours.dtype == torch.float32 and torch.equal(ours, divergence(draft.float(), target.float(), kind))
    assert chunked_divergence(draft, target, kind, chunk=4).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_logits_far_apart_stay_finite(kind: Divergence) -> None:
    draft = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = divergence(draft, torch.tensor([[-1e4, 0.0, 1e4]]), kind)
    assert loss.isfinite() and gradients(loss, draft)[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_labelled_token_is_no_loss_and_can_be_differentiated(kind: Divergence) -> None:
    draft = torch.randn(0, VOCAB, requires_grad=True)
    loss = chunked_divergence(draft, torch.randn(0, VOCAB), kind)
    assert loss.item() == 0 and gradients(loss, draft)[0].shape == (0, VOCAB)
