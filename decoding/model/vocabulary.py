"""Drafts with a trimmed vocabulary: an lm_head for frequent tokens only (FR-Spec, 2502.14856).

Such a draft has q = 0 for every other token. Lossless rules allow this, so the target's output is unchanged.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import UserError
from decoding.files.folder import check_trimmed
from decoding.model.causal_lm import CausalLM


def most_frequent_tokens(
    texts: Iterable[Sequence[int]], count: int, vocab_size: int, always: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the ``count`` most frequent of ``vocab_size`` tokens in texts of token ids, in increasing order.

    Among equally frequent tokens the lowest ids come first. If the texts contain fewer different tokens, the lowest ids
    fill the rest: the usual tokenizers number tokens by their frequency in the tokenizer's own data. The tokens in
    ``always`` are chosen before all other tokens; they should include the EOS tokens.
    """
    if count < max(1, len(set(always))):
        raise UserError(f"count is {count}: use at least 1, and at least the {len(set(always))} tokens in always")
    seen, first = Counter(token for text in texts for token in text), set(always)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in first, -seen[token], token))
    return tuple(sorted(ranked[:count]))


def trimmed_vocabulary(model: PreTrainedModel, token_ids: Iterable[int]) -> CausalLM:
    """Make a draft that writes only ``token_ids``: a copy of the model without the other rows of its lm_head.

    The draft still reads every token. ``model`` is unchanged and shares all other weights with the draft.
    """
    tokens = sorted(token_ids)
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise UserError(f"the lm_head is a {type(lm_head).__name__}: trim a draft before quantising it")
    check_trimmed(tokens, lm_head.out_features)
    index = torch.tensor(tokens, device=lm_head.weight.device)
    weight, bias = lm_head.weight.detach()[index], None if lm_head.bias is None else lm_head.bias.detach()[index]
    return CausalLM(_with_lm_head(model, weight, bias), output_tokens=index)


def with_filled_vocabulary(draft: CausalLM) -> PreTrainedModel:
    """Return a trimmed draft with a full lm_head, for programs that do not support trimming.

    The lm_head row of a token that the draft cannot write is the mean of the draft's rows. So the logit of such a token
    is the mean of the draft's logits and never the largest, and greedy decoding writes the same tokens. All other
    weights are shared. The model of a draft that is not trimmed is returned unchanged.
    """
    model: PreTrainedModel = draft.model
    if (output_tokens := draft.output_tokens) is None:
        return model
    lm_head = model.get_output_embeddings()
    assert isinstance(lm_head, nn.Linear), "trimmed_vocabulary made it"

    def filled(rows: Tensor) -> Tensor:
        mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
        return mean.repeat(draft.vocab_size, *[1] * (rows.ndim - 1)).index_copy(0, output_tokens, rows)

    weight, bias = filled(lm_head.weight.detach()), None if lm_head.bias is None else filled(lm_head.bias.detach())
    return _with_lm_head(model, weight, bias)


def tokens_of(d2t: Int[Tensor, " outputs"]) -> Int[Tensor, " outputs"]:
    """Return the target's token for each output, in increasing order.

    ``d2t`` contains, for each output, the id of its token minus the number of the output, as in folders of speculators.
    """
    return torch.arange(len(d2t), device=d2t.device) + d2t


def d2t_of(tokens: Sequence[int]) -> Int[Tensor, " outputs"]:
    """Return the ``d2t``, on the CPU, for which `tokens_of` returns these tokens."""
    return torch.tensor(tokens) - torch.arange(len(tokens))


def check_d2t(d2t: Int[Tensor, " outputs"], vocab_size: int, folder: Path, remedy: str) -> None:
    """Raise UserError unless the tokens of ``d2t`` increase and are below ``vocab_size``."""
    tokens = tokens_of(d2t)
    if not bool((tokens.diff() > 0).all()) or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise UserError(f"d2t in {folder} does not map the outputs to increasing token ids of the target: {remedy}")


def over_vocabulary(
    logits: Float[Tensor, "*rows outputs"], output_tokens: Int[Tensor, " outputs"] | None, vocab_size: int
) -> Float[Tensor, "*rows vocab"]:
    """Map a draft's logits to the target's vocabulary of ``vocab_size`` tokens.

    Tokens that the draft cannot write get -inf; tokens that only the draft has are dropped. ``output_tokens``: the
    token id of each output; None if output i is token i.
    """
    if output_tokens is not None:
        whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return whole.index_copy_(-1, output_tokens, logits)
    missing = vocab_size - logits.shape[-1]
    return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]


def _with_lm_head(model: PreTrainedModel, weight: Tensor, bias: Tensor | None) -> PreTrainedModel:
    """Copy the model, with a frozen lm_head made from ``weight`` and ``bias``; all other weights are shared."""
    lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    lm_head.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        lm_head.bias = nn.Parameter(bias, requires_grad=False)
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}  # deepcopy's memo
    other: PreTrainedModel = copy.deepcopy(model, shared | {id(model.get_output_embeddings()): lm_head})
    other.config.tie_word_embeddings = False
    other.config.get_text_config(decoder=True).tie_word_embeddings = False
    return other
