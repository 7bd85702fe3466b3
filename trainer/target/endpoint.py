"""A target that is served: OpenAI-compatible endpoints, asked by `openai`'s client, many conversations at a time.

The server templates the messages, samples with its own generator, and returns texts, not tokens. It may change the
model's distribution unseen, for example by a top-k in its generation config.
"""

import asyncio
import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

from openai import APIError, AsyncOpenAI, BaseModel, omit
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam

from decoding.model.loading import first_line
from trainer.data.answers import Answered, Outcome, Problem, SetAside
from trainer.data.chat import whole_characters
from trainer.data.conversations import Conversation, Key, Message, answer_message, is_empty
from trainer.target.connection import Connection, Served
from trainer.target.pool import Member, Pool, is_unreached, may_pass, pause_after

HOPELESS = 50
"""Failures in a row that end the run: the endpoints answer with errors alone, or every request is wrong."""
_LOOK = 1.0
"""Seconds after which the caller is told how it stands, even if no conversation has ended."""
_SEEDS_APART = 1_000_003  # of turns and of tries; servers take seeds of 31 bits


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Served models, all of the same target, with the settings of the requests to them."""

    endpoints: tuple[Served, ...]
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    patience: float = 600.0
    """Seconds to wait for endpoints that have answered before, once none can be reached."""

    @property
    def first(self) -> Served:
        """An endpoint: they differ by their addresses alone."""
        return self.endpoints[0]


class _Reply(NamedTuple):
    """An answer of the endpoint."""

    message: Message
    tokens: int
    """0 where the endpoint does not count them."""
    truncated: bool
    model: str | None


class _NoAnswer(Exception):
    """A reply came, but without text to train on."""

    def __init__(self, problem: Problem, reason: str) -> None:
        super().__init__(reason)
        self.problem: Problem = problem


class EndpointBackend:
    """Asks endpoints for answers, several conversations at once, the turns of each one after the other.

    A request that may succeed later (429, 500 and above, no answer in time) is tried again after a growing pause, at
    most ``retries`` times, as are empty answers and malformed replies; a request that did not reach an endpoint goes to
    another, or waits, and counts as no try. A request that every endpoint refuses is set aside. A wrong key or an
    unknown model ends the run. See `Pool` for the choice among several endpoints.
    """

    def __init__(self, asked: Asked, tell: Callable[[str], None] = lambda line: None) -> None:
        """Check the endpoints and send nothing. ``tell`` is called with a line when an endpoint goes or comes back."""
        self._asked = asked
        connections = [Connection(served, repeats=True) for served in asked.endpoints]
        self._pool = Pool(connections, asked.first.concurrency, asked.first.retries, asked.patience, tell)

    @property
    def encoder(self) -> None:
        """Nothing: only the servers know the tokenizer."""

    @property
    def health(self) -> str:
        """Words on the number of endpoints that answer, such as "1 of 2 endpoints"; empty where there is one."""
        return self._pool.health

    def account(self) -> list[str]:
        """Return a line on each of several endpoints."""
        return self._pool.account()

    def outcomes(
        self, conversations: Sequence[Conversation], done: Container[Key], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield finished conversations; raise a fatal error after yielding those that ended with it."""
        waiting = iter([conversation for conversation in conversations if conversation.key not in done])
        running: set[asyncio.Task[Outcome]] = set()
        failures = 0
        with asyncio.Runner() as runner:
            try:
                runner.run(self._pool.check_same_model(self._asked.first.model))
                while (ended := runner.run(self._some(waiting, running))) or running:
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
        await self._pool.close()

    async def _some(
        self, waiting: Iterator[Conversation], running: set[asyncio.Task[Outcome]]
    ) -> set[asyncio.Task[Outcome]]:
        """Start as many conversations as the endpoints take at a time; return those that end within `_LOOK` seconds."""
        for conversation in islice(waiting, self._pool.size - len(running)):
            running.add(asyncio.create_task(self._converse(conversation)))
        if not running:
            return set()
        ended, _ = await asyncio.wait(running, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
        running -= ended
        return ended

    async def _converse(self, conversation: Conversation) -> Outcome:
        replies: list[_Reply] = []
        try:
            while len(replies) < len(conversation.turns) and not (replies and replies[-1].truncated):
                replies.append(await self._reply(conversation, [reply.message for reply in replies]))
        except _NoAnswer as error:
            return SetAside(conversation, error.problem, str(error), again=True)
        answers, tokens = tuple(reply.message for reply in replies), sum(reply.tokens for reply in replies)
        return Answered(conversation, answers, tokens, replies[-1].truncated, model=replies[-1].model)

    async def _reply(self, conversation: Conversation, answers: Sequence[Message]) -> _Reply:
        """Return the next answer; its seed follows from row, turn and useless answers before, not from the endpoint.

        `_NoAnswer` after the last try, and where every endpoint that can be reached refuses the request.
        """
        refused: list[Member] = []
        problem = _NoAnswer("failed", "never asked")
        tries = useless = 0
        while tries <= self._asked.first.retries:
            member = await self._pool.take(refused)
            if member is None:
                break
            seed = self._asked.seed + conversation.index + _SEEDS_APART * (len(answers) + useless)
            try:
                return await self._ask(member, conversation, answers, seed % 2**31)
            except _NoAnswer as error:
                problem = error
                tries, useless = tries + 1, useless + 1
            except APIError as error:
                if is_unreached(error):
                    continue
                problem = _NoAnswer("failed", member.connection.explained(error))
                if may_pass(error):
                    tries += 1
                    await asyncio.sleep(pause_after(error, tries) if tries <= self._asked.first.retries else 0)
                else:
                    refused.append(member)
        raise problem

    async def _ask(self, member: Member, conversation: Conversation, answers: Sequence[Message], seed: int) -> _Reply:
        """Ask an endpoint once, and tell the pool how it did."""
        try:
            reply = _read(await self._request(member.connection.client, conversation, answers, seed))
        except json.JSONDecodeError as error:
            await self._pool.replied(member)
            raise _NoAnswer("failed", f"the endpoint sent what is no JSON: {first_line(error)}") from error
        except APIError as error:
            if fatal := member.connection.fatal(error):
                raise fatal from None
            await (self._pool.failed(member, error) if may_pass(error) else self._pool.refused(member, error))
            raise
        except _NoAnswer:
            await self._pool.replied(member)
            raise
        await self._pool.replied(member)
        return reply

    async def _request(
        self, client: AsyncOpenAI, conversation: Conversation, answers: Sequence[Message], seed: int
    ) -> ChatCompletion | Completion:
        asked = self._asked
        if not conversation.chat:
            return await client.completions.create(
                model=asked.first.model,
                prompt=conversation.text,
                temperature=asked.temperature,
                top_p=asked.top_p,
                max_tokens=asked.max_new_tokens,
                seed=seed,
            )
        return await client.chat.completions.create(
            model=asked.first.model,
            messages=cast(list[ChatCompletionMessageParam], conversation.open_after(answers)),
            tools=cast(list[ChatCompletionToolParam], conversation.tools) if conversation.tools else omit,
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
    held = holder.to_dict(mode="python", warnings=False) if isinstance(holder, BaseModel) else {}
    truncated = getattr(choices[0], "finish_reason", None) == "length"

    def text(*names: str) -> str:
        found = (value for name in names if isinstance(value := held.get(name), str) and value.strip())
        return whole_characters(next(found, ""), truncated)

    calls = called if isinstance(called := held.get("tool_calls"), list) else None
    reasoning = text("reasoning_content", "reasoning")
    message = answer_message(text("content", "text"), reasoning_content=reasoning, tool_calls=calls)
    if is_empty(message):
        raise _NoAnswer("empty", "the answer is empty")
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # neither the next request nor a row for training can hold it
        raise _NoAnswer("failed", f"the answer holds half a character ({error.reason})") from error
    tokens, model = getattr(completion.usage, "completion_tokens", None), getattr(completion, "model", None)
    return _Reply(message, tokens if isinstance(tokens, int) else 0, truncated, model)
