"""The chunked losses against the plain formulas, gradients included."""

import math
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import losses
from trainer.losses import (
    Divergence,
    HiddenTeacher,
    Teacher,
    Term,
    TopKTeacher,
    acceptance_rate,
    chunked_divergence,
    divergence,
    fused_loss,
)

KINDS: tuple[Divergence, ...] = get_args(Divergence)
TOKENS, HIDDEN, VOCAB = 13, 5, 7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    return fused_loss(hidden, weight, labels, {"cross_entropy": 1.0}, chunk=chunk)


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 13, 14, 1024])
def test_fused_cross_entropy_is_the_cross_entropy_of_a_linear_layer(chunk: int) -> None:
    hidden, weight, labels = inputs()
    reference = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    loss, _ = fused_cross_entropy(hidden, weight, labels, chunk)
    assert torch.allclose(loss, reference, rtol=0, atol=1e-10)
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(reference, hidden, weight), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


def test_fused_cross_entropy_scales_its_gradients_with_the_one_from_above() -> None:
    hidden, weight, labels = inputs()
    loss, _ = fused_cross_entropy(hidden, weight, labels, 4)
    once = gradients(loss, hidden, weight)
    loss, _ = fused_cross_entropy(hidden, weight, labels, 4)
    for scaled, plain in zip(gradients(-0.3 * loss, hidden, weight), once, strict=True):
        assert torch.allclose(scaled, -0.3 * plain, rtol=1e-12, atol=0)


def test_fused_cross_entropy_passes_gradcheck() -> None:
    hidden, weight, labels = inputs()
    assert torch.autograd.gradcheck(lambda h, w: fused_cross_entropy(h, w, labels, 3)[0], (hidden, weight))


def test_fused_cross_entropy_by_hand() -> None:
    """Logits (ln 3, 0): the probabilities are 3/4 and 1/4, the losses ln(4/3) and ln 4."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    loss, correct = fused_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4)) and correct.item() == 1


def test_correct_counts_the_argmaxes_that_are_right() -> None:
    hidden, weight, labels = inputs()
    best = (hidden @ weight.T).argmax(-1)
    labels = torch.where(torch.arange(TOKENS) < 9, best, (best + 1) % VOCAB)
    for chunk in (2, 13):
        _, correct = fused_cross_entropy(hidden, weight, labels, chunk)
        assert correct.item() == 9 and not correct.requires_grad


def test_no_tokens_cost_nothing_and_can_be_differentiated() -> None:
    hidden, weight, labels = inputs()
    loss, correct = fused_cross_entropy(hidden[:0], weight, labels[:0])
    assert loss.item() == 0 and correct.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_under_autocast_products_run_in_bf16_and_come_out_close_to_fp32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    exact, _ = fused_cross_entropy(hidden, weight, labels, 4)
    exact_gradients = gradients(exact, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = fused_cross_entropy(hidden, weight, labels, 4)
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
    expected["acceptance"] = -2 * ln(0.75)
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
def test_jsd_tvd_and_acceptance_are_symmetric_and_the_kls_are_each_others_mirror(seed: int) -> None:
    draft, target = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    for kind in ("jsd", "tvd", "acceptance"):
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


@given(SEEDS)
def test_acceptance_is_minus_the_log_of_the_acceptance_rate(seed: int) -> None:
    draft, target = torch.randn(2, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    expected = -acceptance_rate(draft, target).log()
    assert divergence(draft, target, "acceptance").item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reverse_kl"])
def test_a_token_the_target_excludes_counts_as_one_of_probability_0(kind: Divergence) -> None:
    """p = (1/2, 1/2, 0) and q = (1/4, 1/4, 1/2): overlap 1/2, middle (3/8, 3/8, 1/4)."""
    draft, target = torch.tensor([[0.25, 0.25, 0.5]]).log(), torch.tensor([[0.5, 0.5, 0.0]]).log()
    ln = math.log
    jsd = (ln(4 / 3) + 0.5 * ln(2 / 3) + 0.5 * ln(2)) / 2
    expected = {"forward_kl": ln(2), "jsd": jsd, "tvd": 0.5, "acceptance": ln(2)}
    assert divergence(draft, target, kind).item() == pytest.approx(expected[kind], rel=1e-6)


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


# fused_loss: the same formulas, with the gradients in closed form.

TEACHERS = ("hidden", "top_k")
KEPT = 3


def a_teacher(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Teacher, Tensor]:
    """A teacher, and all of the logits it knows or knows the best of."""
    hidden, weight = torch.randn(TOKENS, HIDDEN + 1, dtype=dtype), torch.randn(VOCAB, HIDDEN + 1, dtype=dtype)
    logits = hidden @ weight.T
    return HiddenTeacher(hidden, weight) if kind == "hidden" else keep_best(logits, KEPT), logits


def keep_best(logits: Tensor, count: int) -> TopKTeacher:
    best = logits.topk(count)
    return TopKTeacher(best.indices, best.values, logits.logsumexp(-1))


def merged(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log probabilities of the tokens kept, and of all others together."""
    probabilities = logits.softmax(-1)
    kept = probabilities.gather(1, tokens)
    others = torch.ones_like(logits).scatter(1, tokens, 0.0)
    return torch.cat((kept, (probabilities * others).sum(-1, keepdim=True)), 1).log()


