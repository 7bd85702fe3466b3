"""Teachers with the whole distribution of the target, with its best tokens,
or with these and a sample of the others.
"""

import itertools

import pytest
import torch
from loss_references import a_teacher, all_logits, divergence, gradients, inputs, one
from torch import Tensor

from trainer.learning.fused import fused_loss
from trainer.learning.losses import HiddenTeacher, KnownLogits, LossMix, SampledTailTeacher
from trainer.recipe.common import Divergence


def test_a_teachers_logits_go_through_what_its_model_does_after_the_lm_head() -> None:
    hidden, weight, labels = inputs()
    teacher, target_logits = a_teacher()
    assert isinstance(teacher, HiddenTeacher)
    capped = teacher._replace(transform=lambda logits: 2 * torch.tanh(logits / 2))
    loss = fused_loss(hidden, weight, labels, one("forward_kl"), capped, chunk=4).loss
    expected = divergence(hidden @ weight.T, 2 * torch.tanh(target_logits / 2), "forward_kl")
    assert torch.allclose(loss, expected, rtol=0, atol=1e-12)


# The best tokens, and a sample of the others.


def sampled(logits: Tensor, kept: int, tail: list[int], temperature: float = 1.0) -> SampledTailTeacher:
    """Return a teacher for the logits of one token: the best ones, and these others as if drawn."""
    tempered = logits / temperature
    best, drawn = tempered.topk(kept), torch.tensor([tail], dtype=torch.long)
    tokens = torch.cat((best.indices, drawn), 1)
    known = KnownLogits(tempered.gather(1, tokens), tokens, tempered.logsumexp(-1), len(tail))
    return SampledTailTeacher(known, temperature)


def expected_over_draws(
    hidden: Tensor, weight: Tensor, logits: Tensor, mix: LossMix, kept: int, drawn: int, tokens: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the means of loss, gradients and acceptance over every possible sample, weighted by its probability."""
    tempered = logits / mix.temperature
    p = tempered.softmax(-1)[0]
    others = sorted(set(range(len(p))) - set(tempered.topk(kept).indices[0].tolist()))
    p_tail = p / p[others].sum()
    total: tuple[Tensor, ...] | None = None
    for tail in itertools.product(others, repeat=drawn):
        teacher = sampled(logits, kept, list(tail), mix.temperature)
        found = fused_loss(hidden, weight, torch.tensor([others[0]]), mix, teacher, tokens=tokens)
        parts = (found.loss.detach(), *gradients(found.loss, hidden, weight), found.accepted)
        chance = p_tail[list(tail)].prod()
        total = tuple(chance * part + (0 if total is None else total[index]) for index, part in enumerate(parts))
    assert total is not None
    return total


@pytest.mark.parametrize("terms", [("forward_kl",), ("cross_entropy", "forward_kl")])
@pytest.mark.parametrize("drawn", [1, 2, 3])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("known", [None, [5, 0, 3, 1]])
def test_over_all_that_may_be_drawn_losses_and_gradients_are_those_of_the_whole_vocabulary(
    terms: tuple[Divergence, ...], drawn: int, temperature: float, known: list[int] | None
) -> None:
    """There are six tokens, of which two are kept: 4, 16 or 64 samples, including samples with repeats."""
    tokens = None if known is None else torch.tensor(known)
    hidden = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6 if known is None else 4, 3, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(1, 6, dtype=torch.float64) * 2
    mix = LossMix({term: 0.5 + index for index, term in enumerate(terms)}, temperature)
    loss, *slopes, accepted = expected_over_draws(hidden, weight, logits, mix, 2, drawn, tokens)
    label = min(set(range(6)) - set(logits.topk(2).indices[0].tolist()))
    whole = fused_loss(hidden, weight, torch.tensor([label]), mix, all_logits(logits), tokens=tokens)
    assert accepted.item() == pytest.approx(whole.accepted.item(), abs=1e-10)
    if known is None or "forward_kl" not in terms:  # its constant depends on how much of p is known
        assert loss.item() == pytest.approx(whole.loss.item(), abs=1e-10)
    for found, expected in zip(slopes, gradients(whole.loss, hidden, weight), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)
