"""A target that is served: any OpenAI-compatible endpoint, asked by `openai`'s client, many conversations at a time.

The server templates the messages, samples with its own generator, and returns texts, not tokens. It may change the
model's distribution unseen, for example by a top-k in its generation config.
"""

import asyncio
import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from openai import APIError
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from decoding.model.loading import first_line
from trainer.data.answers import Answered, Outcome, Problem, SetAside
from trainer.data.chat import whole_characters
from trainer.data.conversations import Conversation, Key
from trainer.target.connection import Connection, Served

HOPELESS = 50
"""Failures in a row that end the run: the endpoint is down, or every request is wrong."""
_SEEDS_APART = 1_000_003  # of turns and of tries; servers take seeds of 31 bits


@dataclass(frozen=True, kw_only=True)
class Endpoint(Served):
    """A served model with the settings of its requests."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int


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
        self._asked = asked
        self._connection = Connection(asked)
        self._client = self._connection.client

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
            return SetAside(conversation, "failed", self._connection.explained(error), again=True)
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
        except APIError as error:
            if fatal := self._connection.fatal(error):
                raise fatal from None
            raise

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