def reference(
    logits: Tensor,
    labels: Tensor,
    mix: Mapping[Term, float],
    teacher: Teacher,
    target_logits: Tensor,
    temperature: float,
) -> Tensor:
    """What `fused_loss` computes, of all logits and by autograd."""
    draft, target = logits / temperature, target_logits / temperature
    if isinstance(teacher, TopKTeacher):
        draft, target = merged(draft, teacher.tokens), merged(target, teacher.tokens)
    total = torch.zeros((), dtype=logits.dtype)
    for term, factor in mix.items():
        if term == "cross_entropy":
            total = total + factor * F.cross_entropy(logits, labels, reduction="sum")
        else:
            total = total + factor * divergence(draft, target, term)
    return total


MIXES: tuple[Mapping[Term, float], ...] = (
    *({kind: 1.0} for kind in KINDS),
    {"cross_entropy": 0.3, "forward_kl": 0.7},
    {"tvd": 2.0, "cross_entropy": -0.5, "jsd": 1.5, "acceptance": 0.1, "reverse_kl": 0.4, "forward_kl": 1.1},
)


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
@pytest.mark.parametrize(("kind", "temperature"), [("hidden", 1.0), ("hidden", 2.5), ("top_k", 1.0)])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, None])
def test_a_fused_loss_is_the_plain_formula_and_so_are_its_gradients(
    mix: Mapping[Term, float], kind: str, temperature: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 2 * VOCAB * 8)  # two rows: chunks of 5 are softmaxed in three blocks
    hidden, weight, labels = inputs()
    teacher, target_logits = a_teacher(kind)
    expected = reference(hidden @ weight.T, labels, mix, teacher, target_logits, temperature)
    loss, correct = fused_loss(hidden, weight, labels, mix, teacher, temperature, chunk)
    assert torch.allclose(loss, expected, rtol=0, atol=1e-10)
    assert correct == ((hidden @ weight.T).argmax(-1) == labels).sum()
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("term", get_args(Term))
@pytest.mark.parametrize(("kind", "temperature"), [("hidden", 1.5), ("top_k", 1.0)])
def test_every_term_passes_gradcheck(term: Term, kind: str, temperature: float) -> None:
    hidden, weight, labels = inputs()
    hidden, labels = hidden[:3], labels[:3]
    teacher, _ = a_teacher(kind)
    assert torch.autograd.gradcheck(
        lambda h, w: fused_loss(h, w, labels, {term: 0.7}, teacher, temperature, 2)[0], (hidden, weight)
    )


