"""The server's greedy texts compared with the target: every token is its best, or a near-tie, and texts end as here."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.proof.finding import Finding
from decoding.measure.proof.greedy import cut_at_ends, ends, greedy_identity, near_tie
from decoding.measure.proof.reference import EngineText, Reference
from trainer.servers.answers import Completion

TEXT = "the target's greedy text"
_OTHER_END = (
    "give both the same end-of-text tokens: eos_token_id in the target's generation_config.json, no ignore_eos and no "
    "stop strings in the request"
)
_OTHER_DTYPE = "load the target in the server's dtype (--dtype), or serve it in fp32 to compare"
_OTHER_MODEL = (
    "serve the very target that the speculator was trained for: the same revision, no other adapter or quantisation, "
    "no penalties in the server's generation config"
)


def compare_texts(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    answers: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> Finding:
    """Compare greedy answers with the target token by token, given the very tokens before each.

    ``reference``: the target at temperature 1, with the ends of its texts. ``ours``: its own greedy texts, by which the
    tokens of an answer that is a text alone are told.
    """
    eos = reference.eos_token_ids
    texts = [
        EngineText(tuple(prompt), tokens_of(answer, text, tokenizer, eos))
        for prompt, text, answer in zip(prompts, ours, answers, strict=True)
    ]
    identity = greedy_identity(reference, cut_at_ends(reference, texts, max_new_tokens))
    fault, dtype = identity.figures["first_fault"], reference.target.dtype
    if fault is not None:  # texts of another model end elsewhere, too
        fp32 = dtype == torch.float32 and identity.figures["widest_fault"] <= near_tie(torch.bfloat16)
        remedy = _OTHER_DTYPE if fp32 else _OTHER_END if {fault["token"], fault["best"]} & set(eos) else _OTHER_MODEL
        return replace(identity, check=TEXT, remedy=remedy)
    rows = zip(texts, answers, strict=True)  # a server may also stop at the end of its context
    whole = [text for text, answer in rows if answer.finish_reason != "length" or set(text.tokens) & set(eos)]
    ended = ends(reference, whole, max_new_tokens)
    if not ended.passed:
        return replace(ended, check=TEXT, remedy=_OTHER_END)
    return replace(identity, check=TEXT)


def tokens_of(
    answer: Completion, ours: Sequence[int], tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> tuple[int, ...]:
    """Return an answer's tokens, with the EOS that ended it, which some servers leave out.

    Of a text alone, ours as far as they spell it, then those of its rest: a text split anew could part from ours before
    it differs.
    """
    found = list(answer.token_ids or ())
    if answer.token_ids is None:
        spelled = [str(tokenizer.decode(list(ours[:n]), skip_special_tokens=True)) for n in range(len(ours) + 1)]
        same = max(count for count, text in enumerate(spelled) if answer.text.startswith(text))
        rest: list[int] = tokenizer(answer.text[len(spelled[same]) :], add_special_tokens=False)["input_ids"]
        found = [*ours[:same], *rest]
    if answer.finish_reason == "stop" and eos and not set(found) & set(eos):
        found.append(eos[0])
    return tuple(found)
