"""The server's greedy texts compared with the target's own plain decoding; near-ties told from another model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.proof.reference import Reference, near_tie
from trainer.servers.answers import Completed
from trainer.servers.finding import TEXT, Finding, equal


class Parting(NamedTuple):
    """The first token at which two texts differ.

    ``margin``: logits by which their token is below the target's best; where only their text is known, by which the
    second best is, which is the least it can be. None for a text that goes on behind its end. ``ended``: one of the
    texts ends there.
    """

    prompt: int
    position: int
    ours: str
    theirs: str
    margin: float | None
    ended: bool


def compare_texts(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    answers: Sequence[Completed],
    tokenizer: PreTrainedTokenizerBase,
) -> Finding:
    """Compare greedy texts token by token. ``reference``: the target at temperature 1, with the ends of its texts."""
    partings = [
        parting
        for place, (prompt, text, answer) in enumerate(zip(prompts, ours, answers, strict=True))
        if (parting := _parting(reference, place, prompt, text, answer, tokenizer)) is not None
    ]
    dtype = reference.target.dtype
    near = near_tie(dtype)
    real = [found for found in partings if found.margin is None or found.margin > near]
    counts = {
        "texts": len(prompts),
        "equal": len(prompts) - len(partings),
        "near_ties": len(partings) - len(real),
        "partings": [parting._asdict() for parting in partings],
    }
    told = f"{counts['equal']} of {len(prompts)} greedy texts equal, {counts['near_ties']} part at a near-tie"
    if not real:
        return equal(TEXT, f"{told} (logits at most {near:g} apart, which rounding reverses)", **counts)
    # Texts of another model end elsewhere, too: an end is the cause only where nothing else parts.
    worst = max(real, key=lambda found: (not found.ended, math.inf if found.margin is None else found.margin))
    found, remedy = _explained(worst, dtype)
    return Finding(TEXT, True, f"{told}, {len(real)} at more: {found}", remedy, counts)


def _parting(
    reference: Reference,
    place: int,
    prompt: Sequence[int],
    text: Sequence[int],
    answer: Completed,
    tokenizer: PreTrainedTokenizerBase,
) -> Parting | None:
    """Return where the server's text leaves ours; None for equal texts, and where only one of them is cut off."""
    eos = reference.eos_token_ids
    mine = _without_end(text, eos)
    given = _tokens_of(answer, mine, tokenizer)
    if given is None:
        return None
    theirs = _without_end(given, eos)
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    if at == len(mine) == len(theirs):
        behind = f"goes on behind it with {tokenizer.decode(given[at + 1 : at + 5])!r}"
        return Parting(place, at, "ends", behind, None, True) if len(given) > at + 1 else None
    if at == len(mine):
        cut, shown = len(mine) == len(text), ("ends", _goes_on(theirs, at, tokenizer))
    elif at == len(theirs):
        cut, shown = answer.finish_reason == "length", (_goes_on(mine, at, tokenizer), "ends")
    else:
        cut, shown = False, (repr(tokenizer.decode([mine[at]])), repr(tokenizer.decode([theirs[at]])))
    if cut:
        return None
    known = answer.token_ids is not None or at == len(theirs)
    chosen = None if not known else theirs[at] if at < len(theirs) else eos[0] if eos else -1
    margin = _margin(reference, prompt, mine[:at], chosen)
    return Parting(place, at, *shown, margin, at in (len(mine), len(theirs)))


def _tokens_of(answer: Completed, mine: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return the answer's tokens; of a text alone ours as far as they spell it, then those of its rest. None if equal.

    A text split anew by the tokenizer could part from ours before it differs.
    """
    if answer.token_ids is not None:
        return list(answer.token_ids)
    spelled = [str(tokenizer.decode(mine[:count], skip_special_tokens=True)) for count in range(len(mine) + 1)]
    if spelled[-1] == answer.text:
        return None
    same = max(count for count, text in enumerate(spelled) if answer.text.startswith(text))
    rest: list[int] = tokenizer(answer.text[len(spelled[same]) :], add_special_tokens=False)["input_ids"]
    return [*mine[:same], *rest]


def _goes_on(tokens: list[int], at: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"goes on with {tokenizer.decode(tokens[at : at + 4])!r}"


def _without_end(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Return the tokens up to the first that ends a text."""
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in eos), len(tokens))])


def _margin(reference: Reference, prompt: Sequence[int], text: Sequence[int], token: int | None) -> float:
    """Return how far a token's logit after the text is below the target's best; of the second best if it is None."""
    p = reference.after([(*prompt, *text)], len(prompt))[0]
    best, second = p.topk(2).values
    if token is None:
        return float(best.log() - second.log())
    ends = reference.eos_token_ids
    token = ends[0] if token in ends else token
    return float(best.log() - p[token].log()) if 0 <= token < len(p) else math.inf


def _explained(worst: Parting, dtype: torch.dtype) -> tuple[str, str]:
    """Return the parting that needs an explanation most, and what to do about it."""
    where = f"prompt {worst.prompt + 1}, token {worst.position + 1}"
    if worst.ended or worst.margin is None:
        return (
            f"{where}: the text here {worst.ours}, the server's {worst.theirs}",
            "give both the same end-of-text tokens: eos_token_id in the target's generation_config.json, no ignore_eos "
            "and no stop strings in the request",
        )
    apart = f"{where}: {worst.ours} here, {worst.theirs} on the server, {worst.margin:.3g} below the best logit here"
    if dtype == torch.float32 and worst.margin <= near_tie(torch.bfloat16):
        return (
            f"{apart}, as a dtype of fewer bits rounds",
            "load the target in the server's dtype (--dtype), or serve it in fp32 to compare",
        )
    return apart, _OTHER_MODEL


_OTHER_MODEL = (
    "serve the very target that the speculator was trained for: the same revision, no other adapter or quantisation, "
    "no penalties in the server's generation config"
)