def test_against_a_teacher_that_excludes_all_tokens_but_one_forward_kl_and_acceptance_are_the_cross_entropy() -> None:
    hidden, weight, labels = inputs()
    one_hot = torch.full((TOKENS, VOCAB), -math.inf, dtype=torch.float64).scatter(1, labels[:, None], 0.0)
    teacher = HiddenTeacher(one_hot, torch.eye(VOCAB, dtype=torch.float64), lambda _: one_hot)
    hard, _ = fused_loss(hidden, weight, labels, {"cross_entropy": 1.0})
    expected = gradients(hard, hidden, weight)
    terms: tuple[Term, ...] = ("forward_kl", "acceptance")  # what is accepted is q of that token
    for term in terms:
        loss, _ = fused_loss(hidden, weight, labels, {term: 1.0}, teacher)
        assert loss.item() == pytest.approx(hard.item(), rel=1e-12)
        for ours, theirs in zip(gradients(loss, hidden, weight), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher_kind", TEACHERS)
def test_a_teacher_that_agrees_costs_nothing_and_pulls_nowhere(kind: Divergence, teacher_kind: str) -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        whole = HiddenTeacher(hidden.clone(), weight.clone())
        teacher = whole if teacher_kind == "hidden" else keep_best(hidden @ weight.T, KEPT)
    loss, _ = fused_loss(hidden, weight, labels, {kind: 1.0}, teacher)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    if kind not in ("tvd", "acceptance"):  # which have an edge there: rounding decides on which side of it they are
        assert all(gradient.abs().max() < 1e-12 for gradient in gradients(loss, hidden, weight))


def test_where_both_agree_exactly_the_edges_of_tvd_and_acceptance_pull_nowhere() -> None:
    """One token whose logits are (0, 0) on both sides, bit for bit."""
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.eye(2)
    teacher = HiddenTeacher(torch.zeros(1, 2), torch.eye(2))
    for kind in KINDS:
        loss, _ = fused_loss(hidden, weight, torch.tensor([0]), {kind: 1.0}, teacher)
        assert gradients(loss, hidden)[0].tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher_kind", TEACHERS)
def test_fused_logits_far_apart_stay_finite(kind: Divergence, teacher_kind: str) -> None:
    """The draft gives e^-20000 to what the target is sure of; then, as the target does, to the rest of the best."""
    hidden = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]], requires_grad=True)
    weight, target_logits = torch.eye(3, requires_grad=True), torch.tensor([[-1e4, 0.0, 1e4]] * 2)
    whole = HiddenTeacher(target_logits, torch.eye(3))
    teacher = whole if teacher_kind == "hidden" else keep_best(target_logits, 2)
    loss, _ = fused_loss(hidden, weight, torch.tensor([0, 0]), {kind: 1.0}, teacher)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


def test_acceptance_pulls_also_where_a_plain_quotient_would_be_0_by_0() -> None:
    """Logits (1000, 0) against (0, 1000): the overlap, 2 e^-1000, is 0 in fp32, its log is -1000 + ln 2."""
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    teacher = HiddenTeacher(torch.tensor([[0.0, 1000.0]]), torch.eye(2))
    loss, _ = fused_loss(hidden, torch.eye(2), torch.tensor([0]), {"acceptance": 1.0}, teacher)
    assert loss.item() == pytest.approx(1000 - math.log(2))
    assert gradients(loss, hidden)[0][0].tolist() == pytest.approx([0.5, -0.5], rel=1e-4)


def test_a_temperature_leaves_the_cross_entropy_alone() -> None:
    hidden, weight, labels = inputs()
    plain, _ = fused_loss(hidden, weight, labels, {"cross_entropy": 1.0})
    tempered, _ = fused_loss(hidden, weight, labels, {"cross_entropy": 1.0}, temperature=3.0)
    assert torch.equal(plain, tempered)


