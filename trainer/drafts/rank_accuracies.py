"""Accuracies of a parallel draft's ranks on texts, to which its tree is fitted."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import TextStart
from decoding.drafters.draft_state import DraftState
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import lm_head_input
from decoding.model.parallel import ParallelDraft
from decoding.rules.best_tree import FITTED_RANKS
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig


@torch.inference_mode()
def rank_accuracies(
    target: CausalLM, draft: ParallelDraft, texts: Sequence[tuple[Sequence[int], int]]
) -> list[list[float]]:
    """Return at ``[d][r]`` the share of labels that are the draft's rank-r token d + 1 tokens behind a root (from 0).

    Every new token of ``texts``, pairs of tokens and prompt length, is a root once, as in decoding. The bias reads the
    text's own token before each label.
    """
    config = draft.parts.config
    ranks = min(FITTED_RANKS, config.outputs)
    counts, totals = torch.zeros(config.tokens, ranks), torch.zeros(config.tokens, 1)
    for tokens, prompt_length in texts:
        for begin, logits in enumerate(_over_text(target, draft, tokens, prompt_length), start=prompt_length + 1):
            labels = torch.tensor(tokens[begin : begin + config.tokens])
            hits = logits[: len(labels)].topk(ranks).indices.cpu() == labels[:, None]
            counts[: len(labels)] += hits
            totals[: len(labels)] += 1
    shares: list[list[float]] = (counts / totals.clamp(min=1)).tolist()
    return shares


def _over_text(
    target: CausalLM, draft: ParallelDraft, tokens: Sequence[int], prompt_length: int
) -> list[Float[Tensor, "depths vocab"]]:
    """Return the draft's logits behind every new token but the last, each as a root; one row for each label."""
    config, markov = draft.parts.config, draft.parts.markov
    state = DraftState(draft.model, target, SamplingConfig(), 1, len(tokens), config.tokens)
    state.admit(0, TextStart(prompt_length, GeneratorSource.from_seed(0, "draft")))
    added = _added(target, draft, tokens)
    found, read = [], 0
    for root in range(prompt_length, len(tokens) - 1):
        new = None if added is None else [added[read : root + 1]]
        read = root + 1
        logits = state.look_ahead([tokens[:read]], [config.mask_token] * (config.tokens - 1), new)[0]
        logits = logits[: len(tokens) - read, : config.outputs]
        if markov is not None:
            before = torch.tensor(tokens[root : root + len(logits)], device=logits.device)
            logits = markov.added_to(logits, before.clamp(max=config.vocab_size - 1))
        found.append(state.over_target_vocabulary(logits))
    return found


def _added(target: CausalLM, draft: ParallelDraft, tokens: Sequence[int]) -> Float[Tensor, "tokens width"] | None:
    """Return what the draft adds to the embeddings: the first token was written from no state, the others from one."""
    if not draft.reads_target:
        return None
    states = lm_head_input(target.model, {"input_ids": torch.tensor([list(tokens)], device=target.device)})[0]
    return draft.parts.read(torch.cat((torch.zeros_like(states[:1]), states[:-1])))
