"""Requests to a served model and its answers, as plain values: read by those who compare, without `openai`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Prompt = str | tuple[int, ...] | tuple[Mapping[str, str], ...]
"""Text or token ids to continue, or the messages of a chat."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    """Number of best tokens to tell at each position beside the written one; None for no log-probabilities."""
    controls: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as ``top_k``, under the server's names."""


class Completion(NamedTuple):
    """A served model's answer. Fields of tokens are None if the server does not report them.

    ``token_ids`` may hold the end of the text as their last entry or leave it out: servers differ. ``prompt_ids``: the
    prompt as the server read it. ``prompt_tokens`` and ``tokens`` are the lengths of prompt and answer.
    """

    text: str
    token_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    finish_reason: str | None
    prompt_tokens: int | None = None
    tokens: int | None = None
