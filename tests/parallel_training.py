"""A parallel draft's objective on tiny models, and its loss by one plain forward for each anchor."""

from typing import Any

import torch
from loss_references import divergence
from tiny_training import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import added_to_embeddings
from decoding.model.parallel import ParallelParts
from trainer.data.batch import Batch, Example
from trainer.drafts.blocks import Blocks, sample_blocks
from trainer.drafts.distill import OnlineTeacher
from trainer.drafts.parallel import ParallelObjective
from trainer.drafts.start import initial_draft
from trainer.recipe.draft import DraftSection

TEXTS = (
    Example((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (False,) * 4 + (True,) * 6, 4),
    Example((2, 7, 1, 8, 2, 8), (True,) * 6, 0),
)
"""Positions 3 to 8 of the first text predict its answer, 0 to 4 of the second all but its first token: 11 labels."""
TURNS = Example((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (False, False, True, True, True, False, True, True, True, True), 2)
"""Token 5 is no answer's."""


def objective_for(model: PreTrainedModel, loss: dict[str, float] | None = None, **parallel: Any) -> ParallelObjective:
    """A draft of a tiny target's first layer, its parts given random weights that no start would give them."""
    init = parallel.pop("init", {"from_target": {"layers": [0]}})
    vocabulary = parallel.pop("vocabulary", None)
    settings = {"tokens": 4, "markov_rank": 3, "anchors": 3, **parallel}
    content = {"init": init, "loss": loss or {"forward_kl": 1.0}, "parallel": settings, "vocabulary": vocabulary}
    section, target = DraftSection.model_validate(content), CausalLM(model)
    torch.manual_seed(3)
    initial = initial_draft(target, tiny_tokenizer(), section, TEXTS)
    assert initial.parts is not None
    with torch.no_grad():
        for parameter in initial.parts.parameters():
            parameter.normal_(std=0.3)
    return ParallelObjective(target, OnlineTeacher(target), tiny_tokenizer(), initial, section, seed=0)


def blocks_of(objective: ParallelObjective, batch: Batch, step: int = 0) -> Blocks:
    parallel = objective._section.parallel
    assert parallel is not None
    return sample_blocks(batch, parallel.anchors, parallel.tokens - 1, 0, step)


def drafted_logits(
    draft: PreTrainedModel, parts: ParallelParts, text: Tensor, states: Tensor | None, masks: int
) -> Tensor:
    """The logits behind a text (positions,) and at ``masks`` masks, by a forward that needs no mask of attention.

    ``states``: the target's, from which each token of the text was written; zeros for the first.
    """
    tokens = torch.cat((text, torch.full((masks,), parts.config.mask_token)))
    addition = None
    if states is not None:
        addition = torch.nn.functional.pad(parts.read(states), (0, 0, 0, masks))[None]
    with added_to_embeddings(draft, addition):
        logits: Tensor = draft(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def target_of(model: PreTrainedModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits at every position of a text, and the state that each token was written from."""
    with torch.no_grad():
        output = model(input_ids=text[None], use_cache=False, output_hidden_states=True)
    states = output.hidden_states[-1][0]
    return output.logits[0], torch.cat((torch.zeros_like(states[:1]), states[:-1]))


def reference_terms(
    objective: ParallelObjective, target: PreTrainedModel, examples: tuple[Example, ...], batch: Batch, kind: Any
) -> tuple[Tensor, Tensor]:
    """Σ divergence at the text's positions and at the masks: one plain forward for each text and for each anchor."""
    blocks, draft, parts = blocks_of(objective, batch), objective.module.draft, objective.module.parts
    assert parts is not None
    outputs = objective.output_tokens
    terms = []
    for own in (True, False):
        total = torch.zeros((), dtype=torch.float64)
        for row, example in enumerate(examples):
            text = torch.tensor(example.tokens.tolist())
            wanted, states = target_of(target, text)
            anchors = [len(text) - 1] if own else blocks.anchors[row][blocks.given[row]].tolist()
            for anchor in anchors:
                masks = 0 if own else parts.config.tokens - 1
                given = states[: anchor + 1] if parts.reader is not None else None
                logits = drafted_logits(draft, parts, text[: anchor + 1], given, masks)
                for place in range(anchor) if own else range(anchor + 1, anchor + 1 + masks):
                    if place + 1 >= len(text) or not example.trained[place + 1]:
                        continue
                    bias = 0 if parts.markov is None else parts.markov(text[place])
                    q = (logits[place] + bias)[None]
                    q = q if outputs is not None else q[:, : wanted.shape[1]]
                    total = total + divergence(q, wanted[place][None], kind, tokens=outputs)
        terms.append(total)
    return terms[0], terms[1]
