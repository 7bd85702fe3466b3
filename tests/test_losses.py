"""The readable divergences, checked by hand and by their properties."""

import math

import pytest
import torch
from loss_references import KINDS, divergence

# Two tokens whose distributions can be computed by hand, and one on which both models agree.
P = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.1, 0.9]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)


def test_divergences_by_hand() -> None:
    ln = math.log
    forward = 0.5 * ln(2) + 0.5 * ln(2 / 3) + 0.75 * ln(1.5) + 0.25 * ln(0.5)
    expected = {"forward_kl": forward, "acceptance": -2 * ln(0.75), "total_variation": 0.25 + 0.25}
    for kind in KINDS:
        assert divergence(Q.log(), P.log(), kind).item() == pytest.approx(expected[kind], abs=1e-12)


def test_of_some_tokens_by_hand() -> None:
    """p = (1/2, 1/4, 1/4); the draft knows only tokens 2 and 0, in this order, with probability 1/2 each."""
    target, tokens = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log(), torch.tensor([2, 0])
    draft = torch.zeros(1, 2, dtype=torch.float64)
    ln = math.log
    forward = 0.75 * (1 / 3 * ln(2 / 3) + 2 / 3 * ln(4 / 3))
    expected = {"forward_kl": forward, "acceptance": -ln(0.75), "total_variation": 1 - 0.25 - 0.5}
    for kind in KINDS:
        assert divergence(draft, target, kind, tokens=tokens).item() == pytest.approx(expected[kind], abs=1e-12)
