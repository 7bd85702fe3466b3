"""Heads in training, moved away from their start, and all of their logits at once for plain formulas of losses."""

from typing import NamedTuple

import torch
from tiny_models import tiny_model
from tiny_training import medusa_on
from torch import Tensor
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example
from trainer.heads.medusa import MedusaObjective
from trainer.recipe.heads import HeadsSection

COUNTING = Example(tuple(i % 16 for i in range(20)), (True,) * 20, 0)


def disturb(objective: MedusaObjective, seed: int = 0) -> None:
    """Add noise to everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def disturbed(section: HeadsSection, dtype: torch.dtype = torch.float32, seed: int = 0) -> MedusaObjective:
    """The objective of such heads on a tiny Llama, the same target for every call."""
    objective = medusa_on(CausalLM(tiny_model("llama").to(dtype)), section)
    objective.module.to(dtype)
    disturb(objective, seed)
    return objective


class HeadLogits(NamedTuple):
    """One head's logits at its labels, the target's own there, and the labels."""

    logits: Tensor
    target: Tensor
    labels: Tensor


def all_logits(objective: MedusaObjective, batch: Batch) -> list[HeadLogits]:
    """Of every head on a batch of one row in which every token is trained."""
    (inputs,) = objective.inputs(batch, step=0)
    heads, tokens, found = objective.module.heads, batch.tokens[0], []
    assert len(batch.tokens) == 1 and bool(batch.trained.all())
    lm_head = objective._states.lm_head
    for k, head in enumerate(heads.heads):
        x = head.features(inputs.hidden[0, : -(k + 2)])
        logits = F.linear(x, lm_head if head.lm_head is None else head.lm_head.weight)
        if heads.markov is not None:
            logits = logits + heads.markov(tokens[k + 1 : -1])
        found.append(HeadLogits(logits, F.linear(inputs.hidden[0, k + 1 : -1], lm_head), tokens[k + 2 :]))
    return found


def assert_same_gradients(losses: Tensor, expected: Tensor, objective: MedusaObjective) -> None:
    """Those of a weighted sum of the losses with respect to everything that is trained."""
    trained = list(objective.module.parameters())
    weights = torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)
    assert torch.allclose(losses, expected, rtol=0, atol=1e-9)
    ours, theirs = (torch.autograd.grad((found * weights).sum(), trained) for found in (losses, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, right, rtol=0, atol=1e-9)