def test_a_teachers_logits_go_through_what_its_model_does_after_the_lm_head() -> None:
    hidden, weight, labels = inputs()
    teacher, target_logits = a_teacher("hidden")
    capped = HiddenTeacher(teacher.hidden, teacher.weight, lambda logits: 2 * torch.tanh(logits / 2))  # type: ignore[attr-defined]
    loss, _ = fused_loss(hidden, weight, labels, {"jsd": 1.0}, capped, chunk=4)
    expected = divergence(hidden @ weight.T, 2 * torch.tanh(target_logits / 2), "jsd")
    assert torch.allclose(loss, expected, rtol=0, atol=1e-12)


def test_the_best_two_of_four_tokens_by_hand() -> None:
    """p = (1/2, 1/4, 1/8, 1/8) and q = (1/4, 1/4, 1/4, 1/4): merged (1/2, 1/4, 1/4) and (1/4, 1/4, 1/2)."""
    log_p = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8]], dtype=torch.float64).log()
    hidden = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    teacher = keep_best(log_p + 5, 2)  # logits are known up to a constant, which the total knows too
    ln = math.log
    jsd = (0.5 * ln(4 / 3) + 0.25 * ln(2 / 3) + 0.25 * ln(2 / 3) + 0.5 * ln(4 / 3)) / 2
    expected = {
        "forward_kl": 0.5 * ln(2) - 0.25 * ln(2),
        "reverse_kl": 0.5 * ln(2) - 0.25 * ln(2),
        "jsd": jsd,
        "tvd": 0.25,
        "acceptance": -ln(0.75),
    }
    for kind in KINDS:
        loss, _ = fused_loss(hidden, torch.eye(4, dtype=torch.float64), torch.tensor([0]), {kind: 1.0}, teacher)
        assert loss.item() == pytest.approx(expected[kind], abs=1e-12)
    loss, _ = fused_loss(hidden, torch.eye(4, dtype=torch.float64), torch.tensor([0]), {"forward_kl": 1.0}, teacher)
    # q - p of each outcome; the rest's surplus of 1/4 is taken from both its tokens alike.
    assert gradients(loss, hidden)[0][0].tolist() == pytest.approx([-0.25, 0, 0.125, 0.125])


@given(SEEDS, st.integers(1, 5))
def test_what_the_best_tokens_show_is_at_most_the_whole_divergence(seed: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator) * 2
    eye, labels = torch.eye(6, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    for kind in KINDS:
        whole = divergence(draft, target, kind)
        shown, _ = fused_loss(draft, eye, labels, {kind: 1.0}, keep_best(target, kept))
        # All but one token are all tokens.
        assert shown <= whole + 1e-12 if kept < 5 else shown.item() == pytest.approx(whole.item(), abs=1e-9)


def test_a_teacher_sure_of_its_best_tokens_leaves_rounding_to_the_rest() -> None:
    """What is left of p is below fp32's resolution: reverse_kl must not become infinite for that."""
    target = torch.tensor([[40.0, 40.0, 0.0, 0.0]])
    hidden = torch.zeros(1, 4, requires_grad=True)
    loss, _ = fused_loss(hidden, torch.eye(4), torch.tensor([0]), {"reverse_kl": 1.0}, keep_best(target, 2))
    # KL((1/4, 1/4, 1/2) ‖ (1/2, 1/2, eps)): half of it at ln(1/2 / 2^-23)
    assert loss.item() == pytest.approx(-0.5 * math.log(2) + 0.5 * 22 * math.log(2), rel=1e-4)
    assert gradients(loss, hidden)[0].isfinite().all()


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
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return made


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("term", get_args(Term))
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(kind: str, term: Term) -> None:
    tokens, vocab, chunk = 60, 100, 8
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    target = torch.randn(tokens, HIDDEN)
    teacher = HiddenTeacher(target, weight.detach()) if kind == "hidden" else keep_best(target @ weight.detach().T, 4)
    with LargestTensor() as watched:
        loss, _ = fused_loss(hidden, weight, torch.randint(vocab, (tokens,)), {term: 1.0}, teacher, chunk=chunk)
        loss.backward()
    assert watched.numbers == chunk * vocab  # and hidden states and weight are smaller
    with LargestTensor() as watched:
        F.cross_entropy(hidden @ weight.T, torch.randint(vocab, (tokens,))).backward()
    assert watched.numbers == tokens * vocab  # the plain way is seen


def test_the_default_chunk_holds_a_set_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 3 * VOCAB * 8 + 5)
    hidden, weight, labels = inputs()
    with LargestTensor() as watched:
        fused_loss(hidden, weight, labels, {"cross_entropy": 1.0})
    assert watched.products == 3 * 5  # 13 tokens are five chunks of three, each one product forward and two backward


