"""Tests of greedy texts: every token is the target's best token or a near-tie, and texts end correctly."""

from collections.abc import Sequence
from typing import Any

import torch

from decoding.measure.figures import NEAR
from decoding.measure.proof.finding import Finding, judged
from decoding.measure.proof.reference import EngineText, Reference
from decoding.measure.records import Margin
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import common_length

IDENTITY = "greedy identity"


def near_tie(dtype: torch.dtype) -> float:
    """Return the largest gap between two logits that rounding can reverse."""
    return NEAR[str(dtype).removeprefix("torch.")]


def margin_of(target: CausalLM, prompt: Sequence[int], mine: Sequence[int], plain: Sequence[int]) -> Margin:
    """Return the gap between the target's logits of the two tokens at the first position where two greedy texts differ.

    In fp32 on a CPU all texts must be equal. In bf16 a pass over n tokens rounds differently from n passes over one
    token, so near-ties may be decided differently, but their gap is small. Returns "ended" if one text is a prefix of
    the other, which no near-tie explains, and None if the texts are equal.
    """
    if tuple(mine) == tuple(plain):
        return None
    at = common_length(mine, plain)
    if at == min(len(mine), len(plain)):
        return "ended"
    text = [*prompt, *plain[:at]]
    logits = target.prefill([text], target.new_cache(len(text))).logits[0].float()
    return abs(float(logits[mine[at]] - logits[plain[at]]))


def is_near_tie(margin: Margin, dtype: torch.dtype) -> bool:
    """Return True for equal texts, and for texts that first differ in a near-tie."""
    return margin is None or (isinstance(margin, float) and margin <= near_tie(dtype))


def greedy_identity(reference: Reference, texts: Sequence[EngineText]) -> Finding:
    """Compare each token of greedy texts with the target's argmax after the preceding tokens.

    If all tokens agree, the texts equal the texts of plain greedy decoding. After a near-tie, the comparison continues
    with the text that the engine wrote.
    """
    near = near_tie(reference.target.dtype)
    misses: list[dict[str, Any]] = [
        {
            "text": number,
            "position": index + 1,
            "token": text.tokens[index],
            "best": int(best[index]),
            "margin": float(margin[index]),
        }
        for number, (text, (margin, best)) in enumerate(zip(texts, reference.margins(texts), strict=True), start=1)
        for index in (margin > 0).nonzero().flatten().tolist()
    ]
    faults = [miss for miss in misses if miss["margin"] > near]
    ties = [miss["margin"] for miss in misses if miss["margin"] <= near]
    identical = len(texts) - len({miss["text"] for miss in misses})
    tokens = sum(len(text.tokens) for text in texts)
    sentence = f"{identical} of {len(texts)} texts equal the target's greedy texts ({tokens:,} tokens in total)"
    if ties:
        sentence += f"; {len(ties)} near-ties were decided differently, with gaps of up to {max(ties):.3g}"
    if faults:
        sentence += (
            "; {n} tokens are wrong. The first is {token} in text {text}, token {position}; there the target's best is "
            "{best}, whose logit is {margin:.3g} higher"
        ).format(n=len(faults), **faults[0])
    return judged(
        IDENTITY,
        not faults,
        sentence,
        texts=len(texts),
        tokens=tokens,
        identical=identical,
        near_ties=len(ties),
        faults=len(faults),
        faulty_texts=sorted({fault["text"] for fault in faults}),
        near_tie=near,
        first_divergence=misses[0] if misses else None,
        first_fault=faults[0] if faults else None,
        widest_fault=max((fault["margin"] for fault in faults), default=None),
    )


def end_of(text: EngineText, eos: Sequence[int], max_new_tokens: int) -> int:
    """Return the length that a text should have: up to its first EOS, at most ``max_new_tokens``."""
    ends = (index for index, token in enumerate(text.tokens, start=1) if token in eos)
    return min(next(ends, max_new_tokens), max_new_tokens)


def ends(reference: Reference, texts: Sequence[EngineText], max_new_tokens: int) -> Finding:
    """Check that each text stops exactly at its first EOS or at ``max_new_tokens``."""
    eos = reference.eos_token_ids
    lengths = [(len(text.tokens), end_of(text, eos, max_new_tokens)) for text in texts]
    behind, early = sum(length > end for length, end in lengths), sum(length < end for length, end in lengths)
    ended = sum(bool(text.tokens) and text.tokens[-1] in eos for text in texts)
    sentence = f"{ended} of {len(texts)} texts end with an EOS; the others end at {max_new_tokens} tokens"
    if behind or early:
        first = next(number for number, (length, end) in enumerate(lengths, start=1) if length != end)
        sentence = f"{behind} texts continue after their end and {early} end early; the first such text is text {first}"
    figures = {"texts": len(texts), "ended": ended, "behind_their_end": behind, "early": early}
    return judged("ends of texts", not behind and not early, sentence, **figures)


def cut_at_ends(reference: Reference, texts: Sequence[EngineText], max_new_tokens: int) -> list[EngineText]:
    """Cut off tokens after the ends of texts. There is nothing to compare such tokens with, and `ends` reports them."""
    eos = reference.eos_token_ids
    return [EngineText(text.prompt, text.tokens[: end_of(text, eos, max_new_tokens)]) for text in texts]
