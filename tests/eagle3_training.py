"""The objective of an EAGLE-3 draft on tiny models."""

from typing import Any

import torch
from dspark_training import TEXTS
from tiny_training import tiny_tokenizer
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from trainer.drafts.eagle3_training import Eagle3Objective, initial_eagle3
from trainer.recipe.draft import DraftSection
from trainer.target.loading import OnlineTarget


def eagle3_section(
    loss: dict[str, float] | None = None, init: Any = None, vocabulary: int | None = None, **eagle3: Any
) -> DraftSection:
    settings = {"steps": 4, "anchors": 3, "taps": (0,), **eagle3}
    return DraftSection.model_validate(
        {"loss": loss or {"forward_kl": 1.0}, "init": init or {}, "vocabulary": vocabulary, "eagle3": settings}
    )


def eagle3_for(model: PreTrainedModel, states: OnlineTarget | None = None, **section: Any) -> Eagle3Objective:
    """Make the objective of a draft with random weights in the places where a new draft has ones and rows of the
    target.
    """
    parsed, target = eagle3_section(**section), CausalLM(model)
    torch.manual_seed(3)
    draft = initial_eagle3(target, tiny_tokenizer(), parsed, TEXTS)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(float("norm" in name), 0.3)
    return Eagle3Objective(target, draft, parsed, 0, states)