def test_a_frozen_weight_and_a_frozen_input_cost_no_product() -> None:
    hidden, weight, labels = inputs()
    for h, w, products in (
        (hidden, weight, 3),
        (hidden, weight.detach(), 2),
        (hidden.detach(), weight, 2),
        (hidden.detach(), weight.detach(), 1),
    ):
        with LargestTensor() as watched:
            loss, _ = fused_loss(h, w, labels, {"cross_entropy": 1.0})
        assert watched.products == products and loss.requires_grad == (products > 1)
    with LargestTensor() as watched, torch.no_grad():
        loss, _ = fused_loss(hidden, weight, labels, {"cross_entropy": 1.0})
    assert watched.products == 1 and not loss.requires_grad


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_no_tokens_cost_nothing_in_any_mix(kind: str, mix: Mapping[Term, float]) -> None:
    hidden, weight, labels = inputs()
    loss, correct = fused_loss(hidden[:0], weight, labels[:0], mix, a_teacher(kind)[0])
    assert loss.item() == 0 and correct.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_a_teacher_that_a_cross_entropy_does_not_ask_costs_no_product() -> None:
    hidden, weight, labels = inputs()
    with LargestTensor() as watched:
        fused_loss(hidden, weight, labels, {"cross_entropy": 1.0}, a_teacher("hidden")[0])
    assert watched.products == 1 + 3  # the first is the teacher's own logits, made by this test


def test_a_teacher_learns_nothing() -> None:
    hidden, weight, labels = inputs()
    teacher = HiddenTeacher(hidden, weight)
    loss, _ = fused_loss(hidden.detach(), (2 * weight).detach().requires_grad_(), labels, {"jsd": 1.0}, teacher)
    loss.backward()
    assert hidden.grad is None and weight.grad is None


@pytest.mark.parametrize("kind", TEACHERS)
def test_under_autocast_a_mix_runs_in_bf16_and_comes_out_close_to_fp32(kind: str) -> None:
    hidden, weight, labels = inputs(torch.float32)
    teacher, _ = a_teacher(kind, dtype=torch.float32)
    mix: Mapping[Term, float] = {"cross_entropy": 0.5, "forward_kl": 0.5, "jsd": 0.5}
    exact, _ = fused_loss(hidden, weight, labels, mix, teacher)
    exact_gradients = gradients(exact, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = fused_loss(hidden, weight, labels, mix, teacher)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-2)
    assert loss.item() != exact.item()
    for ours, theirs in zip(gradients(loss, hidden, weight), exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


def test_what_cannot_be_mixed_is_refused_with_the_remedy() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"mixed of \['hinge'\]: give one or more of cross_entropy, forward_kl"):
        fused_loss(hidden, weight, labels, {"hinge": 1.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="give one or more"):
        fused_loss(hidden, weight, labels, {})
    with pytest.raises(ValueError, match="cross_entropy, tvd, which needs a teacher"):
        fused_loss(hidden, weight, labels, {"cross_entropy": 1.0, "tvd": 1.0})
    teacher, _ = a_teacher("top_k")
    with pytest.raises(ValueError, match="temperature 2 but the best logits were stored with their total at 1: set"):
        fused_loss(hidden, weight, labels, {"tvd": 1.0}, teacher, temperature=2.0)
