"""Two comparisons. One compares the prompt that the server read with the prompt that the chat template renders here;
the other compares the server's greedy texts with the target.

In a correct text, every token is the target's best token or a near-tie with it, and the text ends where the target ends
it. A server can also score its greedy texts, without a draft, in passes over one token and in passes over several
tokens. A pass over several tokens may round differently from passes over one token, most of all with quantised weights.
Speculation verifies drafts in passes over several tokens, so its texts may depart from the texts of plain decoding at
near-ties. The scores distinguish such differences from faults. Every request asks for one token, so nothing is drafted.
The server's cache contains all but the last ``width`` tokens of the prompt, so these tokens are computed in one pass.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import Tools
from decoding.measure.proof.finding import Finding, judged, ok, problem, undecided
from decoding.measure.proof.greedy import cut_at_ends, ends, greedy_identity, near_tie
from decoding.measure.proof.reference import EngineText, Reference
from decoding.prompts import encode_continuation, encode_prompt
from decoding.rules.tree import common_length
from trainer.servers.answers import Completion, CompletionRequest, Prompt

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel

TEMPLATE = "token ids of the prompt"
_CONTEXT = 4
"""Tokens shown before and after the first difference."""
_COMPARED = 4
"""Number of prompts to compare; more are not needed, because a template treats all of them alike."""

Messages = list[dict[str, str]]


class HeldOutPrompt(NamedTuple):
    """A held-out prompt. ``ids`` are its local token ids. ``messages`` is None for plain text to continue."""

    text: str
    messages: Messages | None
    ids: tuple[int, ...]
    tools: Tools | None = None

    def sent(self, as_ids: bool) -> tuple[Prompt, dict[str, Any]]:
        """Return the prompt for a request, and the other fields that the request needs."""
        if as_ids or self.messages is None:
            return self.ids if as_ids else self.text, {}
        return tuple(self.messages), {"tools": self.tools} if self.tools else {}


class ServerPrompt(NamedTuple):
    """A prompt as the server read it: its token ids and its length; each is None if it is not reported."""

    ids: tuple[int, ...] | None
    length: int | None


def ask_rendered(served: "ServedModel", prompts: Sequence[HeldOutPrompt]) -> list[ServerPrompt]:
    """Return how the server read the first prompts; for each, one token is requested."""
    few = [prompt.sent(as_ids=False) for prompt in prompts[:_COMPARED]]
    requests = [CompletionRequest(prompt, 1, controls=fields) for prompt, fields in few]
    answers = [(answer.prompt_ids, answer.prompt_tokens) for answer in served.many(requests)]
    return [ServerPrompt(ids, length if ids is None else len(ids)) for ids, length in answers]


def compare_rendered(
    prompts: Sequence[HeldOutPrompt], rendered: Sequence[ServerPrompt], tokenizer: PreTrainedTokenizerBase
) -> Finding:
    """Compare the tokens of each prompt, and explain the first difference."""
    compared = 0
    for prompt, server in zip(prompts, rendered, strict=False):
        if server.ids is not None and server.ids != prompt.ids:
            told, remedy = _explained(prompt, server.ids, tokenizer)
            return problem(TEMPLATE, told, remedy, ours=list(prompt.ids), server=list(server.ids))
        if server.length is not None and server.length != len(prompt.ids):
            told = f"the server reads {server.length} tokens in a prompt of {len(prompt.ids)} tokens"
            likely = [(name, remedy) for name, remedy, ids in _variants(prompt, tokenizer) if len(ids) == server.length]
            if len(likely) == 1:
                return problem(TEMPLATE, f"{told}, as if the prompt {likely[0][0]}", likely[0][1])
            return problem(TEMPLATE, told, "use this chat template, system prompt and thinking mode in the server")
        compared += server.length is not None
    if not compared:
        return undecided(TEMPLATE, "the server reports neither the token ids nor the length of prompts")
    by_ids = all(server.ids is not None for server in rendered)
    return ok(TEMPLATE, f"{compared} prompts have the same {'token ids' if by_ids else 'number of tokens'}")


def _variants(prompt: HeldOutPrompt, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield common wrong ways to render a prompt, each as a description, a remedy, and the token ids."""
    bos = tokenizer.bos_token_id
    if bos is not None and prompt.ids[:1] == (bos,):
        yield f"lacks the BOS ({bos})", "start the server with the tokenizer that was used in training", prompt.ids[1:]
    if bos is not None:
        once = "let only the template or the tokenizer add BOS: send the rendered text with add_special_tokens false"
        twice = " twice" if prompt.ids[:1] == (bos,) else ""
        yield f"begins with BOS ({bos}){twice}", once, (int(bos), *prompt.ids)
    if prompt.messages is None or tokenizer.chat_template is None:
        return

    def render(**options: Any) -> tuple[int, ...]:
        options |= {"tools": prompt.tools, "return_dict": True}
        rendered: Any = tokenizer.apply_chat_template(list(prompt.messages or ()), **options)
        return tuple(rendered["input_ids"])

    ask = "let the server add the generation prompt (add_generation_prompt true), or use its chat endpoint"
    yield "lacks the generation prompt", ask, render(add_generation_prompt=False)
    for mode, here in (("on", "false"), ("off", "true")):
        remedy = (
            f"use one mode in training and serving: chat_template_kwargs {{'enable_thinking': {here}}} in the request "
            "selects the mode used here"
        )
        ids = render(add_generation_prompt=True, enable_thinking=mode == "on")
        yield f"has the thinking mode {mode}", remedy, ids
    plain = encode_prompt(prompt.messages, tokenizer, chat=False)
    yield "lacks the chat template", "start the server with the target's chat template (--chat-template)", plain


