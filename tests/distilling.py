"""A distillation objective on tiny models, and the loss that the readable formulas give for it."""

from typing import Any

import torch
from loss_references import divergence
from tiny_training import WORDS, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example
from trainer.drafts.distill import DistillObjective, OnlineTeacher
from trainer.drafts.start import initial_draft
from trainer.learning.losses import KnownLogits, SampledTailTeacher, Teacher
from trainer.learning.objective import TermSums
from trainer.recipe.draft import DraftSection

EXAMPLES = (Example((3, 1, 4, 1, 5, 9, 2, 6), (False,) * 4 + (True,) * 4, 4), Example((2, 7, 1, 8), (True,) * 4, 0))
"""Positions 3 to 6 of the first text predict its answer; positions 0 to 2 of the second text predict all but its first
token. Together these are 7 labels."""


def objective_for(model: PreTrainedModel, words: tuple[str, ...] = WORDS, **section: Any) -> DistillObjective:
    """Make the objective of a draft that is the first layer of a tiny target, unless the section says otherwise."""
    target, parsed, tokenizer = CausalLM(model), DraftSection.model_validate(section), tiny_tokenizer(words=words)
    initial = initial_draft(target, tokenizer, parsed, EXAMPLES)
    return DistillObjective(target, OnlineTeacher(target), tokenizer, initial, parsed)


def sums_of(objective: DistillObjective, batch: Batch) -> TermSums:
    """Run one forward pass without dropout; return the sums."""
    inputs = objective.inputs(batch, step=0)
    objective.module.eval()
    sums: TermSums = objective.module(*inputs)
    return sums


def labelled_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return a model's logits at the labelled positions, row by row."""
    logits: Tensor = model(**batch.model_inputs(), use_cache=False).logits
    return logits[batch.labelled(1)]


def expected_loss(draft: PreTrainedModel, target: PreTrainedModel, batch: Batch, weights: dict[Any, float]) -> Tensor:
    """Compute Σ weight · divergence between the logits of the two models by the readable formulas."""
    with torch.no_grad():
        wanted = labelled_logits(target, batch)
    own = labelled_logits(draft, batch)
    return torch.stack([weight * divergence(own, wanted, kind) for kind, weight in weights.items()]).sum()


class AllOnDisk:
    """A teacher that stores all logits as the best ones, so that nothing is left to sample."""

    def __init__(self, target: PreTrainedModel) -> None:
        self._target = target

    def read(self, batch: Batch) -> None:
        return None

    def for_batch(self, batch: Batch, places: object = None, stored: object = None) -> Teacher:
        with torch.no_grad():
            logits, tokens = labelled_logits(self._target, batch).sort(-1, descending=True)
        return SampledTailTeacher(KnownLogits(logits, tokens, logits.logsumexp(-1)))
