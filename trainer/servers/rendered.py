"""The prompt as the server reads it, compared with the local chat template's token ids."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.prompts import encode_prompt
from trainer.servers.answers import Asked
from trainer.servers.finding import TEMPLATE, Finding, equal, unknown

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel

_CONTEXT = 4
"""Tokens shown before and behind the first that differs."""
_ASKED = 4
"""Prompts whose rendering is compared; a template treats all alike."""

Messages = list[dict[str, str]]


class Question(NamedTuple):
    """A held-out prompt. ``messages`` None: a plain text to continue. ``ids``: its tokens by the local tokenizer."""

    text: str
    messages: Messages | None
    ids: tuple[int, ...]


class Rendered(NamedTuple):
    """A prompt as the server read it: its token ids, or where it does not tell them their number, or neither."""

    ids: tuple[int, ...] | None
    length: int | None


def ask_rendered(served: "ServedModel", questions: Sequence[Question]) -> list[Rendered]:
    """Return the server's reading of the first prompts, each by a request for one token, else by its /tokenize."""
    few = questions[:_ASKED]
    asked = [Asked(q.text if q.messages is None else tuple(q.messages), 1) for q in few]
    found = []
    for question, answer in zip(few, served.many(asked), strict=True):
        ids = answer.prompt_ids
        if ids is None:
            ids = served.tokenize(question.text if question.messages is None else question.messages)
        found.append(Rendered(ids, answer.prompt_tokens if ids is None else len(ids)))
    return found


def compare_rendered(
    questions: Sequence[Question], rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase
) -> Finding:
    """Compare each prompt's tokens; the first that differs is explained."""
    compared = 0
    for question, server in zip(questions, rendered, strict=False):
        if server.ids is not None and server.ids != question.ids:
            found, remedy = _explained(question, server.ids, tokenizer)
            return Finding(TEMPLATE, True, found, remedy, {"ours": list(question.ids), "server": list(server.ids)})
        if server.length is not None and server.length != len(question.ids):
            found, remedy = _explained_by_count(question, server.length, tokenizer)
            return Finding(TEMPLATE, True, found, remedy, {"ours": len(question.ids), "server": server.length})
        compared += server.length is not None
    if not compared:
        return unknown(TEMPLATE, "the server tells neither the token ids of a prompt nor their number")
    by_ids = all(server.ids is not None for server in rendered)
    return equal(TEMPLATE, f"{compared} prompts have the same {'token ids' if by_ids else 'number of tokens'}")


class _Variant(NamedTuple):
    """Another way to render a prompt, and what to do about a server that renders it so."""

    name: str
    remedy: str
    ids: tuple[int, ...]


def _variants(question: Question, tokenizer: PreTrainedTokenizerBase) -> Iterator[_Variant]:
    """Yield the renderings that are known to be mistaken for one another."""
    bos = tokenizer.bos_token_id
    if bos is not None:
        once = "let one of template and tokenizer add it: send the rendered text with add_special_tokens false"
        twice = question.ids[:1] == (bos,)
        yield _Variant(f"begins with BOS ({bos}){' twice' if twice else ''}", once, (int(bos), *question.ids))
        if twice:
            yield _Variant(f"lacks the BOS ({bos})", "serve the tokenizer that was trained with", question.ids[1:])
    if question.messages is None or tokenizer.chat_template is None:
        return
    ask = "let the server add the generation prompt (add_generation_prompt true), or send the conversation to its chat"
    yield _Variant("lacks the generation prompt", ask, _render(question, tokenizer, add_generation_prompt=False))
    for thinking in (True, False):
        switched = {True: "on", False: "off"}[thinking]
        remedy = (
            "use one mode in training and serving: chat_template_kwargs {'enable_thinking': "
            f"{'false' if thinking else 'true'}}} in the request makes the server render as here"
        )
        ids = _render(question, tokenizer, add_generation_prompt=True, enable_thinking=thinking)
        yield _Variant(f"has the thinking mode {switched}", remedy, ids)
    plain = encode_prompt(question.messages, tokenizer, chat=False)
    yield _Variant("has no chat template around it", "serve the target's chat template (--chat-template)", plain)


def _render(question: Question, tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[int, ...]:
    assert question.messages is not None
    rendered: Any = tokenizer.apply_chat_template(list(question.messages), return_dict=True, **options)
    return tuple(rendered["input_ids"])


def _explained(question: Question, server: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the first differing token in its context, with the cause where it is known, and the remedy."""
    where = _first_difference(question.ids, server, tokenizer)
    for variant in _variants(question, tokenizer):
        if variant.ids == server:
            return f"the server's prompt {variant.name}: {where}", variant.remedy
    if added := _added_before(question.ids, server, tokenizer):
        text = str(tokenizer.decode(list(added)))
        return (
            f"the server puts {len(added)} tokens into the prompt that are not here, {text!r}: {where}",
            "train on prompts with this system prompt, or send the request with the one trained with (an empty system "
            "message, or another --chat-template)",
        )
    if tokenizer.decode(list(server)) == tokenizer.decode(list(question.ids)):
        return (
            f"the server splits the same text into other tokens: {where}",
            "serve the tokenizer files of the target that was trained with",
        )
    return (
        f"the server renders another prompt: {where}",
        "serve the chat template of the target that was trained with (--chat-template), or train with the server's",
    )


def _explained_by_count(question: Question, count: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what a prompt's number of tokens tells, where the server does not tell the tokens themselves."""
    found = f"the server reads a prompt of {count} tokens where it has {len(question.ids)} here"
    likely = [variant for variant in _variants(question, tokenizer) if len(variant.ids) == count]
    if len(likely) == 1:
        return f"{found}, which is the number of one that {likely[0].name}", likely[0].remedy
    return (
        found,
        "compare the server's chat template, system prompt and thinking mode with the tokenizer's; a server with a "
        "/tokenize route shows the token",
    )


def _added_before(ours: Sequence[int], server: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return what the server has between a beginning and an end that both prompts share; empty if it lacks any."""
    begin = _shared(ours, server)
    rest = len(ours) - begin
    if len(server) <= len(ours) or tuple(server[len(server) - rest :]) != tuple(ours[begin:]):
        return ()
    return tuple(server[begin : len(server) - rest])


def _shared(ours: Sequence[int], server: Sequence[int]) -> int:
    """Return the number of first tokens that both have."""
    pairs = enumerate(zip(ours, server, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(server)))


def _first_difference(ours: Sequence[int], server: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    place = _shared(ours, server)
    before = str(tokenizer.decode(list(ours[max(0, place - _CONTEXT) : place])))
    return (
        f"behind {before!r}, token {place} is {_shown(server, place, tokenizer)}, here {_shown(ours, place, tokenizer)}"
    )


def _shown(tokens: Sequence[int], place: int, tokenizer: PreTrainedTokenizerBase) -> str:
    if place >= len(tokens):
        return "missing (the prompt ends)"
    text = str(tokenizer.decode(list(tokens[place : place + _CONTEXT])))
    return f"{tokens[place]} ({text!r}…)"
