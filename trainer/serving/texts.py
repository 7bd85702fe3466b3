"""The server's greedy texts compared with the target's own plain decoding; near-ties told from another model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.proof.reference import near_tie
from decoding.model.causal_lm import CausalLM
from trainer.serving.client import Completed
from trainer.serving.finding import TEXT, Finding, equal


class Parting(NamedTuple):
    """The first token at which two texts differ. ``margin``: our token's logit minus theirs; None if theirs is unknown.

    ``ended``: one text ends there, which no near-tie explains.
    """

    prompt: int
    position: int
    ours: str
    theirs: str
    margin: float | None
    ended: bool


def compare_texts(
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    answers: Sequence[Completed],
    tokenizer: PreTrainedTokenizerBase,
    eos: Sequence[int],
) -> Finding:
    """Compare greedy texts token by token, an end of text left aside unless only one text has it."""
    partings = [
        parting
        for place, (prompt, text, answer) in enumerate(zip(prompts, ours, answers, strict=True))
        if (parting := _parting(target, place, prompt, text, answer, tokenizer, eos)) is not None
    ]
    near = near_tie(target.dtype)
    real = [found for found in partings if found.ended or found.margin is None or found.margin > near]
    counts = {
        "texts": len(prompts),
        "equal": len(prompts) - len(partings),
        "near_ties": len(partings) - len(real),
        "partings": [parting._asdict() for parting in partings],
    }
    told = f"{counts['equal']} of {len(prompts)} greedy texts equal, {counts['near_ties']} part at a near-tie"
    if not real:
        return equal(TEXT, f"{told} (logits at most {near:g} apart, which rounding reverses)", **counts)
    worst = max(real, key=lambda found: (found.ended, found.margin is None, found.margin or 0.0))
    found, remedy = _explained(worst, target.dtype)
    return Finding(TEXT, True, f"{told}, {len(real)} at more: {found}", remedy, counts)


def _parting(
    target: CausalLM,
    place: int,
    prompt: Sequence[int],
    text: Sequence[int],
    answer: Completed,
    tokenizer: PreTrainedTokenizerBase,
    eos: Sequence[int],
) -> Parting | None:
    """Return where the server's text leaves ours; None for equal texts."""
    mine = _without_end(text, eos)
    if answer.token_ids is None and tokenizer.decode(mine, skip_special_tokens=True) == answer.text:
        return None
    given = answer.token_ids
    if given is None:  # a text alone: its tokens by the local tokenizer, which may split it in another way
        read: list[int] = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        given = tuple(read)
    theirs = _without_end(given, eos)
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    if at == len(mine) == len(theirs):
        return None
    if at in (len(mine), len(theirs)):
        cut = len(mine) == len(text) if at == len(mine) else answer.finish_reason == "length"
        shown = (_rest(mine, at, tokenizer), _rest(theirs, at, tokenizer))
        return None if cut else Parting(place, at, *shown, None, True)
    known = answer.token_ids is not None or tokenizer.decode(theirs[:at]) == tokenizer.decode(mine[:at])
    margin = _margin(target, [*prompt, *mine[:at]], mine[at], theirs[at]) if known else None
    return Parting(place, at, repr(tokenizer.decode([mine[at]])), repr(tokenizer.decode([theirs[at]])), margin, False)


def _rest(tokens: Sequence[int], at: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"goes on with {tokenizer.decode(list(tokens[at : at + 4]))!r}" if at < len(tokens) else "ends"


def _without_end(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Return the tokens up to the first that ends a text."""
    return list(tokens[: next((place for place, token in enumerate(tokens) if token in eos), len(tokens))])


@torch.inference_mode()
def _margin(target: CausalLM, text: Sequence[int], ours: int, theirs: int) -> float:
    """Return the target's logit of our token minus that of theirs, after the text."""
    logits = target.prefill([list(text)], target.new_cache(len(text))).logits[0].float()
    return float(logits[ours] - logits[theirs]) if theirs < len(logits) else float(logits[ours])


def _explained(worst: Parting, dtype: torch.dtype) -> tuple[str, str]:
    """Return the parting that needs an explanation most, and what to do about it."""
    where = f"prompt {worst.prompt + 1}, token {worst.position + 1}"
    if worst.ended:
        return (
            f"{where}: the text here {worst.ours}, the server's {worst.theirs}",
            "give both the same end-of-text tokens: eos_token_id in the target's generation_config.json, no ignore_eos "
            "and no stop strings in the request",
        )
    if worst.margin is None:
        return f"{where}: {worst.ours} here, {worst.theirs} on the server", _OTHER_MODEL
    apart = f"{where}: {worst.ours} here, {worst.theirs} on the server, {worst.margin:.3g} below it by the logits here"
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
