"""Greedy identity: every written token is the target's best, or tied with it; and texts end where they should."""

from collections.abc import Sequence
from typing import NamedTuple

from decoding.measure.proof.finding import Finding
from decoding.measure.proof.reference import Reference, Written, near_tie


class _Fault(NamedTuple):
    """A token that is not the target's best: text and position count from 1, ``margin`` is in logits."""

    text: int
    position: int
    token: int
    best: int
    margin: float

    def __str__(self) -> str:
        return (
            f"text {self.text}, token {self.position}: {self.token} was written and {self.best} is the target's best, "
            f"{self.margin:.3g} above it in logits"
        )


def greedy_identity(reference: Reference, texts: Sequence[Written]) -> Finding:
    """Compare each token of greedy texts with the target's argmax after the very tokens before it.

    If all are the argmax, the texts are those of plain greedy decoding. After a near-tie that fell the other way the
    rest of the text is still compared, with the best continuation of what was written.
    """
    near = near_tie(reference.target.dtype)
    misses = [
        _Fault(number, place + 1, text.tokens[place], int(best[place]), float(margin[place]))
        for number, (text, (margin, best)) in enumerate(zip(texts, reference.margins(texts), strict=True), start=1)
        for place in (margin > 0).nonzero().flatten().tolist()
    ]
    faults = [miss for miss in misses if miss.margin > near]
    ties = [miss for miss in misses if miss.margin <= near]
    identical = len(texts) - len({miss.text for miss in misses})
    tokens = sum(len(text.tokens) for text in texts)
    seen = f"{identical} of {len(texts)} texts are the target's greedy ones, {tokens:,} tokens"
    if ties:
        largest = max(miss.margin for miss in ties)
        seen += f"; {len(ties)} near-ties fell the other way, the widest {largest:.3g} apart"
    if faults:
        seen += f"; {len(faults)} tokens are faults, the first in {faults[0]}"
    first = misses[0]._asdict() if misses else None
    figures = {
        "texts": len(texts),
        "tokens": tokens,
        "identical": identical,
        "near_ties": len(ties),
        "faults": len(faults),
        "near_tie": near,
        "first_divergence": first,
        "first_fault": faults[0]._asdict() if faults else None,
    }
    return Finding("greedy identity", not faults, seen, figures=figures)


def ends(reference: Reference, texts: Sequence[Written], max_new_tokens: int) -> Finding:
    """Check that each text stops at its first EOS or at its greatest length, neither behind nor before them."""
    eos = frozenset(reference.eos_token_ids)
    behind, early = [], []
    for number, text in enumerate(texts, start=1):
        end = next((place for place, token in enumerate(text.tokens, start=1) if token in eos), max_new_tokens)
        if len(text.tokens) > min(end, max_new_tokens):
            behind.append(f"text {number} goes on for {len(text.tokens) - min(end, max_new_tokens)} tokens")
        elif len(text.tokens) < end:
            early.append(f"text {number} ends after {len(text.tokens)} tokens of {max_new_tokens} without an EOS")
    ended = sum(bool(text.tokens) and text.tokens[-1] in eos for text in texts)
    seen = f"{ended} of {len(texts)} texts end with an EOS, the others at {max_new_tokens} tokens"
    if behind or early:
        seen = f"{len(behind)} texts go on behind their end and {len(early)} end early: {(behind + early)[0]}"
    figures = {"texts": len(texts), "ended": ended, "behind_their_end": len(behind), "early": len(early)}
    return Finding("ends of texts", not behind and not early, seen, figures=figures)


def cut_at_ends(reference: Reference, texts: Sequence[Written], max_new_tokens: int) -> list[Written]:
    """Return the texts without tokens behind their end, which `ends` has reported: no distribution is theirs."""
    eos = frozenset(reference.eos_token_ids)
    found = []
    for text in texts:
        end = next((place for place, token in enumerate(text.tokens, start=1) if token in eos), max_new_tokens)
        found.append(Written(text.prompt, text.tokens[: min(end, max_new_tokens)]))
    return found
