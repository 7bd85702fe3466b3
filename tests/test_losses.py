"""The readable divergences, by hand and by their properties."""

import math

import pytest
import torch
from loss_references import KINDS, VOCAB, divergence, gradients
from torch import Tensor

from trainer.recipe.common import Divergence

# Two tokens whose distributions can be told by hand, and one on which both agree.
P = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.1, 0.9]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)


def two(seed: int, rows: int = 4, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """A draft's and a target's logits over five tokens."""
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, rows, 5, dtype=torch.float64, generator=generator) * spread
    return draft, target


def test_divergences_by_hand() -> None:
    ln = math.log
    forward = 0.5 * ln(2) + 0.5 * ln(2 / 3) + 0.75 * ln(1.5) + 0.25 * ln(0.5)
    reverse = 0.25 * ln(0.5) + 0.75 * ln(1.5) + 0.5 * ln(2 / 3) + 0.5 * ln(2)
    # Midpoints (3/8, 5/8) and (5/8, 3/8): the second token is the first one turned round, with p and q exchanged.
    to_middle = 0.5 * ln(4 / 3) + 0.5 * ln(4 / 5), 0.25 * ln(2 / 3) + 0.75 * ln(6 / 5)
    expected = {
        "forward_kl": forward,
        "reverse_kl": reverse,
        "jsd": sum(to_middle),
        "acceptance": -2 * ln(0.75),
    }
    for kind in KINDS:
        assert divergence(Q.log(), P.log(), kind).item() == pytest.approx(expected[kind], abs=1e-12)


def test_of_some_tokens_by_hand() -> None:
    """p = (1/2, 1/4, 1/4); the draft knows token 2, then token 0, and gives each 1/2."""
    target, tokens = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log(), torch.tensor([2, 0])
    draft = torch.zeros(1, 2, dtype=torch.float64)
    ln = math.log
    forward = 0.75 * (1 / 3 * ln(2 / 3) + 2 / 3 * ln(4 / 3))
    expected = {
        "forward_kl": forward,
        "reverse_kl": 0.5 * ln(2),
        # m = (1/2, 1/8, 3/8) over all three
        "jsd": (0.25 * ln(2) + 0.25 * ln(2 / 3)) / 2 + 0.5 * ln(4 / 3) / 2,
        "acceptance": -ln(0.75),
    }
    for kind in KINDS:
        assert divergence(draft, target, kind, tokens=tokens).item() == pytest.approx(expected[kind], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [None, [3, 0]])
def test_divergences_pass_gradcheck(kind: Divergence, tokens: list[int] | None) -> None:
    known = None if tokens is None else torch.tensor(tokens)
    draft = torch.randn(3, 4 if tokens is None else 2, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: divergence(logits, target, kind, tokens=known), (draft,))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reverse_kl"])
def test_a_token_the_target_excludes_counts_as_one_of_probability_0(kind: Divergence) -> None:
    """p = (1/2, 1/2, 0) and q = (1/4, 1/4, 1/2): overlap 1/2, middle (3/8, 3/8, 1/4)."""
    draft, target = torch.tensor([[0.25, 0.25, 0.5]]).log(), torch.tensor([[0.5, 0.5, 0.0]]).log()
    ln = math.log
    expected = {
        "forward_kl": ln(2),
        "jsd": (ln(4 / 3) + 0.5 * ln(2 / 3) + 0.5 * ln(2)) / 2,
        "acceptance": ln(2),
    }
    assert divergence(draft, target, kind).item() == pytest.approx(expected[kind], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_labelled_token_is_no_loss_and_can_be_differentiated(kind: Divergence) -> None:
    draft = torch.randn(0, VOCAB, requires_grad=True)
    loss = divergence(draft, torch.randn(0, VOCAB), kind)
    assert loss.item() == 0 and gradients(loss, draft)[0].shape == (0, VOCAB)
