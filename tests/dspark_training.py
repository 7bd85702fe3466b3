"""The objective of a DSpark draft on tiny models, and its losses computed by one plain forward pass for each anchor."""

from collections.abc import Callable
from typing import Any

import torch
from loss_references import divergence
from tiny_dspark import logits_after
from tiny_models import full_forward
from tiny_training import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, collate
from trainer.drafts.dspark_start import initial_dspark
from trainer.drafts.dspark_training import DSparkObjective
from trainer.recipe.draft import DraftSection
from trainer.target.loading import OnlineTarget

TEXTS = (
    Example((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (False,) * 4 + (True,) * 6, 4),
    Example((2, 7, 1, 8, 2, 8), (True,) * 6, 0),
)
"""Positions 3 to 8 of the first text predict its answer; positions 0 to 4 of the second text predict all but its first
token. Together these are 11 labels."""
TURNS = Example((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (False, False, True, True, True, False, True, True, True, True), 2)
"""Token 5 belongs to no answer."""
MASK = "l"
"""Token 15, which occurs in no text here."""


def section_of(
    loss: dict[str, float] | None = None,
    init: dict[str, Any] | None = None,
    vocabulary: int | None = None,
    **dspark: Any,
) -> DraftSection:
    sizes = {"layers": 1, "block_size": 4, "markov_rank": 3, "anchors": 3, "mask_token": MASK, "tree_nodes": 5}
    return DraftSection.model_validate(
        {"loss": loss or {"forward_kl": 1.0}, "init": init or {}, "vocabulary": vocabulary, "dspark": sizes | dspark}
    )


def objective_for(model: PreTrainedModel, states: OnlineTarget | None = None, **section: Any) -> DSparkObjective:
    """Make the objective of a draft with random weights in the places where a new draft has zeros and ones."""
    parsed, target = section_of(**section), CausalLM(model)
    torch.manual_seed(3)
    draft = initial_dspark(target, tiny_tokenizer(), parsed, TEXTS)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(float("norm" in name), 0.3)
    return DSparkObjective(target, tiny_tokenizer(), draft, parsed, 0, states)


def reference_terms(
    objective: Any, target: PreTrainedModel, kind: Any, logits_after: Callable[..., Tensor] = logits_after
) -> list[Tensor]:
    """Compute Σ divergence at each depth. The block of each anchor gets a separate forward pass, after only the text up
    to the anchor.
    """
    blocks, draft, model = objective.prefetch(collate(TEXTS), 0).blocks, objective.module.draft, CausalLM(target)
    terms = [torch.zeros((), dtype=torch.float64) for _ in objective.terms]
    for row, example in enumerate(TEXTS):
        text = example.tokens.tolist()
        wanted = full_forward(target, text).clone()
        for anchor in blocks.anchors[row][blocks.given[row]].tolist():
            for depth in range(len(terms)):
                place = anchor + depth
                if place + 1 >= len(text) or not example.trained[place + 1]:
                    break
                q = logits_after(draft, model, text[: anchor + 1], text[anchor + 1 : place + 1])
                terms[depth] = terms[depth] + divergence(q[None], wanted[place][None], kind)
    return terms
