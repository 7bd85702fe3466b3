"""Training of heads with a bias by the token before: which token it is, the gradients, and what is stored."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loss_references import divergence
from tiny_models import tiny_model
from tiny_training import Recorder, medusa_on, train_toy
from torch import Tensor
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from trainer.data.batch import Batch, Example, collate
from trainer.heads.medusa import MedusaObjective, heads_for_decoding
from trainer.recipe.common import LossSection
from trainer.recipe.heads import HeadsSection

HEADS = HeadsSection(num_heads=3, markov_rank=4)
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


def assert_same_gradients(objective: MedusaObjective, batch: Batch, expected: Tensor) -> None:
    """Those of a weighted sum of the losses with respect to everything that is trained."""
    trained = list(objective.module.parameters())
    weights = torch.linspace(0.5, 2, len(expected), dtype=expected.dtype)
    losses, _, total = objective.module(*objective.inputs(batch, step=0), weights)
    assert torch.allclose(losses, expected, rtol=0, atol=1e-9)
    ours, theirs = (torch.autograd.grad(loss, trained) for loss in (total, (expected * weights).sum()))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("term", ["cross_entropy", "forward_kl"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_losses_and_gradients_are_those_of_all_logits_at_once(rank: int, shared: bool, term: str) -> None:
    section = HeadsSection(num_heads=3, markov_rank=rank, shared_lm_head=shared, loss=LossSection(**{term: 1}))
    objective, batch = disturbed(section, torch.float64), collate([COUNTING])
    expected = [
        F.cross_entropy(logits, labels, reduction="sum")
        if term == "cross_entropy"
        else divergence(logits, target, "forward_kl")
        for logits, target, labels in all_logits(objective, batch)
    ]
    assert_same_gradients(objective, batch, torch.stack(expected))


def blind_model() -> Any:
    """A model whose embeddings are all alike."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight[:1].expand(16, -1).clone())
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_from_the_token_before_what_no_state_tells(tmp_path: Path, optimizer: str) -> None:
    """The target's states are those of one token throughout: heads alone can only guess, the bias can count."""
    found = []
    for rank in (0, 8):
        objective = medusa_on(CausalLM(blind_model()), HeadsSection(num_heads=2, markov_rank=rank))
        recorder, settings = Recorder(), {"steps": 80, "learning_rate": 5e-2, "checkpoint_every": 1000}
        texts = [Example(tuple((start + i) % 16 for i in range(20)), (True,) * 20, 0) for start in range(16)]
        train_toy(tmp_path / str(rank), objective, recorder, texts, optimizer=optimizer, **settings)
        found.append([recorder.figures[80][f"top1/head_{k}"] for k in range(2)])
    assert max(found[0]) < 0.3 and found[1] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "shared"), [(0, False), (4, False), (4, True)])
def test_saved_heads_reload_bit_equal(tmp_path: Path, rank: int, shared: bool, dtype: torch.dtype) -> None:
    section = HeadsSection(num_heads=3, markov_rank=rank, shared_lm_head=shared)
    objective = medusa_on(CausalLM(tiny_model("llama").to(dtype)), section)
    disturb(objective)
    objective.save(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    expected = heads_for_decoding(objective.module.heads, dtype)
    assert loaded.config.markov_rank == rank and loaded.config == expected.config
    ours, theirs = loaded.state_dict(), expected.state_dict()
    assert ("markov.output.weight" in ours) == bool(rank) and ours.keys() == theirs.keys()
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]) for name in ours)
