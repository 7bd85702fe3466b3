"""A target that is served: any OpenAI-compatible endpoint, asked by `openai`'s client, many conversations at a time.

The server templates the messages, samples with its own generator, and returns texts, not tokens. It may change the
model's distribution unseen, for example by a top-k in its generation config.
"""

import asyncio
import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
)
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import HttpUrl, ValidationError

from decoding.model.loading import first_line
from trainer.data.answers import Answered, Outcome, Problem, SetAside
from trainer.data.chat import whole_characters
from trainer.data.conversations import Conversation, Key

HOPELESS = 50
"""Failures in a row that end the run: the endpoint is down, or every request is wrong."""
_SEEDS_APART = 1_000_003  # of turns and of tries; servers take seeds of 31 bits


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A served model with the settings of its requests."""

    address: str
    """The server's base address, which mostly ends in /v1."""
    model: str
    """The server's name for the model."""
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    concurrency: int
    """Requests under way at a time."""
    retries: int
    """Tries after the first."""
    timeout: float
    """Seconds to wait for one answer."""
    api_key_variable: str
    """The environment variable with the key."""


class _Reply(NamedTuple):
    """An answer of the endpoint."""

    text: str
    tokens: int
    """0 where the endpoint does not count them."""
    truncated: bool


class _NoAnswer(Exception):
    """A reply came, but without text to train on."""

    def __init__(self, problem: Problem, reason: str) -> None:
        super().__init__(reason)
        self.problem: Problem = problem


