"""The tokens that a drafter with a reduced vocabulary writes: the most frequent ones among its trained tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.model.vocabulary import most_frequent_tokens
from trainer.data.batch import Example
from trainer.processes import Process


def most_frequent_trained(
    count: int,
    known: int,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    setting: str = "draft.vocabulary",
) -> tuple[int, ...]:
    """Return the most frequent trained tokens below ``known``, and all tokens that end a text.

    ``setting`` is the recipe's name of ``count``, for messages.
    """
    if count > known:
        raise UserError(f"{setting} is {count} but target and drafter share {known} tokens: lower it")
    ends = {*eos_token_ids(target.model, tokenizer)}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    always = sorted(token for token in ends if token < known)
    if count < len(always):
        raise UserError(f"{setting} is {count} but {len(always)} tokens end texts: raise it above this number")
    texts = (predicted[predicted < known].tolist() for predicted in map(Example.predicted, examples))
    return most_frequent_tokens(texts, count, known, always)


def coverage(examples: Sequence[Example], tokens: Sequence[int] | Int[Tensor, " outputs"]) -> float:
    """Return the share (0 to 1) of trained tokens that are in ``tokens``; 1 if nothing is trained."""
    wanted = torch.as_tensor(tokens).cpu().numpy()
    found = [np.isin(example.predicted(), wanted) for example in examples]
    count = sum(map(len, found))
    return sum(int(each.sum()) for each in found) / count if count else 1.0


def say_coverage(
    process: Process, drafter: str, examples: Sequence[Example], tokens: Int[Tensor, " outputs"] | None
) -> None:
    """Print which share of the trained tokens a drafter can write, if its vocabulary is reduced."""
    if tokens is not None and process.is_first:
        share = coverage(examples, tokens)
        process.say(f"{drafter} can write {len(tokens):,} tokens: {share:.1%} of trained tokens")
