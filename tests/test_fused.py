"""The fused loss equals the plain formulas, including gradients."""

from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from loss_references import (
    HIDDEN,
    KINDS,
    MIXES,
    TOKENS,
    VOCAB,
    Anew,
    a_teacher,
    all_logits,
    assert_same,
    gradients,
    inputs,
    one,
    reference,
)
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.learning import fused
from trainer.learning.fused import Bias, fused_loss
from trainer.learning.losses import HiddenTeacher, KnownLogits, LabelGroups, LossMix, SampledTailTeacher
from trainer.recipe.common import Divergence, Term

CROSS_ENTROPY = one("cross_entropy")


@pytest.mark.parametrize("weights", MIXES, ids="+".join)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_a_fused_loss_is_the_plain_formula_and_so_are_its_gradients(
    weights: dict[Term, float], temperature: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 2 * VOCAB * 8)  # two rows: a chunk of 5 has three blocks
    hidden, weight, labels = inputs()
    teacher, target = a_teacher()
    mix = LossMix(weights, temperature)
    expected = reference(hidden @ weight.T, labels, mix, target)
    loss, _, correct, accepted = fused_loss(hidden, weight, labels, mix, teacher, chunk=chunk)
    assert correct.sum() == ((hidden @ weight.T).argmax(-1) == labels).sum()
    p, q = (target / temperature).softmax(-1), (hidden @ weight.T / temperature).softmax(-1)
    torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1), rtol=0, atol=1e-10, check_dtype=False)
    assert not accepted.requires_grad
    assert_same(loss, expected, hidden, weight)


def test_however_many_places_there_are_a_step_moves_two_objects() -> None:
    """`trainer.run.loop` visits every object of a micro batch three times; in a tuple of numbers each number is an
    object.
    """
    assert len(tree_leaves(LabelGroups.of(torch.arange(TOKENS)))) == 2 + 2, "order and positions, then the groups"


@pytest.mark.parametrize("weights", MIXES, ids="+".join)
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("positions", [range(TOKENS), [4, 0, 4, 9, 0, 4, 2, 2, 4, 5, 4, 4, 4]])
def test_rows_that_predict_the_same_token_share_its_label_its_target_and_its_bias(
    weights: dict[Term, float], chunk: int | None, positions: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven rows predict position 4, which is more than a chunk or a block of two.

    The losses of the rows have weights.
    """
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 2 * VOCAB * 8)
    hidden, weight, labels = inputs()
    bias = Bias(
        torch.randn(TOKENS, 2, dtype=hidden.dtype, requires_grad=True),
        torch.randn(VOCAB, 2, dtype=hidden.dtype, requires_grad=True),
    )
    teacher, target = a_teacher()
    of_rows, row_weights = torch.tensor(positions), torch.linspace(0.5, 2, TOKENS, dtype=hidden.dtype)
    logits = hidden @ weight.T + (bias.hidden @ bias.weight.T)[of_rows]
    each = [(logits[i : i + 1], labels[at : at + 1], target[at : at + 1]) for i, at in enumerate(positions)]
    losses = torch.stack([reference(row, label, LossMix(weights), wanted) for row, label, wanted in each])
    order, distinct, groups = LabelGroups.of(of_rows)
    found = fused_loss(
        hidden[order],
        weight,
        labels[distinct],
        LossMix(weights),
        teacher._replace(hidden=teacher.hidden[distinct]),
        groups=groups,
        row_weights=row_weights[order],
        bias=Bias(bias.hidden[distinct], bias.weight),
        chunk=chunk,
    )
    torch.testing.assert_close(found.losses, losses[order].detach(), rtol=0, atol=1e-10)
    assert found.correct.tolist() == (logits.argmax(-1) == labels[of_rows])[order].tolist()
    assert_same(found.loss, losses @ row_weights, hidden, weight, *bias)


@pytest.mark.parametrize("weights", MIXES, ids="+".join)
@pytest.mark.parametrize("known", [[6, 0, 3, 4], [4, 5, 2, 1, 0, 3, 6]])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_a_draft_that_knows_some_tokens_and_caps_its_logits_is_compared_by_the_same_formula(
    weights: dict[Term, float], known: list[int], soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_BLOCK_BYTES", 2 * VOCAB * 8)
    hidden, weight, labels = inputs(outputs=len(known))
    tokens = torch.tensor(known)
    teacher, target = a_teacher()
    mix = LossMix(weights, 1.7)
    logits = hidden @ weight.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    expected = reference(logits, labels, mix, target, tokens)
    found = fused_loss(hidden, weight, labels, mix, teacher, tokens=tokens, soft_cap=soft_cap, chunk=5)
    assert_same(found.loss, expected, hidden, weight)
    assert found.correct.sum() == (tokens[logits.argmax(-1)] == labels).sum()


@pytest.mark.parametrize("term", get_args(Term))
def test_every_term_passes_gradcheck(term: Term) -> None:
    hidden, weight, labels = inputs()
    hidden, labels = hidden[:3], labels[:3]
    teacher, _ = a_teacher()
    mix = LossMix({term: 0.7}, 1.5)

    def loss_of(h: Tensor, w: Tensor) -> Tensor:
        return fused_loss(h, w, labels, mix, teacher, soft_cap=3.0, chunk=2).loss

    assert torch.autograd.gradcheck(lambda *given: Anew.apply(loss_of, *given), (hidden, weight))


def test_a_second_backward_of_one_graph_is_refused_and_never_scaled_twice() -> None:
    hidden, weight, labels = inputs()
    loss = fused_loss(hidden, weight, labels, CROSS_ENTROPY).loss
    torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_logits_far_apart_stay_finite(kind: Divergence) -> None:
    """First the draft has probability e^-20000 for the token of which the target is certain; then the roles are
    exchanged.
    """
    hidden = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]], requires_grad=True)
    weight, target_logits = torch.eye(3, requires_grad=True), torch.tensor([[-1e4, 0.0, 1e4]] * 2)
    loss = fused_loss(hidden, weight, torch.tensor([0, 0]), LossMix({kind: 9.0}), all_logits(target_logits)).loss
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


# --- what the fused loss computes and keeps ---------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Mode that records the size of the largest tensor that any operation creates, and counts matrix products."""

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
    """Return the best logits, and other logits as if they had been drawn."""
    best = logits.topk(kept + drawn)
    return SampledTailTeacher(KnownLogits(best.values, best.indices, logits.logsumexp(-1), drawn))


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
    assert watched.numbers == tokens * vocab  # the plain computation does exceed the bound


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
    assert loss.item() != exact.item()  # the loss was computed in bf16
    for ours, theirs in zip(gradients(loss, hidden, weight), exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()
