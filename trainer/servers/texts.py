"""Comparison of the server's greedy texts with the target: best token or near-tie, and the same end."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.proof.finding import Finding
from decoding.measure.proof.greedy import cut_at_ends, ends, greedy_identity, near_tie
from decoding.measure.proof.reference import EngineText, Reference
from decoding.prompts import encode_continuation
from trainer.servers.answers import Completion

TEXT = "the target's greedy text"
_OTHER_END = (
    "use the same end-of-text tokens on both sides: eos_token_id in the target's generation_config.json, and no "
    "ignore_eos or stop strings in requests"
)
_OTHER_DTYPE = "load the target in the server's dtype (--dtype), or serve it in fp32 to compare"
_OTHER_MODEL = (
    "serve exactly the target that the speculator was trained for: same revision, no other adapter or quantisation, "
    "no penalties in the server's generation config; 'headstart verify' tells whether a server only rounds differently"
)


def compare_texts(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    answers: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> Finding:
    """Compare greedy answers with the target token by token, given the same tokens before each.

    ``reference`` is the target at temperature 1, with its end-of-text tokens. ``ours`` are the target's greedy texts;
    they help to tokenize answers that came as text only.
    """
    eos = reference.eos_token_ids
    texts = [
        EngineText(tuple(prompt), tokens_of(answer, text, tokenizer, eos))
        for prompt, text, answer in zip(prompts, ours, answers, strict=True)
    ]
    identity = greedy_identity(reference, cut_at_ends(reference, texts, max_new_tokens))
    fault, dtype = identity.figures["first_fault"], reference.target.dtype
    if fault is not None:  # another model's texts also end elsewhere
        fp32 = dtype == torch.float32 and identity.figures["widest_fault"] <= near_tie(torch.bfloat16)
        remedy = _OTHER_DTYPE if fp32 else _OTHER_END if {fault["token"], fault["best"]} & set(eos) else _OTHER_MODEL
        return replace(identity, check=TEXT, remedy=remedy)
    rows = zip(texts, answers, strict=True)  # a server may also stop because its context is full
    whole = [text for text, answer in rows if answer.finish_reason != "length" or set(text.tokens) & set(eos)]
    ended = ends(reference, whole, max_new_tokens)
    if not ended.passed:
        return replace(ended, check=TEXT, remedy=_OTHER_END)
    return replace(identity, check=TEXT)


def tokens_of(
    answer: Completion, ours: Sequence[int], tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> tuple[int, ...]:
    """Return an answer's tokens, including the EOS that ended it even if the server omits it.

    If the answer is only text, use our tokens as far as they spell it, and tokenize only the rest: tokens of the whole
    text could differ from ours before the texts do.
    """
    found = list(answer.token_ids or ())
    if answer.token_ids is None:
        spelled = [str(tokenizer.decode(list(ours[:n]), skip_special_tokens=True)) for n in range(len(ours) + 1)]
        same = max(count for count, text in enumerate(spelled) if answer.text.startswith(text))
        rest = answer.text[len(spelled[same]) :]
        alone: list[int] = tokenizer(rest, add_special_tokens=False)["input_ids"]
        found = [*ours[:same], *(encode_continuation(rest, tokenizer) if same else alone)]
    return answer.with_end(found, eos)