class EndpointBackend:
    """Asks an endpoint for answers, several conversations at once, the turns of each one after the other.

    `openai`'s client repeats requests that may succeed later (429, 500 and above, timeouts), with growing delays;
    empty answers and malformed replies are asked for again here. A wrong key or an unknown model ends the run.
    """

    def __init__(self, asked: Endpoint) -> None:
        for name, least in (("concurrency", 1), ("retries", 0), ("timeout", 0.001)):
            if getattr(asked, name) < least:
                raise ValueError(f"{name} is {getattr(asked, name)}: give at least {least}")
        self._asked = asked
        self._key = os.environ.get(asked.api_key_variable)
        if self._key and not all("!" <= character <= "~" for character in self._key):
            raise ValueError(
                f"the key in the environment variable {asked.api_key_variable} has a blank, a line break or a "
                "character that is not ASCII in it: copy the key into it once more"
            )
        self._client = AsyncOpenAI(
            base_url=_checked(asked.address),
            api_key=self._key or "none",
            timeout=asked.timeout,
            max_retries=asked.retries,
        )

    def outcomes(
        self, conversations: Sequence[Conversation], done: Container[Key], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield finished conversations; raise a fatal error after yielding those that ended with it."""
        waiting = iter([conversation for conversation in conversations if conversation.key not in done])
        running: set[asyncio.Task[Outcome]] = set()
        failures = 0
        with asyncio.Runner() as runner:
            try:
                while ended := runner.run(self._some(waiting, running)):
                    finished = [task.result() for task in ended if task.exception() is None]
                    on_tokens(sum(outcome.tokens for outcome in finished if isinstance(outcome, Answered)))
                    yield finished
                    for task in ended:
                        outcome = task.result()
                        failures = failures + 1 if isinstance(outcome, SetAside) else 0
                        if isinstance(outcome, SetAside) and failures == HOPELESS:
                            raise ValueError(
                                f"{failures} conversations failed one after the other, the last one so: "
                                f"{outcome.reason}; see to the endpoint, then start the same command again"
                            )
            finally:
                runner.run(self._close(running))

    async def _close(self, running: set[asyncio.Task[Outcome]]) -> None:
        """Cancel the running tasks and close the connections; their errors are collected, or Python prints them."""
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    async def _some(
        self, waiting: Iterator[Conversation], running: set[asyncio.Task[Outcome]]
    ) -> set[asyncio.Task[Outcome]]:
        """Start conversations up to ``concurrency`` and wait for the next to end; an empty set when none is left."""
        for conversation in waiting:
            running.add(asyncio.create_task(self._converse(conversation)))
            if len(running) >= self._asked.concurrency:
                break
        if not running:
            return set()
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running -= ended
        return ended

    async def _converse(self, conversation: Conversation) -> Outcome:
        replies: list[_Reply] = []
        try:
            while len(replies) < len(conversation.turns) and not (replies and replies[-1].truncated):
                replies.append(await self._reply(conversation, [reply.text for reply in replies]))
        except _NoAnswer as error:
            return SetAside(conversation, error.problem, str(error), again=True)
        except APIError as error:
            return SetAside(conversation, "failed", self._explained(error), again=True)
        texts, tokens = tuple(reply.text for reply in replies), sum(reply.tokens for reply in replies)
        return Answered(conversation, texts, tokens, replies[-1].truncated)

    async def _reply(self, conversation: Conversation, answers: Sequence[str]) -> _Reply:
        """Return the next answer; each try has a seed of its own, or an empty answer would stay empty."""
        problem = _NoAnswer("failed", "never asked")
        for attempt in range(self._asked.retries + 1):
            seed = self._asked.seed + conversation.index + _SEEDS_APART * (len(answers) + attempt)
            try:
                return await self._ask(conversation, answers, seed % 2**31)
            except _NoAnswer as error:
                problem = error
        raise problem

    async def _ask(self, conversation: Conversation, answers: Sequence[str], seed: int) -> _Reply:
        try:
            return _read(await self._request(conversation, answers, seed))
        except json.JSONDecodeError as error:
            raise _NoAnswer("failed", f"the endpoint sent what is no JSON: {first_line(error)}") from error
        except (AuthenticationError, PermissionDeniedError) as error:
            raise ValueError(
                f"the endpoint refuses the key (HTTP {error.status_code}): put the right one into the environment "
                f"variable {self._asked.api_key_variable}"
            ) from None  # the server may repeat the key, which a traceback would show
        except NotFoundError:
            raise ValueError(
                f"the endpoint knows no model {self._asked.model!r}, or has nothing at this address (HTTP 404): "
                "check --model, and that --endpoint is the server's base address, which mostly ends in /v1"
            ) from None

    async def _request(
        self, conversation: Conversation, answers: Sequence[str], seed: int
    ) -> ChatCompletion | Completion:
        asked = self._asked
        if not conversation.chat:
            return await self._client.completions.create(
                model=asked.model,
                prompt=conversation.text,
                temperature=asked.temperature,
                top_p=asked.top_p,
                max_tokens=asked.max_new_tokens,
                seed=seed,
            )
        return await self._client.chat.completions.create(
            model=asked.model,
            messages=cast(list[ChatCompletionMessageParam], conversation.open_after(answers)),
            temperature=asked.temperature,
            top_p=asked.top_p,
            max_tokens=asked.max_new_tokens,
            seed=seed,
        )

    def _explained(self, error: APIError) -> str:
        """Return the error in one short line, without the key in case the server repeats it."""
        if isinstance(error, APITimeoutError):
            return f"no answer within {self._asked.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return f"no connection: {first_line(error.__cause__ or error)}"
        status = f"HTTP {error.status_code}: " if isinstance(error, APIStatusError) else ""
        reason = first_line(error).replace(self._key, "[the key]") if self._key else first_line(error)
        return f"{status}{reason[:300]}"  # cut after the replacement, which would not find half a key


def _checked(address: str) -> str:
    """Return the endpoint's address; ValueError for a wrong one, without repeating it: it may hold a password."""
    try:
        return str(HttpUrl(address))
    except ValidationError:
        raise ValueError(
            "--endpoint is not the address of a server: give one such as http://localhost:8000/v1"
        ) from None


def _read(completion: ChatCompletion | Completion) -> _Reply:
    """Return the reply in a completion; neither the endpoint nor the client promises that it keeps to the schema."""
    choices: Any = getattr(completion, "choices", None)
    if not isinstance(choices, list) or not choices:
        raise _NoAnswer("failed", "what the endpoint sent is no completion")
    holder = getattr(choices[0], "message", choices[0])  # a chat's text stands a level deeper
    text = getattr(holder, "content", getattr(holder, "text", None))
    truncated = getattr(choices[0], "finish_reason", None) == "length"
    answer = whole_characters(text, truncated) if isinstance(text, str) else ""
    if not answer.strip():
        raise _NoAnswer("empty", "the answer is empty")
    tokens = getattr(completion.usage, "completion_tokens", None)
    return _Reply(answer, tokens if isinstance(tokens, int) else 0, truncated)