def _explained(prompt: HeldOutPrompt, server: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the first differing token in context, with the cause if known, and the remedy."""
    index = common_length(prompt.ids, server)
    before = str(tokenizer.decode(list(prompt.ids[max(0, index - _CONTEXT) : index])))
    shown = []
    for tokens in (server, prompt.ids):
        text = str(tokenizer.decode(list(tokens[index : index + _CONTEXT])))
        shown.append(f"{tokens[index]} ({text!r}…)" if index < len(tokens) else "missing (the prompt ends)")
    where = f"after {before!r}, token {index} is {shown[0]}, but {shown[1]} here"
    for name, remedy, ids in _variants(prompt, tokenizer):
        if ids == server:
            return f"the server's prompt {name}: {where}", remedy
    rest = prompt.ids[index:]
    if len(server) > len(prompt.ids) and server[len(server) - len(rest) :] == rest:
        added = server[index : len(server) - len(rest)]
        return (
            f"the server adds {len(added)} tokens to the prompt, {str(tokenizer.decode(list(added)))!r}: {where}",
            "train with this system prompt, or send the system prompt of the training (an empty system message, or "
            "another --chat-template)",
        )
    return (f"the server renders the prompt differently: {where}", "serve with the tokenizer and template of training")


TEXT = "the target's greedy text"
_OTHER_END = (
    "use the same end-of-text tokens on both sides: eos_token_id in the target's generation_config.json, and no "
    "ignore_eos or stop strings in requests"
)
_OTHER_DTYPE = "load the target in the server's dtype (--dtype), or serve it in fp32 to compare"
_OTHER_MODEL = (
    "serve exactly the target that the speculator was trained for: same revision, no other adapter or quantisation, "
    "no penalties in the server's generation config; 'headstart verify' says whether a server only rounds differently"
)


def compare_texts(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    answers: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> Finding:
    """Compare greedy answers with the target token by token, after the same previous tokens.

    ``reference`` is the target at temperature 1, with its end-of-text tokens. ``ours`` are the target's greedy texts;
    they help to tokenize answers that came as text only.
    """
    eos, together = reference.eos_token_ids, zip(prompts, ours, answers, strict=True)
    # If the server parsed calls of tools, the text that the model wrote is not known.
    known = [row for row in together if row[2].token_ids is not None or not row[2].message.get("tool_calls")]
    if not known:
        return undecided(TEXT, "the server parsed all answers as calls of tools, so their texts are not known")
    texts = [EngineText(tuple(prompt), tokens_of(answer, text, tokenizer, eos)) for prompt, text, answer in known]
    identity = greedy_identity(reference, cut_at_ends(reference, texts, max_new_tokens))
    fault, dtype = identity.figures["first_fault"], reference.target.dtype
    if fault is not None:  # texts of another model also end elsewhere
        fp32 = dtype == torch.float32 and identity.figures["widest_fault"] <= near_tie(torch.bfloat16)
        remedy = _OTHER_DTYPE if fp32 else _OTHER_END if {fault["token"], fault["best"]} & set(eos) else _OTHER_MODEL
        return replace(identity, check=TEXT, remedy=remedy)
    rows = zip(texts, known, strict=True)  # a server may also stop because its context is full
    whole = [text for text, (_, _, answer) in rows if answer.finish_reason != "length" or set(text.tokens) & set(eos)]
    ended = ends(reference, whole, max_new_tokens)
    if not ended.passed:
        return replace(ended, check=TEXT, remedy=_OTHER_END)
    return replace(identity, check=TEXT)


def tokens_of(
    answer: Completion, ours: Sequence[int], tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> tuple[int, ...]:
    """Return an answer's tokens, including the EOS that ended the answer, even if the server omits this token.

    If the answer is only text, our tokens are used as far as they spell the text, and only the rest is tokenized.
    Otherwise the tokens could differ from ours even before the place where the texts differ.
    """
    tokens = list(answer.token_ids or ())
    if answer.token_ids is None:
        spelled = [str(tokenizer.decode(list(ours[:n]), skip_special_tokens=True)) for n in range(len(ours) + 1)]
        same = max(count for count, text in enumerate(spelled) if answer.text.startswith(text))
        rest = answer.text[len(spelled[same]) :]
        alone: list[int] = tokenizer(rest, add_special_tokens=False)["input_ids"]
        tokens = [*ours[:same], *(encode_continuation(rest, tokenizer) if same else alone)]
    return answer.with_end(tokens, eos)


CHECK = "rounding or rule"
_BEST, _MOST_WALKS = 20, 16
"""Number of tokens whose scores are compared at a place, and number of a text's differences that are scored at both
widths.
"""
_MOST_ROUNDING = 4 * near_tie(torch.bfloat16)
"""If the width of a pass changes a gap by more than this, the server has a fault: rounding to 8 bits, as in bf16,
changes gaps less.
"""
Scores = Mapping[int, float]
"""Log-probabilities of the best tokens by id."""


class Scorer(NamedTuple):
    """A server that scores texts. ``controls`` switch off the server's own sampling controls.

    ``forced`` is a token of whole characters: every request makes the server write it, because llama.cpp leaves out the
    scores of a token that ends inside a character.
    """

    served: "ServedModel"
    controls: Mapping[str, object]
    forced: int

    def scores(self, text: EngineText, last: int, width: int) -> dict[int, Scores]:
        """Return the scores of tokens, made in passes over ``width`` tokens. Keys are places in the text (from 0).

        The last pass scores place ``last``. The first pass after the prompt may be narrower, so its scores are left
        out. Raises UserError if the server reports no scores, or computes another number of tokens than requested.
        """
        scores_at, known = dict[int, Scores](), 0
        for position in (0, *range(last % width or width, last + 1, width)):
            controls = {**self.controls, "cache_prompt": position > 0, "logit_bias": {str(self.forced): 1000}}
            prompt = (*text.prompt, *text.tokens[:position])
            (answer,) = self.served.many([CompletionRequest(prompt, 1, logprobs=_BEST, controls=controls)])
            computed = len(prompt) - (answer.cached or 0)
            if not answer.likely:
                raise UserError("it reports no scores by token id")
            if position and computed != position - known:
                raise UserError(f"it computed {computed} tokens at a time, not {position - known}")
            if position - known == width:
                scores_at[position] = answer.likely
            known = position
        return scores_at


def rounding_or_rule(scorer: Scorer, texts: Sequence[EngineText], width: int, ends: Sequence[int]) -> Finding:
    """Score greedy texts in passes over one token and over ``width`` tokens, and judge the differences.

    A difference is a token that does not have the best score at its place in passes over one token. Rounding explains
    the differences if two conditions are met. First, the largest gap between the score of a difference and the best
    score is at most the largest change of a gap between two scores that another width of the pass causes. Second, this
    change is small enough to be rounding. ``ends`` are the ids that end a text. If the server
    cannot score texts, the finding is undecided.
    """
    gaps, changes, turned, places = list[float](), list[float](), 0, 0
    try:
        for text in texts:
            last = len(text.tokens) - 1
            single = scorer.scores(text, last, 1)
            places += len(single)
            pairs = {at: {text.tokens[at], _best(scores)} for at, scores in single.items()}
            differences = [at for at, pair in pairs.items() if len(pair) > 1 and not pair <= set(ends)]
            gaps += [single[at][_best(single[at])] - single[at].get(text.tokens[at], -math.inf) for at in differences]
            for end in {last, *differences[:_MOST_WALKS]}:
                for at, scores in scorer.scores(text, end, width).items():
                    moved = [scores[token] - single[at][token] for token in scores.keys() & single[at].keys()]
                    changes.append(max(moved) - min(moved) if moved else math.inf)
                    turned += _best(scores) != _best(single[at])
    except UserError as error:
        return undecided(
            CHECK, f"the server does not score its texts without a draft, so this check is undecided: {error}"
        )
    widest, most = max(gaps, default=0.0), max(changes, default=0.0)
    passed, equal = widest <= most <= _MOST_ROUNDING, places - len(gaps)
    told = f"in passes over one token, without a draft, the server also writes {equal:,} of these {places:,} tokens"
    if gaps:
        told += f"; the scores of the other tokens are up to {widest:.3g} below the best score"
    told += (
        f"; passes over {width} tokens change gaps between scores by up to {most:.3g}, and the best token changes at "
    )
    verdict = "the texts differ by rounding, not by the rule" if passed else "the rule, or its cache, is wrong"
    told += f"{turned} of {len(changes):,} places: {verdict}"
    figures = {"texts": len(texts), "places": places, "differences": len(gaps), "widest_gap": widest, "width": width}
    figures |= {"places_at_width": len(changes), "other_best_at_width": turned, "largest_change": most}
    return judged(CHECK, passed, told, **figures)


def explained(identity: Finding, evidence: Finding, quantised: bool) -> Finding:
    """Return the finding of `greedy_identity` as a note if rounding in the server explains its faults.

    ``evidence`` is the finding of `rounding_or_rule`, which says what the width of a pass changes. For ``quantised``
    weights a near-tie of bf16 also counts as rounding, because llama.cpp's kernels for such weights round activations
    to 8 bits.
    """
    rounding = max(evidence.figures.get("largest_change", 0.0), near_tie(torch.bfloat16) if quantised else 0.0)
    if evidence.status != "ok" or identity.figures["widest_fault"] > rounding:
        return identity
    told = f"{identity.found}; rounding in the server explains gaps of up to {rounding:.3g}"
    remedy = f"see '{CHECK}'; serve the weights in f32 to compare without rounding"
    return replace(identity, status="note", found=told, remedy=remedy)


def _best(scores: Scores) -> int:
    return max(scores, key=lambda token: scores[token])
