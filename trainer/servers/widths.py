"""A server's own scores of its greedy texts in passes over one token and over several, without a draft.

A pass over several tokens may round differently from passes over one, most of all with quantised weights. Speculation
verifies its drafts in passes over several tokens, so its texts may leave those of plain decoding at near-ties. These
scores tell such differences from faults. Every request asks for one token, so nothing is drafted. The server's cache
holds all but the last ``width`` tokens of its prompt, so these are computed in one pass.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, judged, undecided
from decoding.measure.proof.greedy import near_tie
from decoding.measure.proof.reference import EngineText
from trainer.servers.answers import CompletionRequest
from trainer.servers.client import ServedModel

CHECK = "rounding or rule"
_BEST, _MOST_WALKS = 20, 16
"""Tokens whose scores are compared at a place, and differences of a text that are also scored at the other width."""
_MOST_ROUNDING = 4 * near_tie(torch.bfloat16)
"""A larger change of a gap by the width of a pass is a fault: rounding to 8 bits, as in bf16, cannot cause it."""
Scores = Mapping[int, float]
"""Log-probabilities of the best tokens by id."""


class Scorer(NamedTuple):
    """A server that scores texts. ``controls`` switch off its own sampling controls.

    ``forced`` is a token of whole characters: every request makes the server write it, because llama.cpp leaves out the
    scores of a token that ends inside a character.
    """

    served: ServedModel
    controls: Mapping[str, object]
    forced: int

    def scores(self, text: EngineText, last: int, width: int) -> dict[int, Scores]:
        """Return the scores of tokens by their place in the text (from 0), from passes over ``width`` tokens.

        The last pass scores place ``last``. The first pass after the prompt may be narrower; its scores are left out.
        Raises UserError if the server reports no scores, or computes more tokens than asked.
        """
        found, known = dict[int, Scores](), 0
        for place in (0, *range(last % width or width, last + 1, width)):
            controls = {**self.controls, "cache_prompt": place > 0, "logit_bias": {str(self.forced): 1000}}
            prompt = (*text.prompt, *text.tokens[:place])
            (answer,) = self.served.many([CompletionRequest(prompt, 1, logprobs=_BEST, controls=controls)])
            computed = len(prompt) - (answer.cached or 0)
            if not answer.likely:
                raise UserError("it reports no scores by token id")
            if place and computed != place - known:
                raise UserError(f"it computed {computed} tokens at a time, not {place - known}")
            if place - known == width:
                found[place] = answer.likely
            known = place
        return found


def rounding_or_rule(scorer: Scorer, texts: Sequence[EngineText], width: int, ends: Sequence[int]) -> Finding:
    """Score greedy texts one token at a time and ``width`` tokens at a time, and judge where they leave the first.

    A difference is a token that is not the best of its place in passes over one token. Rounding explains it if its gap
    to the best is not above the largest change of a gap between two tokens by the width of a pass, and that change is
    small enough for rounding. ``ends`` are the ids that end a text. The finding is open if the server cannot be asked.
    """
    gaps, changes, turned, places = list[float](), list[float](), 0, 0
    try:
        for text in texts:
            last = len(text.tokens) - 1
            single = scorer.scores(text, last, 1)
            places += len(single)
            differences = [at for at, scores in single.items() if _differs(text.tokens[at], _best(scores), ends)]
            gaps += [single[at][_best(single[at])] - single[at].get(text.tokens[at], -math.inf) for at in differences]
            for end in {last, *differences[:_MOST_WALKS]}:
                for at, scores in scorer.scores(text, end, width).items():
                    moved = [scores[token] - single[at][token] for token in scores.keys() & single[at].keys()]
                    changes.append(max(moved) - min(moved) if moved else math.inf)
                    turned += _best(scores) != _best(single[at])
    except UserError as error:
        return undecided(CHECK, f"the server does not score its texts without a draft, so this stays open: {error}")
    widest, most = max(gaps, default=0.0), max(changes, default=0.0)
    passed, equal = widest <= most <= _MOST_ROUNDING, places - len(gaps)
    found = f"without a draft, a token at a time, the server itself writes {equal:,} of these {places:,} tokens"
    if gaps:
        found += f"; the others are up to {widest:.3g} below its best"
    found += f"; {width} tokens at a time change gaps between its tokens by up to {most:.3g}, and its best token at "
    verdict = "the texts differ by rounding, not by the rule" if passed else "the rule, or its cache, is wrong"
    found += f"{turned} of {len(changes):,} places: {verdict}"
    figures = {"texts": len(texts), "places": places, "differences": len(gaps), "widest_gap": widest, "width": width}
    figures |= {"places_at_width": len(changes), "other_best_at_width": turned, "largest_change": most}
    return judged(CHECK, passed, found, **figures)


def explained(identity: Finding, evidence: Finding, quantised: bool) -> Finding:
    """Return the finding of `greedy_identity` as a note if rounding in the server explains its faults.

    ``evidence`` is the finding of `rounding_or_rule`, with what the width of a pass changes. For ``quantised`` weights
    a near-tie of bf16 is rounding too, because llama.cpp's kernels for them round activations to 8 bits.
    """
    rounding = max(evidence.figures.get("largest_change", 0.0), near_tie(torch.bfloat16) if quantised else 0.0)
    if evidence.status != "ok" or identity.figures["widest_fault"] > rounding:
        return identity
    told = f"{identity.found}; rounding in the server explains gaps of up to {rounding:.3g}"
    remedy = f"see '{CHECK}'; serve the weights in f32 to compare without rounding"
    return replace(identity, status="note", found=told, remedy=remedy)


def _differs(written: int, best: int, ends: Sequence[int]) -> bool:
    return written != best and not {written, best} <= set(ends)


def _best(scores: Scores) -> int:
    return max(scores, key=lambda token: scores[token])
