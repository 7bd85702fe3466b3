"""The server's greedy texts compared with the target's own plain decoding; near-ties told from another model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.proof.finding import Finding, ok, problem
from decoding.measure.proof.greedy import near_tie
from decoding.measure.proof.reference import Reference
from decoding.rules.tree import common_length
from trainer.servers.answers import Completion

TEXT = "the target's greedy text"


class Parting(NamedTuple):
    """The first token at which two texts differ.

    ``margin``: logits by which their token is below the target's best; if only their text is known, by which the
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
    answers: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
) -> Finding:
    """Compare greedy texts token by token. ``reference``: the target at temperature 1, with the ends of its texts."""
    rows = enumerate(zip(prompts, ours, answers, strict=True))
    found = (_parting(reference, index, prompt, text, answer, tokenizer) for index, (prompt, text, answer) in rows)
    partings = [parting for parting in found if parting is not None]
    dtype = reference.target.dtype
    near = near_tie(dtype)
    real = [each for each in partings if each.margin is None or each.margin > near]
    identical, ties = len(prompts) - len(partings), len(partings) - len(real)
    figures = {"texts": len(prompts), "equal": identical, "near_ties": ties}
    told = f"{identical} of {len(prompts)} greedy texts equal, {ties} part at a near-tie"
    if not real:
        return ok(TEXT, f"{told} (logits at most {near:g} apart, which rounding reverses)", **figures)
    # Texts of another model end elsewhere, too: an end is the cause only if nothing else parts.
    worst = max(real, key=lambda each: (not each.ended, math.inf if each.margin is None else each.margin))
    cause, remedy = _explained(worst, dtype)
    figures["partings"] = [parting._asdict() for parting in partings]  # type: ignore[assignment]
    return problem(TEXT, f"{told}, {len(real)} at more: {cause}", remedy, **figures)


def _parting(
    reference: Reference,
    index: int,
    prompt: Sequence[int],
    text: Sequence[int],
    answer: Completion,
    tokenizer: PreTrainedTokenizerBase,
) -> Parting | None:
    """Return where the server's text leaves ours; None for equal texts, and if only one of them is cut off."""
    eos = reference.eos_token_ids
    mine = _without_end(text, eos)
    given = _tokens_of(answer, mine, tokenizer)
    if given is None:
        return None
    theirs = _without_end(given, eos)
    at = common_length(mine, theirs)
    if at == len(mine) == len(theirs):
        behind = f"goes on behind it with {tokenizer.decode(given[at + 1 : at + 5])!r}"
        return Parting(index, at, "ends", behind, None, True) if len(given) > at + 1 else None
    cut = len(mine) == len(text) if at == len(mine) else at == len(theirs) and answer.finish_reason == "length"
    if cut:
        return None
    ended = at in (len(mine), len(theirs))
    shown = [
        "ends" if at == len(tokens) else f"goes on with {tokenizer.decode(tokens[at : at + 4])!r}"
        if ended
        else repr(tokenizer.decode([tokens[at]]))
        for tokens in (mine, theirs)
    ]  # fmt: skip
    known = answer.token_ids is not None or at == len(theirs)
    chosen = None if not known else theirs[at] if at < len(theirs) else eos[0] if eos else -1
    return Parting(index, at, shown[0], shown[1], _margin(reference, prompt, mine[:at], chosen), ended)


def _tokens_of(answer: Completion, mine: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
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


def _without_end(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Return the tokens up to the first that ends a text."""
    return list(tokens[: next((index for index, token in enumerate(tokens) if token in eos), len(tokens))])


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
    return (
        apart,
        "serve the very target that the speculator was trained for: the same revision, no other adapter or "
        "quantisation, no penalties in the server's generation config",
    )
