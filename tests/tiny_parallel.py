"""A random parallel draft, and its distributions by plain forwards of whole texts, as reference."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import added_to_embeddings, input_embeddings, lm_head_input
from decoding.model.parallel import ParallelConfig, ParallelDraft, ParallelParts


def tiny_parallel_draft(
    target: CausalLM, tokens: int = 4, rank: int = 3, reads_target: bool = True, spread: float = 0.5, **changes: Any
) -> ParallelDraft:
    """Make a draft whose mask token is one more than the target knows; its parts are random, ``spread`` wide."""
    given = {"family": "llama", "vocab": target.vocab_size + 1, "seed": 1, **changes}
    model = CausalLM(tiny_model(**given))
    config = ParallelConfig(
        tokens=tokens,
        mask_token=model.vocab_size - 1,
        vocab_size=model.vocab_size,
        outputs=target.vocab_size,
        hidden_size=input_embeddings(model.model).embedding_dim,
        markov_rank=rank,
        target_hidden_size=target.hidden_size if reads_target else None,
    )
    torch.manual_seed(given["seed"])
    parts = ParallelParts(config).requires_grad_(False).eval()
    for parameter in parts.parameters():
        nn.init.normal_(parameter, std=spread)
    return ParallelDraft(model, parts)


def states_before(target: CausalLM, text: Sequence[int]) -> Tensor:
    """Return the target's state that each token of a text was written from, (tokens, hidden), zero for the first."""
    with torch.inference_mode():
        hidden = lm_head_input(target.model, {"input_ids": torch.tensor([list(text)])})[0]
    return torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])


@torch.inference_mode()
def masked_logits(draft: ParallelDraft, target: CausalLM, text: Sequence[int], masks: int) -> Tensor:
    """Return the draft's last logits of a plain forward of a text and masks, without bias, (outputs,)."""
    addition = None
    if draft.reads_target:
        read = draft.parts.read(states_before(target, text))
        addition = torch.cat([read, read.new_zeros(masks, read.shape[1])])[None]
    tokens = torch.tensor([[*text, *[draft.parts.config.mask_token] * masks]])
    with added_to_embeddings(draft.model.model, addition):
        logits: Tensor = draft.model.model(input_ids=tokens, use_cache=False).logits[0, -1]
    return logits[: draft.parts.config.outputs]


@torch.inference_mode()
def logits_after(draft: ParallelDraft, target: CausalLM, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the draft's logits after a text and a drafted path: as many masks as the path has tokens, and the bias."""
    logits = masked_logits(draft, target, text, len(path))
    if draft.parts.markov is None:
        return logits
    biased: Tensor = logits + draft.parts.markov(torch.tensor([*text, *path][-1]))
    return biased
