"""Requests to a served model and its answers as plain values, without `openai`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from decoding.errors import UserError, first_line

CONTROLS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values that switch off controls that a server may take from the model's generation config.

vLLM, SGLang and llama.cpp all accept -1 for no top-k; SGLang rejects 0.
"""
Prompt = str | tuple[int, ...] | tuple[Mapping[str, str], ...]
"""Text or token ids to continue, or the messages of a chat."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request for a completion."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    """Number of best tokens to report at each position, besides the written token; None for no log-probabilities."""
    controls: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as ``top_k``, under the names that the server uses."""


class Completion(NamedTuple):
    """A served model's answer. Token fields are None if the server does not report them.

    ``token_ids`` may or may not end with the end-of-text token: servers differ. ``prompt_ids`` is the prompt as the
    server read it. ``prompt_tokens`` and ``tokens`` are the lengths of prompt and answer. ``message`` is the chat
    message as it was received. ``model`` is the server's name for the model that answered. ``streamed`` means that the
    answer came in events. ``cached`` counts the prompt's tokens that were not computed again. ``likely`` contains the
    log-probabilities of the best first tokens by id.
    """

    text: str
    token_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    finish_reason: str | None
    prompt_tokens: int | None = None
    tokens: int | None = None
    message: Mapping[str, Any] = {}
    model: str | None = None
    streamed: bool = False
    cached: int | None = None
    likely: Mapping[int, float] = {}

    def with_end(self, tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
        """Return the answer's tokens with the end token that ended it, even if the server omits this token."""
        omitted = self.finish_reason == "stop" and ends and not set(tokens) & set(ends)
        return (*tokens, ends[0]) if omitted else tuple(tokens)


def read_completion(sent: str | bytes) -> Completion:
    """Parse a server's response; raise UserError if it is not a completion."""
    try:
        response = json.loads(sent)
    except ValueError as error:
        raise UserError(f"the endpoint's response is not JSON ({first_line(error)})", "check --endpoint") from None
    return completion_of(response)


def completion_of(response: Any, streamed: bool = False) -> Completion:
    """Return the completion in a response, or in the joined events of a stream; raise UserError if there is none.

    Streams of llama.cpp leave out the ids of tokens that end inside a character. If ids are missing, the completion has
    no token ids at all.
    """
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise UserError("the endpoint's response is not a completion", "check --endpoint and --model")
    message = told if isinstance(told := choice.get("message", choice.get("delta")), dict) else {}
    if isinstance(calls := message.get("tool_calls"), list):  # in streams the choices are numbered
        for call in calls:
            if isinstance(call, dict):
                call.pop("index", None)
    text = message.get("content") if message else choice.get("text")
    logprobs = told if isinstance(told := choice.get("logprobs"), dict) else {}
    content = [entry for entry in logprobs.get("content") or () if isinstance(entry, dict)]
    best = told if content and isinstance(told := content[0].get("top_logprobs"), list) else []
    verbose = told if isinstance(told := response.get("__verbose"), dict) else {}  # llama.cpp
    places = choice.get("token_ids"), choice.get("response_token_ids"), choice.get("tokens"), verbose.get("tokens")
    ids = next(filter(None, map(_integers, (*places, [entry.get("id") for entry in content]))), None)
    usage = told if isinstance(told := response.get("usage"), dict) else {}
    counted = _count(usage, "completion_tokens")
    if streamed and ids is not None and counted not in (None, len(ids)):
        ids = None
    return Completion(
        text=text if isinstance(text, str) else "",
        token_ids=ids,
        prompt_ids=_integers(choice.get("prompt_token_ids")) or _integers(response.get("prompt_token_ids")),
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=_count(usage, "prompt_tokens"),
        tokens=counted if ids is None else len(ids),
        message=message,
        model=response.get("model"),
        streamed=streamed,
        cached=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
        likely={
            entry["id"]: entry["logprob"] for entry in best if isinstance(entry, dict) and type(entry.get("id")) is int
        },
    )


_REPLACED = {"id", "object", "created", "model", "usage", "metrics", "role", "type", "name"}
_REPLACED |= {"finish_reason", "prompt_token_ids"}
"""Fields that are complete in each event that contains them; other texts and lists continue the texts and lists of
earlier events.
"""


def join_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the events of a stream as one response, with joined texts, calls and token ids."""
    whole: dict[str, Any] = {}
    for event in events:
        _join(whole, event)
    return whole


def _join(held: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Continue the fields of ``held`` in place, because copies would take seconds for an answer of 32,000 tokens."""
    for name, value in more.items():
        kind = type(value)
        if name in _REPLACED or kind not in (str, list, dict):
            held[name] = held.get(name) if value in (None, "", []) else value
            continue
        if type(held.get(name)) is not kind:
            held[name] = kind()
        if kind is dict:
            _join(held[name], value)
        elif kind is str:
            held[name] += value
        else:
            for item in value:
                _add(held[name], item)


def _add(held: list[Any], item: Any) -> None:
    """Append to a list, or continue the object with the same ``index``."""
    if isinstance(item, dict) and "index" in item:
        same = next((one for one in held if isinstance(one, dict) and one.get("index") == item["index"]), None)
        if same is None:
            held.append(same := {})
        _join(same, item)
    else:
        held.append(item)


class StreamedAnswer(NamedTuple):
    """A streamed answer with the times of the request, of the last event, and of each event with text, on one clock.

    ``tokens`` is None if the server does not count tokens. ``passes[n]`` counts the target passes that accepted n of up
    to ``drafts`` drafted tokens. ``passes`` is empty if the server does not report these counts for each request.
    """

    begin: float
    end: float
    arrivals: tuple[float, ...]
    text: str
    tokens: int | None
    model: str | None
    passes: tuple[int, ...] = ()
    drafts: int = 0


def read_stream(begin: float, events: Sequence[tuple[float, Mapping[str, Any]]]) -> StreamedAnswer:
    """Return the answer in a stream's events, each with its time; raise UserError if the server does not stream."""
    if not any(event.get("choices") for _, event in events):
        raise UserError("the endpoint does not stream", "pass the address of a server that supports stream=true")
    texts = [(at, text) for at, event in events if (text := _streamed_text(event))]
    whole = join_events([event for _, event in events])
    metrics = told if isinstance(told := whole.get("metrics"), dict) else {}
    counted = told if isinstance(told := metrics.get("speculative_decoding"), dict) else {}
    passes = _integers(counted.get("acceptance_histogram")) or ()  # vLLM with --per-request-spec-decode-metrics
    return StreamedAnswer(
        begin,
        events[-1][0],
        tuple(at for at, _ in texts),
        "".join(text for _, text in texts),
        _count(whole.get("usage"), "completion_tokens"),
        model if isinstance(model := whole.get("model"), str) else None,
        passes,
        max(_count(counted, "num_spec_tokens") or 0, len(passes) - 1),
    )


def _streamed_text(event: Mapping[str, Any]) -> str:
    """Return the text that an event adds to an answer: text, reasoning, or tool calls as JSON."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = delta if isinstance(delta := choice.get("delta"), dict) else choice
    parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content", "text")]
    calls = delta.get("tool_calls")
    return "".join(part for part in parts if isinstance(part, str)) + (json.dumps(calls) if calls else "")


def _count(usage: Any, name: str) -> int | None:
    """Return a token count from an answer's usage."""
    tokens = usage.get(name) if isinstance(usage, dict) else None
    return tokens if type(tokens) is int else None


def _integers(values: Any) -> tuple[int, ...] | None:
    """Return a list of token ids as a tuple; None for anything else, including an empty list."""
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        return None
    return tuple(values)
